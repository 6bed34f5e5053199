"""Nets of regauge in the place of a peer's: on the weights and biases of chains of layers, in the peer's layout."""

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from judge import Failed
from torch import Tensor, nn

import regauge as rg
from regauge import weightspace as ws
from regauge.core.params import Params
from regauge.weightspace.features import Features, Read
from regauge.weightspace.heads import Head
from regauge.weightspace.layers.hubs import find_hubs
from regauge.weightspace.layers.plan import Layer, LayerPlan
from regauge.weightspace.layers.reading import activate
from regauge.weightspace.layout.compile import compile_layout

LAYERS: dict[str, Layer] = {
    "NFN": ws.NFN(),
    "DWS": ws.DWS(),
    "MessagePassing": ws.MessagePassing(),
    "Propagation": ws.Propagation(channels=4),
    "RelationalAttention": ws.RelationalAttention(),
    "ScaleGMN": ws.ScaleGMN(),
}
EVERYTHING = frozenset({"units", "positions", "pairs", "unwritten", "network"})
Lists = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Weights and biases with a leading model axis."""


@dataclass(frozen=True)
class Form:
    """The layout of a peer's weights and biases.

    Attributes:
        out: The axis of a weight's outputs behind the model axis.
        into: The axis of its inputs.
        bias: The axis of a bias's units.
        channel: The axis of the channels, of both: the first, 0, or the last, -1.
    """

    out: int
    into: int
    bias: int
    channel: int

    def symmetry(self, params: Params) -> rg.Symmetry:
        """The permutations of the hidden units, of networks without a model axis."""
        axes: dict[str, list[str | None]] = {name: [None] * tensor.ndim for name, tensor in params.items()}
        last = len(params) // 2
        for k in range(last):
            for name, axis, place in ((f"w{k}", self.out, k + 1), (f"w{k}", self.into, k), (f"b{k}", self.bias, k + 1)):
                axes[name][axis] = f"u{place}" if 0 < place < last else None
        return rg.Symmetry.from_axes(axes).bind(params)


def named(lists: Lists) -> Params:
    """Weights and biases by name."""
    return {f"{kind}{k}": x for kind, part in zip("wb", lists, strict=True) for k, x in enumerate(part)}


def unnamed(params: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The opposite of `named`."""
    count = len(params) // 2
    return [params[f"w{k}"] for k in range(count)], [params[f"b{k}"] for k in range(count)]


@dataclass(eq=False)
class InPlace:
    """A net of regauge that takes weights and biases in the form of a peer, made when it meets the first ones.

    Attributes:
        form: The peer's form.
        layer: One of `LAYERS`; without one, the encoder and the head stand alone.
        channels: Channels of the outputs, which are then weights and biases.
        outputs: Numbers for each network, in place of these.
        depth: Number of layers.
        width: Width of the net.
        is_spoiled: Whether every entry is first multiplied by a number of its own, which breaks the symmetry.
    """

    form: Form
    layer: Layer | None
    channels: int = 1
    outputs: int | None = None
    depth: int = 1
    width: int = 16
    is_spoiled: bool = False
    net: ws.Metanet | None = field(default=None, init=False)

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor], *, is_whole: bool = False) -> Any:
        """Numbers, or weights and biases: with all channels of one change, or with one channel for each change."""
        params = named((weights, biases))
        if self.is_spoiled:
            chance = torch.Generator().manual_seed(0)
            params = {name: x * torch.randn(x.shape[1:], generator=chance) for name, x in params.items()}
        if self.net is None:
            self.net = self._make({name: tensor[0] for name, tensor in params.items()})
        made = self.net(params) if self.layer is not None else self._without_layers(self.net, params)
        if self.outputs is not None:
            return made
        if not is_whole:
            made = {name: self._first(x if self.channels > 1 else x.unsqueeze(1)) for name, x in made.items()}
        return unnamed(made)

    def _first(self, changes: Tensor) -> Tensor:
        """The first channel of every change, as channels."""
        return changes.select(2, 0) if self.form.channel == 0 else changes.select(-1, 0).movedim(1, -1)

    def _make(self, params: Params) -> ws.Metanet:
        changed = ws.Equivariant(scale=1.0, changes=self.channels)
        head: Head = ws.Invariant(self.outputs) if self.outputs is not None else changed
        generator = torch.Generator().manual_seed(0)
        return ws.Metanet(
            self.form.symmetry(params),
            layer=self.layer or ws.NFN(),
            head=head,
            width=self.width,
            depth=self.depth,
            parts=("permutation",),
            generator=generator,
        ).to(next(iter(params.values())).dtype)

    def _without_layers(self, net: ws.Metanet, params: Params) -> Any:
        features, layout = net.features(params, layers=0), net.layout
        assert net.head is not None
        return net.head(Read(features, layout, 0, params, dict.fromkeys(layout.parameters, 1.0)))


@dataclass(frozen=True)
class Packing:
    """Weights `[models, out, in, channels]` and biases `[models, out, channels]` as features of one width.

    What no group moves lies one after the other in the vectors of the units, or of the network.

    Attributes:
        widths: Numbers of units, from the inputs to the outputs.
        channels: Channels of each weight, and of all biases.
        are_ends_sets: Whether inputs and outputs are sets of units, too.
    """

    widths: tuple[int, ...]
    channels: tuple[tuple[int, ...], int]
    are_ends_sets: bool

    @property
    def sets(self) -> range:
        """The places whose units are permuted."""
        last = len(self.widths) - 1
        return range(last + 1) if self.are_ends_sets else range(1, last)

    def symmetry(self) -> rg.Symmetry:
        """The symmetry of chains with one channel."""
        name = {k: f"u{k}" if k in self.sets else None for k in range(len(self.widths))}
        axes, params = {}, {}
        for k, (before, after) in enumerate(pairwise(self.widths)):
            axes |= {f"w{k}": (name[k + 1], name[k]), f"b{k}": (name[k + 1],)}
            params |= {f"w{k}": torch.zeros(after, before), f"b{k}": torch.zeros(after)}
        return rg.Symmetry.from_axes(axes).bind(params)

    def places(self) -> list[tuple[tuple[str, str], bool, int]]:
        """For weights, then biases: whose features they are, whether their first axis folds in, and the second."""
        found = []
        for k, _ in enumerate(self.channels[0]):
            ends = [k + 1 in self.sets, k in self.sets]
            key = ("pairs", f"w{k}") if all(ends) else ("units", f"u{k + 1 if ends[0] else k}")
            found.append((key, not ends[0], 1 if ends[1] else 2))
        for k, _ in enumerate(self.channels[0]):
            is_set = k + 1 in self.sets
            found.append((("units", f"u{k + 1}") if is_set else ("network", ""), not is_set, 0))
        return found

    def sizes(self) -> dict[tuple[str, str], int]:
        """The length of the vectors that each set, block and network needs."""
        found: dict[tuple[str, str], int] = {}
        tensors = [*pairwise(self.widths), *((n,) for n in self.widths[1:])]
        for k, (key, folds_first, second) in enumerate(self.places()):
            is_weight = k < len(self.channels[0])
            count = self.channels[0][k] if is_weight else self.channels[1]
            size = tensors[k]
            if is_weight:
                count *= (size[1] if folds_first else 1) * (size[0] if second == 2 else 1)
            elif folds_first:
                count *= size[0]
            found[key] = found.get(key, 0) + count
        return found

    def pack(self, lists: Lists, width: int) -> dict[tuple[str, str], Tensor]:
        """Features of weights and biases."""
        parts: dict[tuple[str, str], list[Tensor]] = {}
        for k, (x, (key, folds_first, _)) in enumerate(zip((*lists[0], *lists[1]), self.places(), strict=True)):
            if k < len(lists[0]):
                x = x.transpose(1, 2) if folds_first else x
                x = x if key[0] == "pairs" else x.flatten(2)
            elif folds_first:
                x = x.flatten(1)
            parts.setdefault(key, []).append(x)
        models = len(lists[0][0])
        found = {key: torch.cat(each, -1) for key, each in parts.items()}
        for place in self.sets:
            found.setdefault(("units", f"u{place}"), torch.zeros(models, self.widths[place], 0, dtype=torch.float64))
        found.setdefault(("network", ""), torch.zeros(models, 0, dtype=torch.float64))
        return {key: nn.functional.pad(x, (0, width - x.shape[-1])) for key, x in found.items()}

    def unpack(self, features: Mapping[tuple[str, str], Tensor]) -> Lists:
        """The opposite of `pack`."""
        taken: dict[tuple[str, str], int] = {}
        found, (each, count) = [], self.channels
        for k, (key, folds_first, _) in enumerate(self.places()):
            start, x = taken.get(key, 0), features[key]
            is_weight = k < len(each)
            channels = each[k] if is_weight else count
            folded = 1
            if is_weight and key[0] == "units":
                folded = self.widths[k + 1] if folds_first else self.widths[k]
            elif not is_weight and folds_first:
                folded = self.widths[-1]
            taken[key] = start + folded * channels
            x = x[..., start : taken[key]]
            if is_weight and key[0] == "units":
                x = x.unflatten(-1, (folded, channels))
                x = x.transpose(1, 2) if folds_first else x
            elif not is_weight and folds_first:
                x = x.unflatten(-1, (folded, channels))
            found.append(x)
        return found[: len(each)], found[len(each) :]


def express(
    layer: Layer, packing: Packing, theirs: Callable[[Lists], Lists], *, outputs: Packing, tolerance: float = 1e-9
) -> str:
    """Find parameters of a linear layer of regauge that make it a peer's, on some networks, and compare it on others.

    The layer here is `x + L(silu(norm(x)))`, and its map `L` is compared with the peer's layer on `silu(norm(x))`.

    Raises:
        Failed: The map on other networks is not the peer's.
    """
    layout = compile_layout(packing.symmetry())
    width = max(*packing.sizes().values(), *outputs.sizes().values(), 2)
    generator = torch.Generator().manual_seed(0)
    built: Any = layer.build(LayerPlan((layout,), width, EVERYTHING, generator)).double()
    keys = [*(("units", name) for name in layout.units), *(("pairs", b.name) for b in layout.pair_blocks)]
    keys.append(("network", ""))

    def draw(models: int) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
        """Features, and what the peer makes of them."""
        shapes = [(b, a, c) for (a, b), c in zip(pairwise(packing.widths), packing.channels[0], strict=True)]
        biases = [(n, packing.channels[1]) for n in packing.widths[1:]]
        lists = [
            [torch.randn(models, *shape, generator=generator, dtype=torch.float64) for shape in part]
            for part in (shapes, biases)
        ]
        x = packing.pack((lists[0], lists[1]), width)
        active = {key: activate(x[key], norm) for key, norm in zip(keys, built.norms, strict=True)}
        return x, outputs.pack(theirs(packing.unpack(active)), width)

    def run(x: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        units, pairs = ({name: t for (kind, name), t in x.items() if kind == one} for one in ("units", "pairs"))
        made = built(Features(units, pairs, x["network", ""], {}), layout)
        found = {("units", n): t for n, t in made.units.items()} | {("pairs", n): t for n, t in made.pairs.items()}
        found["network", ""] = made.network
        return {key: t - x[key] for key, t in found.items()}

    hubs = find_hubs(layout, EVERYTHING, is_local=built.settings.is_local)
    order = list(dict.fromkeys(link.key for hub in hubs for link in hub.writes))
    with torch.no_grad():
        for parameter in built.parameters():
            if not any(parameter is p for norm in built.norms for p in norm.parameters()):
                parameter.zero_()
        columns = sum(weight.shape[1] for weight in built.weights)
        x, wanted = draw(columns + 50)
        design: dict[Any, list[Tensor]] = {key: [] for key in keys}
        for hub, weight in zip(hubs, built.weights, strict=True):
            for j in range(weight.shape[1]):
                weight[::width, j] = 1.0
                made = run(x)
                weight[:, j] = 0.0
                for key in {link.key for link in hub.writes}:
                    design[key].append(made[key][..., 0].flatten())
        for key in keys:
            flat = torch.stack([*design[key], torch.ones_like(design[key][0])], 1)
            solved = torch.linalg.lstsq(flat, wanted[key].flatten(0, -2), driver="gelsd").solution
            start = 0
            for hub, weight in zip(hubs, built.weights, strict=True):
                for k, link in enumerate(hub.writes):
                    if link.key == key:
                        weight[k * width : (k + 1) * width] = solved[start : start + weight.shape[1]].T
                        start += weight.shape[1]
            built.biases[order.index(key)] = solved[-1]
        x, wanted = draw(5)
        made = run(x)
    far = max(float((made[key] - wanted[key]).abs().max()) for key in keys)
    size = max(float(wanted[key].abs().max()) for key in keys)
    if not far <= tolerance * size:
        raise Failed(f"the closest map of regauge's layer differs by {far / size:.1g} of the largest output")
    return f"the parameters that make it the same map are solved for; on other networks it agrees to {tolerance:g}"


@contextmanager
def replaced(module: ModuleType, names: Mapping[str, Any]) -> Iterator[None]:
    """Members of a module that stand for others for a while."""
    kept = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def load(path: Path, name: str) -> ModuleType:
    """A module from its file, under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def pretend(*names: str) -> None:
    """Let modules be imported that are not installed, of which nothing is used."""
    for name in names:
        sys.modules.setdefault(name, MagicMock())


def run_test(test: Callable[..., Any], *arguments: Any) -> None:
    """Run a test of a peer, with the same chance every time and without gradients."""
    torch.manual_seed(0)
    random.seed(0)
    with torch.no_grad():
        test(*arguments)


def require_failure(run: Callable[[], Any]) -> None:
    """Raise `Failed` unless an assertion of a test fails."""
    try:
        run()
    except AssertionError:
        return
    raise Failed("the test passes with a net that respects nothing")


def require_close(made: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Raise `Failed` unless both agree, relative to the largest."""
    far = float((made - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    if not far <= tolerance:
        raise Failed(f"{what} differ by {far:.1g} of the largest")
