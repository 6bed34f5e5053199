"""Neural functional networks' own tests, with layers of regauge in the place of theirs; their maps; their data.

    PEERS=FOLDER .venv/bin/python judges/nfn.py [PIECE-OF-A-NAME ...]

A test of `tests/test_layers.py` passes if its assertions hold with a net of regauge where the layer of nfn was. "same"
cases pass if parameters of regauge's layer make it the linear map of nfn's layer, on networks that were not used to
find them. "reads" cases pass if both libraries read the same networks from a population in nfn's layout.
"""

import io
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from judge import Case, Failed, Peer, judge
from populations import compare_cnns
from torch import Tensor, nn
from weight_nets import (
    LAYERS,
    Form,
    InPlace,
    Lists,
    Packing,
    express,
    load,
    named,
    pretend,
    replaced,
    require_close,
    run_test,
)

import regauge as rg
from regauge import weightspace as ws
from regauge.checkpoints.checkpoint import load as load_checkpoint
from regauge.checkpoints.writing import save
from regauge.core.element import Element, Value
from regauge.learn.layer_statistics import layer_statistics
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.zoo import import_zoo
from regauge.zoo.formats.folder import read_folder

PEER = Peer(
    "nfn",
    "https://github.com/AllanYangZhou/nfn",
    "ce783221fd7c511596220d805c7a5beccd764ee8",
    ("einops==0.8.1",),
    ("pandas", "functorch"),
)
FORM = Form(out=1, into=2, bias=1, channel=0)
SIZES = {"two layers": (3, 4, 2), "three layers": (3, 4, 5, 2), "five layers": (3, 4, 5, 3, 4, 2)}
"""Widths of the networks on which maps are compared."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    sys.path.insert(0, str(checkout))
    tests = load(checkout / "tests" / "test_layers.py", "nfn_tests")
    for name in ("test_NPLinear", "test_HNPLinear_2layer", "test_HNPLinear", "test_NPAttention"):
        for title in LAYERS:
            yield Case(f"test_layers.py::{name}, {title}", lambda name=name, title=title: in_place(tests, name, title))
    yield Case("test_layers.py::test_Pointwise, no layer", lambda: in_place(tests, "test_Pointwise", None))
    for kind in ("pytorch_default", "kaiming_normal"):
        yield Case(f"test_layers.py::test_init[{kind}], NFN", lambda kind=kind: initialized(tests, kind))
    yield Case("test_layers.py::test_StatFeaturizer, layer_statistics", lambda: statistics(tests))
    for layer in ("NPLinear", "HNPLinear", "Pointwise"):
        for title, widths in SIZES.items():
            for is_cnn in (False, True):
                kind = "CNN" if is_cnn else "MLP"
                yield Case(
                    f"same: {layer}, {kind} of {title}",
                    lambda layer=layer, widths=widths, is_cnn=is_cnn: same_map(layer, widths, is_cnn),
                )
    for kind in ("MLP", "CNN"):
        yield Case(f"same: apply_perm_to_params, {kind}", lambda kind=kind: same_action(tests, kind == "CNN"))
    helpers = load(checkout / "examples" / "basic_cnn" / "helpers.py", "helpers")
    yield Case("check_nfn_inv.py: the permuted CNN is aligned exactly", lambda: aligned(helpers))
    for title in LAYERS:
        yield Case(f"check_nfn_inv.py: main, {title}", lambda title=title: example(checkout, helpers, title))
    yield Case("reads: state_dict_to_tensors and back", lambda: tensors_and_back(helpers))
    yield Case("reads: ZooDataset", lambda: zoo(checkout))
    yield Case("reads: SirenDataset", lambda: sirens(checkout))


class Adapter(nn.Module):
    """A net in place of a layer of nfn, whatever it is called with."""

    def __init__(self, layer: str | None, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        # NPLinear(spec, in, out), Pointwise(spec, in, out), NPAttention(spec, channels, [heads]).
        self.is_whole = len(arguments) < 3 or arguments[1] in (arguments[2], 64)
        channels = 1 if self.is_whole else arguments[2]
        self.own = InPlace(FORM, None if layer is None else LAYERS[layer], channels=channels)

    def forward(self, features: Any) -> Any:
        from nfn.common import WeightSpaceFeatures

        weights, biases = self.own(tuple(features.weights), tuple(features.biases), is_whole=self.is_whole)
        return WeightSpaceFeatures(weights, biases)


def in_place(tests: Any, name: str, layer: str | None) -> str | None:
    """Run a test with a net of regauge in place of every layer."""
    kinds = ("NPLinear", "HNPLinear", "Pointwise", "NPAttention")
    with replaced(tests, dict.fromkeys(kinds, lambda *given, **_: Adapter(layer, given))):
        run_test(getattr(tests, name))
    return None


def initialized(tests: Any, kind: str) -> str:
    """The variance after five layers, which the test prints."""
    printed = io.StringIO()
    with replaced(tests, {"NPLinear": lambda *given, **_: Adapter("NFN", given)}), redirect_stdout(printed):
        run_test(tests.test_init, kind)
    found = float(printed.getvalue().rsplit(":", 1)[-1])
    if not 1e-2 < found < 1e2:
        raise Failed(f"the variance after five layers is {found}")
    return "the test prints the variance after five layers and asserts nothing; it is between 0.01 and 100"


def statistics(tests: Any) -> None:
    """Moments and quantiles of every tensor, value by value."""
    torch.manual_seed(0)
    tests.test_StatFeaturizer()
    params = tests.sample_params(10, 1, [10, 15, 13, 14, 12])
    theirs = tests.StatFeaturizer()(params)[:, 0].unflatten(1, (-1, 7)).double()
    order = [x[:, 0] for pair in params for x in pair]
    ours = torch.from_numpy(layer_statistics({f"{k}": x for k, x in enumerate(order)})).unflatten(1, (-1, 7)).double()
    counts = torch.tensor([x[0].numel() for x in order])
    ours[..., 1] = ours[..., 1].square() * counts / (counts - 1)  # their variances are unbiased
    require_close(ours, theirs, 1e-5, "statistics")


def same_map(name: str, widths: tuple[int, ...], is_cnn: bool) -> str:
    """Find the map of a layer of nfn among those of regauge's NFN."""
    from nfn import layers
    from nfn.common import WeightSpaceFeatures, network_spec_from_wsfeat

    kernels = [(1 + k % 2, 2) if is_cnn and k < len(widths) - 2 else () for k in range(len(widths) - 1)]

    def wide(lists: Lists, channels: int) -> WeightSpaceFeatures:
        weights = [
            w.unflatten(-1, (channels, *kernel)).movedim(3, 1) if kernel else w.movedim(3, 1)
            for w, kernel in zip(lists[0], kernels, strict=True)
        ]
        return WeightSpaceFeatures(weights, [b.movedim(2, 1) for b in lists[1]])

    def flat(features: WeightSpaceFeatures) -> Lists:
        weights = [w.movedim(1, 3).flatten(3) for w in features.weights]
        return weights, [b.movedim(1, 2) for b in features.biases]

    def packing(channels: int) -> Packing:
        areas = tuple(channels * (kernel[0] * kernel[1] if kernel else 1) for kernel in kernels)
        return Packing(widths, (areas, channels), are_ends_sets=name != "HNPLinear")

    torch.manual_seed(0)
    shapes = [(b, a, n) for (a, b), n in zip(pairwise(widths), packing(1).channels[0], strict=True)]
    lists = [torch.zeros(1, *shape) for shape in shapes], [torch.zeros(1, n, 1) for n in widths[1:]]
    spec = network_spec_from_wsfeat(wide(lists, 1))
    layer = getattr(layers, name)(spec, 2, 2).double()
    return express(ws.NFN(), packing(2), lambda lists: flat(layer(wide(lists, 2))), outputs=packing(2))


def same_action(tests: Any, is_cnn: bool) -> None:
    """Their permutation matrices and an element of regauge move networks to the same place."""
    sizes = [10, 15, 13, 12]
    torch.manual_seed(0)
    kernels = ([(3, 3), (2, 5), (4, 3)],) if is_cnn else ()
    params = (tests.sample_cnn_params if is_cnn else tests.sample_params)(1, 1, sizes, *kernels)
    matrices = tests.sample_perm(sizes)
    permuted = tests.apply_perm_to_params(params, matrices)
    theirs = named((permuted.weights, permuted.biases))
    own = {name: x[0] for name, x in named((params.weights, params.biases)).items()}
    symmetry = FORM.symmetry(own)
    orders = {f"u{k + 1}": Value(perm=matrix.argmax(1)) for k, matrix in enumerate(matrices)}
    moved = symmetry.act(Element(orders), own)
    for name, x in moved.items():
        if not torch.equal(x, theirs[name][0]):
            raise Failed(f"{name} lies elsewhere")


def aligned(helpers: Any) -> None:
    """Their permutation of the channels of a CNN is found in the symmetry, and undone exactly."""
    torch.manual_seed(0)
    if not helpers.check_perm_symmetry():
        raise Failed("nfn's permutation changes the CNN")
    module = helpers.make_cnn()
    state = dict(module.state_dict())
    symmetry = rg.discover(module, (torch.randn(2, 1, 28, 28),))
    found = rg.align(state, dict(helpers.sample_perm(state)), symmetry, generator=torch.Generator().manual_seed(0))
    for name, tensor in state.items():
        require_close(found.params[name], tensor, 1e-6, name)


def example(checkout: Path, helpers: Any, layer: str) -> None:
    """Their example of an invariant net, with a net of regauge."""
    checked = load(checkout / "examples" / "basic_cnn" / "check_nfn_inv.py", "check_nfn_inv")
    symmetry = rg.discover(helpers.make_cnn(), (torch.randn(2, 1, 28, 28),))
    names = list(helpers.make_cnn().state_dict())
    generator = torch.Generator().manual_seed(0)
    net = ws.Metanet(symmetry, layer=LAYERS[layer], head=ws.Invariant(1), width=16, depth=2, generator=generator)

    def run(features: Any) -> Tensor:
        tensors = [x[:, 0] for pair in features for x in pair]
        made: Tensor = net(dict(zip(names, tensors, strict=True)))
        return made

    printed = io.StringIO()
    with replaced(checked, {"make_nfn": lambda _: run}), redirect_stdout(printed):
        run_test(checked.main)
    if "NFN is invariant: True" not in printed.getvalue():
        raise Failed(printed.getvalue().strip()[-200:])


def tensors_and_back(helpers: Any) -> None:
    """State dictionaries to their tensors and back are the networks that regauge reads."""
    from nfn.common import WeightSpaceFeatures, params_to_state_dicts, state_dict_to_tensors

    state = helpers.make_cnn().state_dict()
    features = WeightSpaceFeatures(*([x[None] for x in part] for part in state_dict_to_tensors(state)))
    (back,) = params_to_state_dicts(list(state), features)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(back, f"{folder}/net.pth")
        save({name: x.clone() for name, x in back.items()}, f"{folder}/net.safetensors")
        for name in ("net.pth", "net.safetensors"):
            found = load_checkpoint(f"{folder}/{name}")
            if list(found) != list(state) or not all(torch.equal(found[n], x) for n, x in state.items()):
                raise Failed(f"{name} is read otherwise")


def data_module(checkout: Path) -> Any:
    """Their data sets, without the images of torchvision."""
    pretend("torchvision", "torchvision.transforms", "torchvision.datasets")
    return load(checkout / "experiments" / "data_utils.py", "nfn_data_utils")


def zoo(checkout: Path) -> None:
    """A population that regauge writes as the small CNN zoo, read by both."""
    data = data_module(checkout)

    def read(place: Path, split: str) -> Iterator[tuple[list[Tensor], list[Tensor], float]]:
        found = data.ZooDataset(str(place), split, str(place / "order.csv"))
        for k in range(len(found)):
            (weights, biases), score = found[k]
            yield [torch.from_numpy(w[0].copy()) for w in weights], [torch.from_numpy(b[0]) for b in biases], score

    with tempfile.TemporaryDirectory() as folder:
        compare_cnns(Path(folder), read)


def sirens(checkout: Path) -> None:
    """Their SIRENs in their folders, read by both, compute the same here as there."""
    data = data_module(checkout)
    models = load(checkout / "experiments" / "siren_utils.py", "nfn_siren_utils")
    torch.manual_seed(0)
    made = [models.Siren(**models.SIREN_kwargs["mnist"]) for _ in range(6)]
    with tempfile.TemporaryDirectory() as folder:
        for k, module in enumerate(made):
            place = Path(folder, f"randinit_test_{k % 3}s")
            place.mkdir(exist_ok=True)
            torch.save(module.state_dict(), place / f"net{k}.pth")
        theirs = data.SirenDataset(folder)
        architecture = Architecture("siren", "nfn_siren_utils:Siren", models.SIREN_kwargs["mnist"])
        template, inputs = "randinit_test_{label}s/net{id}.pth", (torch.randn(2, 2),)
        import_zoo(read_folder(folder, template, architecture=architecture, inputs=inputs), Path(folder, "store"))
        store = Store.open(Path(folder, "store"))
        x = models.get_mgrid(9)
        for k in range(6):
            (weights, biases), label = theirs[k]
            params = {name: tensor[0] for name, tensor in store.read([k]).items()}
            tensors = [x[0] for pair in zip(weights, biases, strict=True) for x in pair]
            if not all(torch.equal(a, b) for a, b in zip(params.values(), tensors, strict=True)):
                raise Failed(f"net{k} is read otherwise")
            if int(store.rows["label"][k]) != label or int(store.rows["id"][k]) != k:
                raise Failed(f"net{k} has another label")
            assert store.symmetry is not None
            moved = store.symmetry.act(store.symmetry.random(torch.Generator().manual_seed(k)), params)
            output = torch.func.functional_call(store.architecture.module(), moved, (x,))[0]
            require_close(output, made[k](x)[0], 1e-3, "outputs of the moved network")


if __name__ == "__main__":
    judge(PEER, cases)
