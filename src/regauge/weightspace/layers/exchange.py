"""Maps between all features of a network that respect permutations, with separate parameters for each tensor."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features
from regauge.weightspace.layers.dense import Dense, Norm
from regauge.weightspace.layers.hubs import NOTHING, POOLED, Hub, HubLink, Key, count_fans, find_hubs
from regauge.weightspace.layers.plan import LayerPlan
from regauge.weightspace.layers.reading import Pooling, Pools, activate, map_and_pool
from regauge.weightspace.layout.blocks import Grid
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.shares import Shares, log_weights

Sets = Literal["mean", "attention"]
Reads = dict[Key, list[tuple[int, ...]]]
"""For each tensor of features, one tuple of axes for each time the tensor is read. The tuple contains the axes that are
not pooled."""


@dataclass(frozen=True)
class Exchange:
    """Settings of an exchange of features between tensors; see `hubs`.

    Attributes:
        pooling: The kind of pooling ("max" or "mean") over axes of a tensor that do not belong to the common units.
        sets: Whether the units of a set exchange features only by pooling, or also by attention.
        heads: The number of attention heads.
        is_local: Whether a tensor's features read only features of tensors with which it has units in common.
    """

    pooling: Pooling = "mean"
    sets: Sets = "mean"
    heads: int = 4
    is_local: bool = False


class ExchangeLayer(nn.Module):
    """The layer `x + L(silu(norm(x)))` for all features x, where `L` consists of one linear map for each hub.

    A hub is a set of units, or of pairs of units, that occurs in several tensors (see `hubs`). Features are pooled once
    for each hub that reads them. One linear map computes, from the concatenated pooled features of a hub, the outputs
    for all tensors to which the hub writes. The initial entries of a map have variance 1 / n, where n is the number of
    features that one output reads from all hubs together. Sums therefore have the same initial size as their terms.
    """

    def __init__(self, settings: Exchange, plan: LayerPlan) -> None:
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
        hubs = find_hubs(layout, self.targets, is_local=self.settings.is_local)
        reads, pooling, shares = _reads(hubs), self.settings.pooling, features.shares
        own = {} if shares else _own_maps(hubs, reads, {int(k) for k in self.attention})
        result, pools = dict(values), dict[Key, Pools]()
        for norm, (key, x) in zip(self.norms, values.items(), strict=True):
            assert isinstance(norm, Norm)
            if key in own:
                result[key], known = map_and_pool(x, norm, self.weights[own[key]], reads[key], pooling)
                pools[key] = Pools(known, pooling)
            else:
                pools[key] = Pools.of(activate(x, norm), pooling, _grid(key, layout), shares)
        made: dict[Key, list[Tensor]] = {}
        for k, (hub, weight) in enumerate(zip(hubs, self.weights, strict=True)):
            if k in own.values():
                made.setdefault(hub.writes[0].key, [])
                continue
            arrived = [pools[link.key].read(link, hub) for link in hub.reads]
            gathered = torch.cat(arrived, -1) if len(arrived) > 1 else arrived[0]
            out = nn.functional.linear(gathered, weight)
            if f"{k}" in self.attention:
                out = out + self.attention[f"{k}"](gathered, hub.grid, features.shares)
            parts = out.chunk(len(hub.writes), -1) if len(hub.writes) > 1 else (out,)
            for link, part in zip(hub.writes, parts, strict=True):
                made.setdefault(link.key, []).append(_write(part, link, values[link.key]))
        for key, bias in zip([*made], self.biases, strict=True):
            result[key] = _add(result[key], [bias, *made.pop(key)], is_own=key in own)
        return features.change(
            {name: result["units", name] for name in features.units},
            {name: result["pairs", name] for name in features.pairs},
            result["network", ""],
        )


class _Attention(nn.Module):
    """Attention of each unit to all units of the same set, within the same copy of their group."""

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


def _reads(hubs: Sequence[Hub]) -> Reads:
    """Return, for each tensor of features, one entry for each hub (common set of units) that reads it: the axes that
    are not pooled.
    """
    reads: Reads = {}
    for link in (link for hub in hubs for link in hub.reads):
        kept = tuple(axis for axis, place in enumerate(link.axes) if place != POOLED)
        reads.setdefault(link.key, []).append(kept)
    return reads


def _own_maps(hubs: Sequence[Hub], reads: Reads, sets: Collection[int]) -> dict[Key, int]:
    """Return, for each tensor of features, the hub (set of units) that reads and writes only this tensor, without
    pooling.
    """
    found: dict[Key, int] = {}
    for k, hub in enumerate(hubs):
        link, *others = hub.reads
        whole = tuple(range(len(link.axes)))
        is_alone = not others and hub.writes == (link,) and k not in sets
        if is_alone and whole and link.axes == whole and reads[link.key].count(whole) == 1:
            found[link.key] = k
    return found


def _add(x: Tensor, parts: Sequence[Tensor], *, is_own: bool) -> Tensor:
    """Return the sum of several tensors, stored in the memory of `x` unless `x` is an input."""
    *small, last = sorted(parts, key=Tensor.numel)  # The whole array is touched last.
    if is_own:
        return (x.add_(reduce(torch.add, small)) if small else x).add_(last)
    made = reduce(torch.add, [*small, last])
    return made.add_(x) if made.shape == x.shape else x + made


def _write(part: Tensor, link: HubLink, target: Tensor) -> Tensor:
    """Return the output of a hub (a common set of units) in the shape of features. Axes along which the output is
    constant have length one.
    """
    first: dict[int, int] = {}
    for axis, place in enumerate(link.axes):
        if place != POOLED:
            first.setdefault(place, axis)
    order = sorted(first, key=first.__getitem__)
    shape = [1] * len(link.axes)
    for axis in first.values():
        shape[axis] = target.shape[1 + axis]
    if order != sorted(order):
        part = part.permute(0, *(1 + place for place in order), part.ndim - 1)
    x = part.reshape(len(part), *shape, part.shape[-1])
    for axis, place in enumerate(link.axes):
        if place != POOLED and first[place] != axis:
            x = x * _diagonal(first[place], axis, target)
    return x


def _diagonal(one: int, other: int, target: Tensor) -> Tensor:
    """Return a mask in the shape of `target`, which is one where the indices along two axes are equal."""
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
