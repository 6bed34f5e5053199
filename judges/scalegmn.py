"""ScaleGMN's nets of all of its settings, next to regauge's: outputs, symmetries, phases, and populations.

    PEERS=FOLDER .venv/bin/python judges/scalegmn.py [PIECE-OF-A-NAME ...]

The checkout has no tests of its nets; its settings say which symmetry each respects. "same" cases pass if
`ChainScaleGMN` with the parameters of their net gives its outputs. "law" cases pass if a net of regauge with the layer
`ScaleGMN` gives the same for all networks of an orbit, of networks as in a setting, or changes that move as these do.
"phases" cases pass if canonical networks are the same for a whole orbit and compute what they did. "reads" cases pass
if both read the same networks.
"""

import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from judge import HERE, Case, Failed, Peer, judge
from populations import COUNT, compare_cnns, compare_inrs
from torch import Tensor
from weight_nets import load, pretend, require_close

import regauge as rg
from regauge import weightspace as ws
from regauge.nets.siren import Siren
from regauge.weightspace.layers.plan import Layer
from regauge.zoo.formats.modules import SmallCNN

PEER = Peer(
    "scalegmn",
    "https://github.com/jkalogero/scalegmn",
    "9cffd4d4318aab176f97d44c0722626493dc08ed",
    ("torch_geometric==2.4.0", "einops==0.8.1", "nfn==0.1.2"),
    ("regauge_papers", "pandas", "yaml", "tqdm", "jinja2", "psutil", "requests"),
)
DEEP = (3, 6, 5, 7, 2)
"""Widths of networks with ReLU on which their nets for scales are compared."""
DOUBLED = "input_layers: 1input_layers: 1"
"""In one of their files of settings, which is no YAML with it."""
ORBIT = 1e-8
"""Relative tolerance for laws, in float64."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    import torch_geometric  # noqa: F401  # before the absent modules, which it looks for

    pretend("rff", "rff.layers", "torchvision", "torchvision.utils", "wandb", "cv2")
    sys.path[:0] = [str(HERE.parent / "benchmarks"), str(checkout)]
    benchmark = load(HERE.parent / "benchmarks" / "scale_gmn.py", "scale_gmn")
    settings = {
        f"{path.parent.name}/{path.stem}": yaml.safe_load(
            path.read_text().replace(DOUBLED, DOUBLED[len(DOUBLED) // 2 :])
        )
        for path in sorted((checkout / "configs").glob("*/*.yml"))
    }
    for name, whole in settings.items():
        if len(whole["data"]["layer_layout"]) == 4:
            widths = tuple(whole["data"]["layer_layout"])
            yield Case(
                f"same: {name}", lambda name=name, widths=widths: same_outputs(benchmark, checkout, name, widths)
            )
    for name in ("mnist_cls/scalegmn", "mnist_cls/scalegmn_bidir"):
        title = f"same: {name}, symmetry=scale, 3-6-5-7-2"
        yield Case(title, lambda name=name: same_outputs(benchmark, checkout, name, DEEP, symmetry="scale"))
    for name, whole in settings.items():
        yield Case(f"law: {name}", lambda whole=whole: law(whole))
    for name, outputs in (("mnist", 1), ("fmnist", 1), ("cifar", 3)):
        yield Case(f"phases: {name}", lambda outputs=outputs: phases(checkout, outputs))
    yield Case("reads: LabeledINRDataset", lambda: read_inrs(checkout))
    yield Case("reads: LabeledFashionMnistINRDataset", lambda: read_files(checkout, "fashion"))
    yield Case("reads: CifarINRDataset", lambda: read_files(checkout, "cifar"))
    for activation in ("relu", "tanh"):
        yield Case(f"reads: NFNZooDataset, {activation}", lambda activation=activation: read_zoo(activation))


@torch.no_grad()
def same_outputs(benchmark: ModuleType, checkout: Path, name: str, widths: tuple[int, ...], **changes: Any) -> None:
    """Outputs of their net, and of `ChainScaleGMN` with its parameters."""
    torch.set_default_dtype(torch.float64)
    try:
        settings = benchmark.settings_of(checkout, name, widths, d_hid=6, **changes)
        net = benchmark.our_net(settings).double().eval()
        published = benchmark.published_net(settings).double().eval()
        benchmark.fill(net)
        if not net.config.are_perceptrons_normalized:  # where features of that size grow without bounds
            for parameter in net.parameters():
                parameter.mul_(0.5)
        benchmark.give_parameters(net, published)
        params = benchmark.networks(widths, 3, torch.float64)
        graphs, weights, biases = benchmark.as_published(settings, params)
        wanted, made = published(graphs, weights, biases), net(params)
    finally:
        torch.set_default_dtype(torch.float32)
    if settings["equivariant"]:
        tensors = [x for pair in zip(*wanted, strict=True) for x in pair]
        for key, tensor in zip(params, tensors, strict=True):
            own = tensor.squeeze(-1)
            require_close(made[key], own.transpose(1, 2) if own.ndim == 3 else own, 1e-9, f"changes of {key}")
        return
    require_close(made, wanted, 1e-9, "outputs")


def networks(module: torch.nn.Module) -> rg.Params:
    """Three random networks."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.5 * torch.randn(3, *tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in module.state_dict().items()
    }


def make_net(symmetry: Any, layer: Layer, settings: dict[str, Any]) -> ws.Metanet:
    """A net of regauge with the settings' depth and outputs."""
    head = ws.Equivariant(scale=1.0) if settings["equivariant"] else ws.Invariant(settings["readout_args"]["d_out"])
    generator = torch.Generator().manual_seed(0)
    depth = settings["num_layers"]
    return ws.Metanet(symmetry, layer=layer, head=head, width=16, depth=depth, generator=generator).double()


@torch.no_grad()
def law(whole: dict[str, Any]) -> None:
    """Move networks of the settings by random elements of all that regauge finds in them."""
    settings, widths = whole["scalegmn_args"], whole["data"]["layer_layout"]
    if len(widths) == 4:
        module = Siren(widths[0], widths[1], widths[-1], depth=2)
        symmetry = rg.discover(module, (torch.randn(2, widths[0]),))
        respects(make_net(symmetry, ws.ScaleGMN(), settings), symmetry, networks(module), settings)
        return
    activations = [whole["data"]["activation_function"]]
    if activations == [None]:
        activations = ["relu", "tanh"]
    modules = [SmallCNN(widths[:-1], widths[-1], activation=one) for one in activations]
    symmetries = [rg.discover(module, (torch.randn(2, widths[0], 32, 32),)) for module in modules]
    layer = ws.ScaleGMN(is_scaled="relu" in activations)
    net = make_net(symmetries, layer, settings)
    for symmetry in symmetries:
        respects(net, symmetry, networks(modules[0]), settings, is_told=len(symmetries) > 1)


def respects(
    net: ws.Metanet, symmetry: rg.Symmetry, params: rg.Params, settings: dict[str, Any], *, is_told: bool = False
) -> None:
    """Raise `Failed` unless a net gives the same, or moved changes, for moved networks of a symmetry."""
    for seed in range(3):
        element = symmetry.random(torch.Generator().manual_seed(seed), batch=(3,))
        there = symmetry.act(element, params)
        told = symmetry if is_told else None
        before, after = net(params, symmetry=told), net(there, symmetry=told)
        if not settings["equivariant"]:
            require_close(after, before, ORBIT, "outputs")
            continue
        changed = symmetry.act(element, {name: x + before[name] for name, x in params.items()})
        for name, x in there.items():  # half periods are added to biases, so that changes move as differences do
            require_close(after[name], changed[name] - x, ORBIT, f"changes of {name}")


@torch.no_grad()
def phases(checkout: Path, outputs: int) -> str:
    """Canonical sine networks, by regauge, and what their script makes of the function."""
    sys.modules.setdefault("test_inr", ModuleType("test_inr")).test_inr = None  # type: ignore[attr-defined]
    script = load(checkout / "src" / "phase_canonicalization" / "shift_params.py", "shift_params")
    module = Siren(2, 32, outputs, depth=2).double()
    symmetry = rg.discover(module, (torch.randn(2, 2),))
    x = torch.rand(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    far = 0.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        params = {
            name: t + 0.2 * torch.randn(t.shape, generator=generator, dtype=torch.float64)
            for name, t in module.state_dict().items()
        }
        canonical = rg.canonicalize(params, symmetry)
        moved = rg.canonicalize(symmetry.act(symmetry.random(generator), params), symmetry)
        wanted = torch.func.functional_call(module, params, (x,))
        require_close(torch.func.functional_call(module, canonical, (x,)), wanted, 1e-9, "outputs")
        for name, tensor in canonical.items():
            require_close(moved[name], tensor, 1e-9, name)
            is_hidden = name.endswith("bias") and name != list(canonical)[-1]
            if is_hidden and not bool((30 * tensor).abs().max() <= math.pi / 2 + 1e-9):
                raise Failed(f"phases of {name} are as large as {float((30 * tensor).abs().max()):.2f}")
        tensors = list(params.values())
        theirs = script.shift_params(([w[None] for w in tensors[::2]], [b[None] for b in tensors[1::2]]))
        pairs = zip(tensors, (t[0] for pair in zip(*theirs, strict=True) for t in pair), strict=True)
        far = max(far, *(float((own - other).abs().max()) for own, other in pairs))
    return f"their script {'changes these networks' if far > 1e-6 else 'gives these networks back as they are'}"


def read_inrs(checkout: Path) -> None:
    """Sine networks that regauge writes in DWSNets' layout."""
    from src.data.mnist_inr_dataset import LabeledINRDataset
    from src.scalegmn.inr import INR

    def read(place: Path, split: str) -> Iterator[tuple[Any, Any, int]]:
        found = LabeledINRDataset("labeled_mnist_inr", str(place), place / "splits.json", split=split, **FORMAT)
        for k in range(len(found)):
            one = found[k]
            yield one.weights, one.biases, one.label

    with tempfile.TemporaryDirectory() as folder:
        compare_inrs(Path(folder), read, INR)


FORMAT: dict[str, Any] = {"data_format": "wb", "layer_layout": [2, 32, 32, 1], "switch_to_canon": False}


def read_files(checkout: Path, kind: str) -> None:
    """State dictionaries of their sine networks, read by both."""
    from src.data.cifar_inr_dataset import CifarINRDataset
    from src.data.fmnist_inr_dataset import LabeledFashionMnistINRDataset
    from src.scalegmn.inr import INR

    from regauge.storage import Store
    from regauge.storage.architecture import Architecture
    from regauge.zoo import import_zoo
    from regauge.zoo.formats.folder import read_deep_align, read_folder

    torch.manual_seed(0)
    is_cifar = kind == "cifar"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "data") / "inrs"
        names = []
        for k in range(COUNT):
            state: dict[str, Any] = dict(INR(out_features=3 if is_cifar else 1).state_dict())
            name = f"randinit_smaller_{k % 10}s/net{k}.pth" if is_cifar else f"nets/{k:03d}.pth"
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            torch.save(state if is_cifar else {**state, "label": k % 10}, place / name)
            names.append(str(place / name))
        if is_cifar:
            settings = {"out_features": 3}
            architecture = Architecture("INR", "src.scalegmn.inr:INR", settings)
            source = read_folder(
                place, "randinit_smaller_{label}s/net{id}.pth", architecture=architecture, inputs=(torch.randn(2, 2),)
            )
            theirs: Any = CifarINRDataset("cifar_inr", str(place), split_points=(COUNT, COUNT), **FORMAT)
        else:
            import json

            (place / "splits.json").write_text(json.dumps({"train": names}))
            source = read_deep_align(place)
            theirs = LabeledFashionMnistINRDataset(
                "labeled_fashion_mnist_inr", f"{place}/", place / "splits.json", **FORMAT
            )
        import_zoo(source, Path(folder, "store"))
        store = Store.open(Path(folder, "store"))
        if len(theirs) != COUNT or len(store) != COUNT:
            raise Failed(f"{len(theirs)} and {len(store)} of {COUNT} networks are read")
        for k in range(COUNT):
            one = theirs[k]
            tensors = [t.squeeze(-1) for pair in zip(one.weights, one.biases, strict=True) for t in pair]
            for tensor, own in zip(tensors, store.read([k]).values(), strict=True):
                if not torch.equal(tensor.T if tensor.ndim == 2 else tensor, own[0]):
                    raise Failed(f"network {k} is read otherwise")
            if int(one.label) != int(store.rows["label"][k]):
                raise Failed(f"network {k} has another label")


def read_zoo(activation: str) -> None:
    """Networks that regauge writes as the small CNN zoo."""
    from src.data.cifar10_dataset import NFNZooDataset

    def read(place: Path, split: str) -> Iterator[tuple[list[Tensor], list[Tensor], float]]:
        paths = [str(place / name) for name in ("weights.npy", "metrics.csv.gz", "layout.csv")]
        found = NFNZooDataset(
            "cifar10", str(place), *paths, split, activation, idcs_file=str(place / "order.csv"), data_format="nfn"
        )
        for k in range(len(found)):
            one = found[k]
            yield one.weights, one.biases, one.y

    with tempfile.TemporaryDirectory() as folder:
        compare_cnns(Path(folder), read, activation=activation)


if __name__ == "__main__":
    judge(PEER, cases)
