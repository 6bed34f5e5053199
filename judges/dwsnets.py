"""Deep weight space networks' own tests, with layers of regauge in the place of theirs; their maps; their data.

    PEERS=FOLDER .venv/bin/python judges/dwsnets.py [PIECE-OF-A-NAME ...]

A test of `tests/test_layers.py` passes if its assertions hold with a net of regauge where theirs was. "same" cases
pass if outputs are equal: of `ChainDWS` with the parameters of their model, or of a layer of `Metanet` whose parameters
make it their linear layer. "reads" cases pass if both libraries read the same networks, which compute the same.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from judge import Case, Peer, judge
from populations import compare_inrs
from torch import nn
from weight_nets import (
    LAYERS,
    Form,
    InPlace,
    Lists,
    Packing,
    express,
    load,
    pretend,
    replaced,
    require_close,
    require_failure,
    run_test,
)

import regauge as rg
from regauge import weightspace as ws
from regauge.nets.mlp import MLP
from regauge.weightspace.layers.plan import Layer
from regauge_papers import chains

PEER = Peer(
    "DWSNets",
    "https://github.com/AvivNavon/DWSNets",
    "2001d52f3b78ad99268f45254f75d00e1d3083bb",
    (),
    ("regauge_papers",),
)
FORM = Form(out=1, into=0, bias=0, channel=-1)
WIDTHS = (2, 32, 32, 32, 32, 3)
"""Of the networks of their tests of single maps."""
MAPS = {
    "FromFirstLayer": (0, 4),
    "ToFirstLayer": (4, 0),
    "FromLastLayer": (4, 2),
    "ToLastLayer": (2, 4),
    "NonNeighborInternalLayer": (1, 3),
}
"""The weight that is read, and the one that is written."""
BLOCKS = {
    "WeightToWeightBlock": ("w", "w"),
    "BiasToBiasBlock": ("b", "b"),
    "BiasToWeightBlock": ("b", "w"),
    "WeightToBiasBlock": ("w", "b"),
}
SIZES = (3, 8, 6, 8, 2)
"""Widths of the networks on which whole models are compared."""
OWN_MEANS = (
    "the diagonal layer of regauge keeps what is pooled over all units of a tensor for itself; DWSNets' also sends "
    "it to tensors that share other units with it"
)
EXPLAINED = {f"same: DWSLayer of means, {count} weights, diagonal": OWN_MEANS for count in (3, 5)}
"""Sentences for cases that do not pass."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    sys.path.insert(0, str(checkout))
    tests = load(checkout / "tests" / "test_layers.py", "dwsnets_tests")
    for name in (name for name in vars(tests) if name.startswith("test_")):
        for title in LAYERS:
            yield Case(f"test_layers.py::{name}, {title}", lambda name=name, title=title: in_place(tests, name, title))
        title = f"control: test_layers.py::{name} fails without symmetry"
        spoiled = partial(in_place, tests, name, "NFN", is_spoiled=True)
        yield Case(title, lambda spoiled=spoiled: require_failure(spoiled))
    for sets, pooling, is_diagonal, is_small, has_norms in product(
        ("sab", "ds"), ("max", "mean"), (False, True), (False, True), (False, True)
    ):
        settings = {"set_layer": sets, "reduction": pooling, "diagonal": is_diagonal, "bn": has_norms}
        settings["input_dim_downsample"] = 2 if is_small else None
        title = ", ".join(f"{key}={value}" for key, value in settings.items())
        yield Case(f"same: DWSModel, {title}", lambda settings=settings: same_model(settings))
    for sets, pooling in product(("sab", "ds"), ("max", "mean")):
        settings = {"set_layer": sets, "reduction": pooling}
        title = f"same: DWSModelForClassification, set_layer={sets}, reduction={pooling}"
        yield Case(title, lambda settings=settings: same_classifier(settings))
    for widths, is_diagonal in product(((3, 4, 5, 2), (3, 4, 5, 3, 4, 2)), (False, True)):
        title = f"same: DWSLayer of means, {len(widths) - 1} weights" + ", diagonal" * is_diagonal
        layer = ws.DWS(sets="mean", pooling="mean", is_diagonal=is_diagonal)
        yield Case(title, lambda widths=widths, layer=layer: same_map(widths, layer))
    yield Case("reads: INRDataset", lambda: read_inrs(checkout))


class Adapter(nn.Module):
    """A net in place of theirs that reads some tensors of a chain, the others being zero, and writes some."""

    def __init__(
        self,
        make_own: Callable[..., InPlace],
        channels: tuple[int, int],
        read: Sequence[str],
        written: Sequence[str],
        is_one: bool,
    ) -> None:
        super().__init__()
        self.channels, self.read, self.written, self.is_one = channels, read, written, is_one
        self.own = make_own(channels=channels[1])

    def forward(self, given: Any) -> Any:
        tensors = [given] if self.is_one else given
        known = dict(zip(self.read, tensors, strict=True))
        weights, biases = (
            [known.get(f"{kind}{k}", torch.zeros(len(tensors[0]), *shape, self.channels[0])) for k, shape in part]
            for kind, part in (("w", enumerate(pairwise(WIDTHS))), ("b", enumerate((n,) for n in WIDTHS[1:])))
        )
        lists = self.own(weights, biases)
        made = {f"{kind}{k}": x for kind, part in zip("wb", lists, strict=True) for k, x in enumerate(part)}
        found = tuple(made[name] for name in self.written)
        return found[0] if self.is_one else found


def in_place(tests: ModuleType, name: str, title: str, *, is_spoiled: bool = False) -> None:
    """Run a test with nets of regauge in place of theirs."""
    make_own = partial(InPlace, FORM, LAYERS[title], is_spoiled=is_spoiled)

    def one(places: tuple[int, int]) -> Any:
        names = [f"w{k}" for k in places]
        return lambda in_features, out_features, **_: Adapter(
            make_own, (in_features, out_features), names[:1], names[1:], is_one=True
        )

    def block(kinds: tuple[str, str]) -> Any:
        read, written = ([f"{kind}{k}" for k in range(5)] for kind in kinds)
        return lambda in_features, out_features, **_: Adapter(
            make_own, (in_features, out_features), read, written, is_one=False
        )

    def model(*, input_features: int, output_features: int, **_: Any) -> Any:
        own, is_whole = make_own(channels=output_features), input_features == output_features
        return lambda given: own(*given, is_whole=is_whole)

    def classifier(*, n_classes: int, **_: Any) -> Any:
        own = make_own(outputs=n_classes)
        return lambda given: own(*given)

    made = {name: one(places) for name, places in MAPS.items()} | {name: block(kinds) for name, kinds in BLOCKS.items()}
    with replaced(tests, {**made, "DWSModel": model, "DWSModelForClassification": classifier}):
        run_test(getattr(tests, name))


def networks(widths: Sequence[int]) -> tuple[rg.Symmetry, rg.Params, Lists]:
    """The symmetry of an MLP, random networks, and the same as weights `[models, in, out, 1]` and biases."""
    module, generator = MLP(tuple(widths)), torch.Generator().manual_seed(0)
    symmetry = rg.discover(module, (torch.randn(2, widths[0]),), verify=False)
    params = {
        name: torch.randn(3, *tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in module.state_dict().items()
    }
    tensors = list(params.values())
    weights = tuple(weight.transpose(1, 2).unsqueeze(-1) for weight in tensors[::2])
    return symmetry, params, (weights, tuple(bias.unsqueeze(-1) for bias in tensors[1::2]))


@torch.no_grad()
def give_parameters(net: chains.ChainDWS, theirs: Any) -> None:
    """Copy the parameters of their model to a net of regauge."""
    kinds = {(True, True): "weight_to_weight", (True, False): "weight_to_bias", (False, True): "bias_to_weight"}
    layers = [one for one in theirs if hasattr(one, "weight_to_weight")]
    norms = [one for one in theirs if hasattr(one, "weights_bn")]
    count = len(net.chain.weights)
    for own, published in zip(net.layers, layers, strict=True):
        for key, made in own.maps.items():
            source, target = map(int, key.split("_"))
            kind = kinds.get((source < count, target < count), "bias_to_bias")
            copy(made, getattr(published, kind).layers[f"{source % count}_{target % count}"])
        if own.is_resized:
            copy(own.down, published.down_sample)
            copy(own.up, published.up_sample)
            copy(own.skip, published.skip)
    for k, own in enumerate(net.norms):
        for key, norm in own.items():
            if norms:
                bn = norms[k]
                copy(norm, (*bn.weights_bn, *bn.biases_bn)[int(key)])
            else:
                norm.eps = 0.0  # with a mean of zero and a variance of one: the identity


def copy(own: nn.Module, published: nn.Module) -> None:
    """Copy the parameters of a module: of its linear maps and norms in their order, and of what has neither."""
    kinds = nn.Linear | nn.BatchNorm1d
    ours, theirs = ([m for m in one.modules() if isinstance(m, kinds)] for one in (own, published))
    for mine, other in zip(ours, theirs, strict=True):
        mine.load_state_dict(other.state_dict())
    queries = [[p for name, p in one.named_parameters() if name.endswith("query")] for one in (own, published)]
    for mine, other in zip(*queries, strict=True):
        mine.copy_(other)


def make(kind: str, settings: dict[str, Any], head: Any) -> tuple[Any, chains.ChainDWS, rg.Params, Lists]:
    """Their model, and the net of regauge with its parameters."""
    from nn import models

    symmetry, params, lists = networks(SIZES)
    torch.manual_seed(0)
    shapes = tuple(pairwise(SIZES)), tuple((n,) for n in SIZES[1:])
    theirs = getattr(models, kind)(
        *shapes, input_features=1, hidden_dim=8, n_hidden=2, num_heads=4, **({"init_scale": 1.0} | settings)
    )
    theirs = theirs.double().eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith(("query", "bias")):
            nn.init.normal_(parameter)
    config = chains.ChainConfig(
        hidden=8,
        layers=3,
        sets="attention" if settings["set_layer"] == "sab" else "mean",
        pooling=settings["reduction"],
        heads=4,
        is_diagonal=settings.get("diagonal", False),
        inputs_to=settings.get("input_dim_downsample"),
        are_biases_blind=False,
    )
    net = chains.ChainDWS(symmetry, config, head=head).double().eval()
    give_parameters(net, theirs.layers if kind == "DWSModel" else theirs.layers.layers)
    return theirs, net, params, lists


@torch.no_grad()
def same_model(settings: dict[str, Any]) -> None:
    """Features of all tensors."""
    theirs, net, params, lists = make("DWSModel", settings, ws.Invariant(2))
    wanted = [x for part in theirs(lists) for x in part]
    for k, (made, tensor) in enumerate(zip(net.features(params), wanted, strict=True)):
        require_close(made, tensor, 1e-9, f"features of tensor {k}")


@torch.no_grad()
def same_classifier(settings: dict[str, Any]) -> None:
    """Numbers for each network."""
    theirs, net, params, lists = make("DWSModelForClassification", {**settings, "n_classes": 7}, ws.Invariant(7))
    copy(net.classify, theirs.clf.layer)
    require_close(net(params), theirs(lists), 1e-9, "outputs")


def same_map(widths: tuple[int, ...], layer: Layer) -> str:
    """Find their linear layer among those of regauge."""
    from nn.layers import DWSLayer

    packing = Packing(widths, ((2,) * (len(widths) - 1), 2), are_ends_sets=False)
    torch.manual_seed(0)
    shapes = tuple(pairwise(widths)), tuple((n,) for n in widths[1:])
    theirs = DWSLayer(
        *shapes, in_features=2, out_features=2, set_layer="ds", reduction="mean", diagonal=layer.is_diagonal
    ).double()

    def run(lists: Lists) -> Lists:
        weights, biases = theirs((tuple(w.transpose(1, 2) for w in lists[0]), tuple(lists[1])))
        return [w.transpose(1, 2) for w in weights], list(biases)

    return express(layer, packing, run, outputs=packing)


def read_inrs(checkout: Path) -> None:
    """Sine networks that regauge writes in their layout, read by both."""
    pretend("rff", "rff.layers", "torchvision")
    data = load(checkout / "experiments" / "data.py", "dwsnets_data")
    from nn.inr import INR

    with tempfile.TemporaryDirectory() as folder:
        compare_inrs(Path(folder), lambda place, split: list(data.INRDataset(place / "splits.json", split)), INR)


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
