"""Barriers between transformers by width, depth, training and architecture, with methods that remove barriers.

References:
    Theus et al. (2025), Generalized linear mode connectivity for transformers.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge.core.interpolation import mean
from regauge.core.params import Params
from regauge.nets.transformer import (
    Attention,
    FeedForward,
    GatedFeedForward,
    PreNormBlock,
    ViT,
    rms_norm,
)
from regauge.report.pictures import Chart, Series
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.one_basin import Basin, BasinPair, BasinWay, population
from regauge_papers.populations import Population, networks
from regauge_papers.table import BARRIER, MIDPOINT, Quantity, Record, Row, Table, halfway
from regauge_papers.ways import TEMPERED, TEMPERED_NOTE

Kind = Literal["causes-vit", "causes-gpt"]
KINDS: Mapping[Kind, str] = {
    "causes-vit": "vision transformers of digits, by width, depth, heads and training",
    "causes-gpt": "language models of Tiny Shakespeare, by width, depth, training and architecture",
}
SPREAD = Quantity("spread", 2, of=lambda record: record["spread"][-1] if "spread" in record else None)
"""The standard deviation of the residual stream after the last block in the midpoint network, divided by the standard
deviation in the endpoints."""
END = Quantity("loss of an end", of=lambda record: fmean(record["line"][k]["loss"] for k in (0, -1)))
QUANTITIES = (BARRIER, MIDPOINT, Quantity("accuracy", of=halfway("accuracy")), END, SPREAD)
BASE = "base"


@dataclass(frozen=True)
class Variant:
    """A variant of the base settings: one change of the architecture or of the length of training."""

    label: str  # "base", or the change: an axis and its value
    axis: str  # what is varied; "" if it has no order
    value: float  # on the axis
    population: Population


@dataclass(frozen=True)
class Causes:
    """Settings: disjoint pairs of networks for each variant."""

    variants: tuple[Variant, ...]
    ways: tuple[BasinWay, ...]
    axes: Mapping[str, float] = field(compare=False)  # what is varied along an axis, with the value of the base
    pairs: int
    points: int  # networks on each line, both ends included
    read: int  # training examples for methods that read data, and for the control
    test: int  # test examples


class Speaker(nn.Module):
    """A language model between the styles of GPT-2 and Llama: token ids `[batch, token]` to logits."""

    def __init__(
        self,
        symbols: int,
        context: int,
        *,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int | None = None,
        is_tied: bool = False,
        is_rotary: bool = False,
        is_gated: bool = False,
        has_biases: bool = True,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        if not is_rotary:
            self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(
            *(
                PreNormBlock(
                    width,
                    Attention(width, heads, kv_heads=kv_heads, is_causal=True, is_rotary=is_rotary, bias=has_biases),
                    GatedFeedForward(width, 8 * width // 3) if is_gated else FeedForward(width, 4 * width),
                    norm,
                )
                for _ in range(layers)
            )
        )
        self.norm = norm(width)
        if not is_tied:
            self.head = nn.Linear(width, symbols, bias=False)
        self.is_tied, self.is_rotary = is_tied, is_rotary

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if not self.is_rotary:
            x = x + self.positions[: tokens.shape[1]]
        x = self.norm(self.blocks(x))
        return functional.linear(x, self.embedding.weight) if self.is_tied else self.head(x)


def config(kind: Kind, scale: Scale) -> Causes:
    """Return variants with three pairs of vision transformers and two pairs of language models, or ten pairs at the
    full scale.
    """
    is_smoke, is_image = scale == "smoke", kind == "causes-vit"
    steps = 2 if is_smoke else 400
    ways = (
        BasinWay("as trained"),
        BasinWay(TEMPERED, is_tempered=True),
        BasinWay("weights, reordered", rg.WeightMatching(), "never"),
        BasinWay("weights", rg.WeightMatching()),
        *([BasinWay("learned, reordered", rg.ContinuousDescent(steps=steps), "never")] if is_image else []),
        BasinWay("learned", rg.ContinuousDescent(steps=steps)),
        BasinWay("plain mean, trained", trained=steps),
    )
    find = vision_variants if is_image else language_variants
    variants, axes = find(is_smoke=is_smoke)
    if is_smoke:
        return Causes(variants[:2], ways, axes, 1, points=3, read=40, test=60)
    read, test = (1300, 360) if is_image else (3000, 600)
    pairs = (3 if is_image else 2) if scale == "cpu" else 10
    return Causes(variants, ways, axes, pairs, points=11, read=read, test=test)


def vision_variants(*, is_smoke: bool) -> tuple[tuple[Variant, ...], dict[str, float]]:
    """Return vision transformers of digits: the base, and variants with one change each."""
    base = (
        {"width": 8, "layers": 1, "heads": 2, "epochs": 1}
        if is_smoke
        else {
            "width": 48,
            "layers": 2,
            "heads": 4,
            "epochs": 30,
        }
    )
    other = population("basin-vit", is_smoke=is_smoke)

    def make(label: str, axis: str, changed: Mapping[str, int], *, is_rms: bool = False) -> Variant:
        now = {**base, **changed}
        epochs = now.pop("epochs")

        def build() -> nn.Module:
            module = ViT(8, 4 if is_smoke else 2, **now)
            return replace_norms(module) if is_rms else module

        name = f"ViT, width {now['width']}, {now['layers']} layers"
        name += f", {now['heads']} heads" * ("heads" in changed) + ", RMSNorm" * is_rms
        training = replace(other.training, epochs=epochs)
        found = replace(other, architecture=name, make=build, training=training)
        return Variant(label, axis, changed.get(axis, 0), found)

    values = {"width": (16, 32, 96, 192), "layers": (1, 4, 6), "heads": (1, 2, 8), "epochs": (5, 10, 100)}
    found = [make(f"{axis} {value}", axis, {axis: value}) for axis, many in values.items() for value in many]
    return (make(BASE, "", {}), *found, make("RMSNorm", "", {}, is_rms=True)), {axis: base[axis] for axis in values}


def language_variants(*, is_smoke: bool) -> tuple[tuple[Variant, ...], dict[str, float]]:
    """Return language models: the base in the style of GPT-2, and variants with one change each, up to the style of
    Llama.
    """
    base = {"width": 8, "layers": 1, "epochs": 1} if is_smoke else {"width": 64, "layers": 2, "epochs": 3}
    other, context = population("basin-gpt", is_smoke=is_smoke), 16 if is_smoke else 64

    def make(label: str, axis: str = "", changed: Mapping[str, int] | None = None, **style: Any) -> Variant:
        now: dict[str, Any] = {**base, **(changed or {})}
        epochs = now.pop("epochs")

        def build() -> nn.Module:
            # The head counts the symbols of the text, which is read only when it is needed.
            symbols = other.make().embedding.num_embeddings
            return Speaker(symbols, context, **now, **{"heads": 2 if is_smoke else 4} | style)

        name = f"language model, width {now['width']}, {now['layers']} layers" + f", {label}" * bool(style)
        training = replace(other.training, epochs=epochs)
        found = replace(other, architecture=name, make=build, training=training)
        return Variant(label, axis, (changed or {}).get(axis, 0), found)

    values = {"width": (32, 128), "layers": (1, 4), "epochs": (1, 6)}
    along = [make(f"{axis} {value}", axis, {axis: value}) for axis, many in values.items() for value in many]
    llama: dict[str, Any] = {"is_rotary": True, "is_gated": True, "has_biases": False, "norm": rms_norm}
    styles = (
        make("head tied to the embedding", is_tied=True),
        make("RMSNorm", norm=rms_norm),
        make("rotary positions", is_rotary=True),
        make("gated MLPs", is_gated=True),
        make("Llama style: all three, without biases", **llama),
    )
    return (make(BASE), *along, *styles), {axis: base[axis] for axis in values}


def replace_norms(module: nn.Module) -> nn.Module:
    """Return the module, in which an RMSNorm has replaced each LayerNorm."""
    for layer in list(module.modules()):
        for name, child in layer.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(layer, name, rms_norm(*child.normalized_shape))
    return module


def measure(config: Causes, run: Run) -> Table:
    """Train the networks of each variant, align each pair by each method, and evaluate the lines."""
    found = [measure_variant(config, one, run) for one in config.variants]
    rows = [
        Row.of(f"{variant.label}: {way.label}", [records[k]], QUANTITIES, is_drawn=False)
        for variant, records in zip(config.variants, found, strict=True)
        for k, way in enumerate(config.ways)
    ]
    base, seen = config.variants[0].population, f"{config.test:,} test examples at {config.points} points"
    training = base.training
    notes = (
        f"base: {base.architecture}, on {base.data}; {training.epochs} epochs of AdamW, learning rate up to "
        f"{training.optimizer.lr:g} and down again, weight decay {training.optimizer.weight_decay:g}, batches of "
        f"{training.batch}; each other variant has one change",
        f"{config.pairs} independent pairs for each variant; the loss is that of {seen} of each line; methods and the "
        f"control read {config.read:,} training examples",
        "spread: the standard deviation over examples of the residual stream behind the last block halfway, over the "
        "root mean square of those at both ends; 1 if nothing collapses",
        TEMPERED_NOTE,
    )
    title = "Barriers of transformers, by " + ", ".join(config.axes)
    charts = draw(config, found)
    return Table(title, notes, QUANTITIES, tuple(rows), "test cross entropy (nats)", pictures=charts)


def measure_variant(config: Causes, variant: Variant, run: Run) -> list[list[Record]]:
    """Return, for each alignment method, the records of all pairs of networks of one variant."""
    data = variant.population.read(run)
    trained = networks(variant.population, data, run, range(2 * config.pairs))
    basin = Basin(variant.population, config.ways, config.pairs, config.points, config.read, config.test)
    pairs = [CausePair(basin, data, trained[2 * k], trained[2 * k + 1], k, run) for k in range(config.pairs)]
    by_pair = run.grid(f"aligning {variant.label}", lambda _, pair, way: pair.examine(way), pairs, config.ways)
    return [list(records) for records in zip(*by_pair, strict=True)]


class CausePair(BasinPair):
    """Two networks, and the standard deviations of activations in the network halfway between them."""

    def examine(self, way: BasinWay) -> Record:
        """Return the record of the line between two networks, with the deviations of the residual stream at the
        midpoint.
        """
        record = self.line(way)
        if way.trained or way.is_tempered:
            return record
        settings = ("spread", self._config.population, self._config.test, way)
        return record | self._run.record(settings, str(self._index), lambda: {"spread": self._spread(way)})

    def _spread(self, way: BasinWay) -> list[float]:
        moved, _ = self._align(way)
        a, b, middle = (self._deviations(one) for one in (self._a, moved, mean([self._a, moved])))
        return [x / math.sqrt((y * y + z * z) / 2) for x, y, z in zip(middle, a, b, strict=True)]

    def _deviations(self, params: Params) -> list[float]:
        """Return the standard deviation of the residual stream over examples, after each block."""
        seen: list[float] = []

        def keep(_: nn.Module, __: object, out: Tensor) -> None:
            seen.append(float(out.var(0).sum().sqrt()))

        hooks = [block.register_forward_hook(keep) for block in self._module.blocks]
        try:
            with torch.no_grad():
                torch.func.functional_call(self._module, params, (self._data.test_inputs[: self._config.test],))
        finally:
            for hook in hooks:
                hook.remove()
        return seen


def draw(config: Causes, found: Sequence[Sequence[Sequence[Record]]]) -> dict[str, tuple[Chart, ...]]:
    """Return a picture of the barriers along each axis: the mean and the range over pairs."""
    charts = []
    for axis, base in config.axes.items():
        known = [(one.value if one.axis == axis else base, k) for k, one in enumerate(config.variants)]
        known = sorted(one for one in known if config.variants[one[1]].axis in {axis, ""})
        known = [(value, k) for value, k in known if config.variants[k].label == BASE or config.variants[k].axis]
        series = []
        for w, way in enumerate(config.ways):
            if way.is_tempered:  # The loss of its ends is another one.
                continue
            values = [[float(BARRIER.read(record) or 0) for record in found[k][w]] for _, k in known]
            at = [float(value) for value, _ in known]
            series.append(Series(way.label, at, [*map(fmean, values)], [*map(min, values)], [*map(max, values)]))
        charts.append(Chart(f"by {axis}", axis, "barrier (nats)", tuple(series), is_log_x=axis != "layers"))
    return {"axes": tuple(charts)}


EXPERIMENTS: dict[str, Experiment] = {
    kind: Experiment(f"barriers of {words}", functools.partial(config, kind), measure) for kind, words in KINDS.items()
}
