"""Maps between all features of a network that respect its permutations, with parameters for each tensor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regauge.weightspace.features import Features
from regauge.weightspace.layers.dense import Dense, Norm
from regauge.weightspace.layers.hubs import NOTHING, POOLED, Hub, Key, Link, count_fans, find_hubs
from regauge.weightspace.layers.plan import Plan
from regauge.weightspace.layout import Grid, Layout
from regauge.weightspace.shares import Shares, average, log_weights

Pooling = Literal["mean", "max"]
Sets = Literal["mean", "attention"]


@dataclass(frozen=True)
class Exchange:
    """What an exchange does at its hubs.

    Attributes:
        pooling: What becomes of the axes that a hub does not have.
        sets: Whether the units of a set hear from each other by what is pooled, or by attention as well.
        heads: Of the attention.
        is_local: Whether features hear only from those that have units in common with them.
    """

    pooling: Pooling = "mean"
    sets: Sets = "mean"
    heads: int = 4
    is_local: bool = False


class ExchangeLayer(nn.Module):
    """`x + L(silu(norm(x)))` for the features of everything, where `L` is one map at each hub.

    Every feature is pooled once for each way in which it meets a hub, the results are put side by side and mapped at
    once to what goes out to all. Sums begin with the size of what they sum: entries have a variance of one over the
    number of features that an output hears from at all hubs together.
    """

    def __init__(self, settings: Exchange, plan: Plan) -> None:
        super().__init__()
        (layout,), width, generator = plan.layouts, plan.width, plan.generator
        self.settings, self.targets = settings, plan.reads
        hubs = find_hubs(layout, plan.reads, is_local=settings.is_local)
        fans = count_fans(hubs)
        self.norms = nn.ModuleList(Norm(width) for _ in _keys(layout))
        self.weights = nn.ParameterList(_draw(hub, fans, width, generator) for hub in hubs)
        self.biases = nn.Parameter(torch.zeros(len(fans), width))
        self.attention = nn.ModuleDict()
        if settings.sets == "attention":
            self.attention = nn.ModuleDict(
                {f"{k}": _Attention(hub, width, settings.heads, generator) for k, hub in enumerate(hubs) if hub.is_set}
            )

    def forward(self, features: Features, layout: Layout) -> Features:
        values = _values(features)
        active = {
            key: _Activated.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
            for norm, (key, x) in zip(self.norms, values.items(), strict=True)
        }
        pools = {key: Pools(x, self.settings.pooling, _grid(key, layout), features.shares) for key, x in active.items()}
        hubs = find_hubs(layout, self.targets, is_local=self.settings.is_local)
        made: dict[Key, list[Tensor]] = {}
        for k, (hub, weight) in enumerate(zip(hubs, self.weights, strict=True)):
            arrived = [pools[link.key].read(link, hub) for link in hub.reads]
            gathered = torch.cat(arrived, -1) if len(arrived) > 1 else arrived[0]
            out = nn.functional.linear(gathered, weight)
            if f"{k}" in self.attention:
                out = out + self.attention[f"{k}"](gathered, hub.grid, features.shares)
            parts = out.chunk(len(hub.writes), -1) if len(hub.writes) > 1 else (out,)
            for link, part in zip(hub.writes, parts, strict=True):
                made.setdefault(link.key, []).append(_write(part, link, values[link.key]))
        result = dict(values)
        for key, bias in zip([*made], self.biases, strict=True):
            *small, whole = sorted(made.pop(key), key=Tensor.numel)  # The whole array is touched last.
            total = sum(small, bias)
            if whole.numel() == values[key].numel():
                result[key] = (whole + total).add_(values[key])
            else:
                result[key] = values[key] + (total + whole)
            del whole
        return features.change(
            {name: result["units", name] for name in features.units},
            {name: result["pairs", name] for name in features.pairs},
            result["network", ""],
        )


class _Activated(torch.autograd.Function):
    """`silu(norm(x))` of which only `x` is kept: what lies between is computed again for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        return nn.functional.silu(nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps), inplace=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        shape = list(x.shape[-1:])
        normed, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, ctx.eps)
        grad = torch.ops.aten.silu_backward(grads[0], normed)
        found = torch.ops.aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, [True, True, True])
        return (*found, None)


class _Largest(torch.autograd.Function):
    """The largest values along an axis; equal ones share the gradient.

    `x.max(axis)` finds places, too, which takes twenty times as long along an axis that is not the last.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> Tensor:
        largest = x.amax(axis, keepdim=True)
        ctx.save_for_backward(x, largest)
        ctx.axis = axis
        return largest.squeeze(axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, largest = ctx.saved_tensors
        are_largest = torch.eq(x, largest, out=torch.empty_like(x))
        return are_largest.mul_(grads[0].unsqueeze(ctx.axis) / are_largest.sum(ctx.axis, keepdim=True)), None


class _Attention(nn.Module):
    """What units hear from the units of their set and copy, by attention among them."""

    def __init__(self, hub: Hub, width: int, heads: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.heads = heads
        self.into = Dense(len(hub.reads) * width, 3 * width, is_biased=False, generator=generator)
        gain = 1 / math.sqrt(2)
        self.out = Dense(width, len(hub.writes) * width, is_biased=False, gain=gain, generator=generator)

    def forward(self, gathered: Tensor, grid: Grid, shares: Shares) -> Tensor:
        query, key, value = self.into(gathered).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        weights = log_weights((len(grid.sizes),), grid, shares)
        mask = None if weights is None else weights.squeeze(-1).unsqueeze(-2).unsqueeze(-3)
        heard: Tensor = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        result: Tensor = self.out(heard.transpose(-3, -2).flatten(-2))
        return result


class Pools:
    """Features pooled over some of their axes, each combination once, from the smallest result that has them."""

    def __init__(self, x: Tensor, pooling: Pooling, grid: Grid | None = None, shares: Shares | None = None) -> None:
        self.pooling, self.grid, self.shares = pooling, grid, shares or {}
        self.known = {tuple(range(x.ndim - 2)): x}

    def read(self, link: Link, hub: Hub) -> Tensor:
        """`[models, *sizes of the hub, width]`."""
        kept = tuple(axis for axis, place in enumerate(link.axes) if place != POOLED)
        x = self.over(kept)
        places = [link.axes[axis] for axis in kept]
        if places == list(range(len(hub.grid.sizes))):
            return x
        last = len(hub.grid.sizes) + 1
        return torch.einsum(x, [0, *(1 + place for place in places), last], [*range(last + 1)])

    def over(self, kept: tuple[int, ...]) -> Tensor:
        """Features with some of their axes, in order."""
        if kept not in self.known:
            sources = [axes for axes in self.known if {*kept} <= {*axes}]
            source = min(sources, key=lambda axes: self.known[axes].numel())
            away = [1 + k for k, axis in enumerate(source) if axis not in kept]
            x = self.known[source]
            if self.pooling == "mean" and self.grid is not None and self.shares:
                x = average(x, away, self.grid.keep(source), self.shares)
            elif self.pooling == "mean":
                x = x.mean(away)
            else:
                for axis in reversed(away):
                    x = _Largest.apply(x, axis)  # type: ignore[no-untyped-call]
            self.known[kept] = x
        return self.known[kept]


def _write(part: Tensor, link: Link, target: Tensor) -> Tensor:
    """What goes out of a hub, at the axes of features; length one where it is the same along an axis."""
    first: dict[int, int] = {}
    for axis, place in enumerate(link.axes):
        if place != POOLED:
            first.setdefault(place, axis)
    order = sorted(first, key=first.__getitem__)
    shape = [1] * len(link.axes)
    for axis in first.values():
        shape[axis] = target.shape[1 + axis]
    x = part.permute(0, *(1 + place for place in order), part.ndim - 1).reshape(len(part), *shape, part.shape[-1])
    for axis, place in enumerate(link.axes):
        if place != POOLED and first[place] != axis:
            x = x * _diagonal(first[place], axis, target)
    return x


def _diagonal(one: int, other: int, target: Tensor) -> Tensor:
    """One where two axes of features agree, else zero."""
    shape = [1] * (target.ndim - 1)
    shape[one], shape[other] = target.shape[1 + one], target.shape[1 + other]
    return torch.eye(shape[one], dtype=target.dtype, device=target.device).reshape(*shape[: target.ndim - 2], 1)


def _draw(hub: Hub, fans: Mapping[Key, int], width: int, generator: torch.Generator | None) -> Tensor:
    weight = torch.randn(len(hub.writes) * width, len(hub.reads) * width, generator=generator)
    sizes = torch.tensor([1 / math.sqrt(fans[link.key] * width) for link in hub.writes])
    return weight * sizes.repeat_interleave(width).unsqueeze(-1)


def _grid(key: Key, layout: Layout) -> Grid:
    kind, name = key
    return layout.grids[name] if kind == "units" else layout.grid(name) if kind == "pairs" else NOTHING


def _keys(layout: Layout) -> list[Key]:
    pairs: list[Key] = [("pairs", block.name) for block in layout.pair_blocks]
    return [*(("units", name) for name in layout.units), *pairs, ("network", "")]


def _values(features: Features) -> dict[Key, Tensor]:
    units: dict[Key, Tensor] = {("units", name): x for name, x in features.units.items()}
    pairs: dict[Key, Tensor] = {("pairs", name): x for name, x in features.pairs.items()}
    return {**units, **pairs, ("network", ""): features.network}
