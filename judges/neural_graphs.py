"""Neural graphs' own tests, with nets of regauge in the place of theirs; their nets on networks that regauge moved.

    PEERS=FOLDER .venv/bin/python judges/neural_graphs.py [PIECE-OF-A-NAME ...]

A test passes if its assertion holds with a net of regauge where theirs was. "moved" cases pass if their net gives the
same for networks that a random element of regauge's symmetry moved. "reads" cases pass if both read the same networks.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from judge import Case, Failed, Peer, judge
from populations import COUNT, compare_cnns, compare_inrs, compare_torch_files
from torch import Tensor
from weight_nets import (
    LAYERS,
    Form,
    InPlace,
    Lists,
    load,
    named,
    pretend,
    require_close,
    require_failure,
    run_test,
    unnamed,
)

from regauge.learn.layer_statistics import layer_statistics
from regauge.weightspace.layers.plan import Layer

PEER = Peer(
    "neural-graphs",
    "https://github.com/mkofinas/neural-graphs",
    "1f2b671ab4988ef212469363005a5b99eec16580",
    (
        "torch_geometric==2.4.0",
        "hydra-core==1.3.2",
        "omegaconf==2.3.0",
        "antlr4-python3-runtime==4.9.3",
        "einops==0.8.1",
        "random-fourier-features-pytorch==1.0.1",
    ),
    ("pandas", "pytest", "yaml", "tqdm", "jinja2", "psutil", "requests"),
)
FORM = Form(out=1, into=0, bias=0, channel=-1)
WIDTHS = [2, 32, 32, 32, 32, 3]
"""Of the networks of their tests."""
ABSENT = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.datasets",
    "torchvision.models",
    "torchvision.models.vision_transformer",
    "experiments.transformer_generalization",
    "experiments.transformer_generalization.utils",
)
"""Modules that their data sets import and that these cases do not use; the checkout lacks the last two."""
NETS = {
    "inr_classification": ("rtransformer", "pna", "dwsnet"),
    "style_editing": ("rtransformer", "pna", "dwsnet"),
}
"""Their settings of nets that read MLPs."""

EXPLAINED = {
    "moved: style_editing, pna": "the changes of biases of this net do not move with permutations of its own test "
    "either, in double precision; the test allows errors of a tenth for biases"
}
"""Sentences for cases that do not pass."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    import torch_geometric  # noqa: F401  # before the absent modules, which it looks for

    pretend(*ABSENT)
    sys.path.insert(0, str(checkout))
    tests = {
        name: load(checkout / "tests" / f"{name}.py", f"tests.{name}")
        for name in ("test_inr_invariance", "test_inr_equivariance", "test_cnn_invariance")
    }
    for title, layer in LAYERS.items():
        for name, net in nets_of(layer).items():
            yield Case(f"{name}.py, {title}", lambda module=tests[name], net=net: run_one(module, net))
    for name, net in nets_of(LAYERS["NFN"], is_spoiled=True).items():
        spoiled = partial(run_one, tests[name], net)
        yield Case(f"control: {name}.py fails without symmetry", lambda spoiled=spoiled: require_failure(spoiled))
    for folder, models in NETS.items():
        for model in models:
            title = f"moved: {folder}, {model}"
            yield Case(title, lambda folder=folder, model=model: moved(checkout, folder, model))
    yield Case("same: DynamicStatFeaturizer", statistics)
    yield Case("reads: INRDataset", lambda: read_inrs(checkout))
    yield Case("reads: NFNZooDataset", lambda: read_zoo(checkout))
    yield Case("reads: CNNDataset", lambda: read_cnns(checkout))


def nets_of(layer: Layer, *, is_spoiled: bool = False) -> dict[str, Any]:
    """The nets that stand for those of each file of tests."""
    numbers = InPlace(FORM, layer, outputs=10, is_spoiled=is_spoiled)
    changes = InPlace(FORM, layer, is_spoiled=is_spoiled)
    return {
        "test_inr_invariance": lambda lists: numbers(*lists),
        "test_inr_equivariance": lambda lists: changes(*lists, is_whole=True),
        "test_cnn_invariance": partial(read_graphs, InPlace(FORM, layer, outputs=1, is_spoiled=is_spoiled)),
    }


def run_one(module: ModuleType, net: Any) -> None:
    """Run the one test of a file."""
    (test,) = (test for name, test in vars(module).items() if name.startswith("test_model"))
    run_test(test, net)


def read_graphs(net: InPlace, batch: Any) -> Tensor:
    """Numbers for the graphs of some networks, as weights and biases of which regauge reads them."""
    layout = batch.layer_layout[0]
    models = len(batch.layer_layout)
    biases = batch.x.view(models, -1, 1).split(layout, 1)[1:]
    shapes = list(pairwise(layout))
    weights = batch.edge_attr.view(models, -1, batch.edge_attr.shape[-1]).split([a * b for a, b in shapes], 1)
    made: Tensor = net([w.unflatten(1, shape) for w, shape in zip(weights, shapes, strict=True)], biases)
    return made


def networks(widths: list[int]) -> Lists:
    """Random weights `[networks, in, out, 1]` and biases, as in their tests."""
    torch.manual_seed(0)
    weights = [torch.randn(4, *shape, 1) for shape in pairwise(widths)]
    return weights, [torch.randn(4, n, 1) for n in widths[1:]]


def published(checkout: Path, folder: str, model: str) -> Any:
    """One of their nets, by their settings."""
    import hydra

    torch.manual_seed(0)
    shapes = {"weight_shapes": tuple(pairwise(WIDTHS)), "bias_shapes": tuple((n,) for n in WIDTHS[1:])}
    with hydra.initialize_config_dir(str(checkout / "experiments" / folder / "configs"), version_base=None):
        config = hydra.compose(config_name="base", overrides=[f"model={model}"])
        config.data.stats = None
        if folder == "style_editing":
            config.data.stats = {f"{kind}_{one}": None for kind in ("weights", "biases") for one in ("mean", "std")}
        given = shapes if model == "dwsnet" else {"layer_layout": tuple(WIDTHS)}
        return hydra.utils.instantiate(config.model, **given).double().eval()


@torch.no_grad()
def moved(checkout: Path, folder: str, model: str) -> None:
    """Their net on networks before and after a random element of regauge, in double precision."""
    torch.set_default_dtype(torch.float64)
    try:
        net, params = published(checkout, folder, model), named(networks(WIDTHS))
        symmetry = FORM.symmetry({name: tensor[0] for name, tensor in params.items()})
        element = symmetry.random(torch.Generator().manual_seed(0), batch=(4,))
        before, after = net(unnamed(params)), net(unnamed(symmetry.act(element, params)))
    finally:
        torch.set_default_dtype(torch.float32)
    if isinstance(before, Tensor):
        require_close(after, before, 1e-9, "outputs")
        return
    there = symmetry.act(element, named(before))
    for name, tensor in named(after).items():
        require_close(tensor, there[name], 1e-9, f"changes of {name}")


def statistics() -> None:
    """Moments and quantiles of every tensor, value by value."""
    from nn.dynamic_stat_net import DynamicStatFeaturizer
    from torch_geometric.data import Data

    layout = [1, 6, 5, 3]
    weights, biases = networks(layout)
    theirs = DynamicStatFeaturizer(1, 2, 1, 1)(
        [
            Data(
                x=torch.cat([torch.zeros(1, 1), *(b[k] for b in biases)]),
                edge_attr=torch.cat([w[k].flatten(0, 1) for w in weights]),
                layer_layout=layout,
                initial_weight_shapes=[(1, 1)] * 3,
            )
            for k in range(4)
        ]
    ).unflatten(1, (-1, 7))
    order = [x for pair in zip(weights, biases, strict=True) for x in pair]
    ours = torch.from_numpy(layer_statistics({f"{k}": x for k, x in enumerate(order)})).unflatten(1, (-1, 7))
    counts = torch.tensor([x[0].numel() for x in order])
    ours[..., 1] = ours[..., 1].square() * counts / (counts - 1)  # their variances are unbiased
    require_close(ours, theirs, 1e-5, "statistics")


def read_inrs(checkout: Path) -> None:
    """Sine networks that regauge writes in DWSNets' layout."""
    data = load(checkout / "experiments" / "data.py", "neural_graphs_data")
    from nn.inr import INR

    with tempfile.TemporaryDirectory() as folder:
        compare_inrs(Path(folder), lambda place, split: list(data.INRDataset(place, "splits.json", split)), INR)


def generalization(checkout: Path) -> ModuleType:
    """Their data sets of convolutional networks."""
    return load(checkout / "experiments" / "data_generalization.py", "neural_graphs_generalization")


def read_zoo(checkout: Path) -> None:
    """Networks that regauge writes as the small CNN zoo."""
    data = generalization(checkout)

    def read(place: Path, split: str) -> Iterator[tuple[list[Tensor], list[Tensor], float]]:
        found = data.NFNZooDataset(str(place), split, str(place / "order.csv"), data_format="nfn")
        for k in range(len(found)):
            one = found[k]
            yield one.weights, one.biases, one.y

    with tempfile.TemporaryDirectory() as folder:
        compare_cnns(Path(folder), read)


def read_cnns(checkout: Path) -> None:
    """State dictionaries of convolutional networks, listed with their scores, become one graph each."""
    data = generalization(checkout)

    def read(place: Path) -> list[tuple[list[Tensor], list[Tensor]]]:
        found = data.CNNDataset(place, "splits.json", linear_as_conv=True, flattening_method=None)
        if len(found) != COUNT:
            raise Failed(f"{len(found)} of {COUNT} networks are read")
        lists = []
        for k in range(COUNT):
            graph = found[k]
            shapes = list(pairwise(graph.layer_layout))
            weights = graph.edge_attr.split([a * b for a, b in shapes])
            kernels = [
                w.unflatten(0, shape).transpose(0, 1).unflatten(-1, (3, 3))
                for w, shape in zip(weights, shapes, strict=True)
            ]
            kernels[-1] = kernels[-1][..., 1, 1]  # the linear layer, padded to a kernel
            lists.append((kernels, [b.squeeze(-1) for b in graph.x.split(graph.layer_layout)[1:]]))
        return lists

    with tempfile.TemporaryDirectory() as folder:
        compare_torch_files(Path(folder), read)


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
