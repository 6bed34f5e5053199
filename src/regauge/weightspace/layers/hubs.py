"""Hubs, at which tensors exchange features.

A hub is a unit set, or a combination of unit sets, that occurs in several tensors.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from regauge.weightspace.layout.blocks import Grid
from regauge.weightspace.layout.compile import Layout

POOLED = -1
"""The value for an axis of features to which no axis of the hub corresponds. Features are pooled along axes with the
value `POOLED`."""

NOTHING = Grid((), (), ())
"""The grid without axes, for hubs (common units of tensors) at which all axes are pooled."""

Key = tuple[str, str]
"""The key of a tensor of features: its kind ("units", "pairs" or "network"), and the name of the unit set or of the
block of weights."""


@dataclass(frozen=True)
class HubLink:
    """The correspondence of axes through which a hub (units that occur in several tensors) reads or writes features.

    Attributes:
        key: The block or unit set that has the features.
        axes: For each axis of the features, the corresponding axis of the hub, or `POOLED`. If two axes correspond to
            the same axis of the hub, only the diagonal is used, where both indices are the same unit.
    """

    key: Key
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Hub:
    """A unit set, or a combination of unit sets, through which tensors exchange features.

    Attributes:
        grid: The axes of the hub, or none if all axes are pooled.
        is_set: Whether the hub is a single unit set, whose units may also exchange features by attention.
        reads: The links through which the hub reads features.
        writes: The links through which the hub writes features.
    """

    grid: Grid
    is_set: bool
    reads: tuple[HubLink, ...]
    writes: tuple[HubLink, ...]


@lru_cache(maxsize=256)
def find_hubs(layout: Layout, targets: frozenset[str], *, is_local: bool) -> tuple[Hub, ...]:
    """Return all hubs for networks of one layout. The hubs are every unit set, every combination of unit sets that
    indexes some block, and the network as a whole.

    Args:
        layout: The layout of the networks.
        targets: The kinds of features that are written, named as in `weightspace.layers`.
        is_local: Whether a tensor's features read only features of tensors with which it has units in common. In local
            layers, the pooled features of a block are written only to this block. The network's features are exchanged
            only with the features of units.
    """
    grids: dict[Key, Grid] = {("units", name): grid for name, grid in layout.grids.items()}
    sets = tuple(grids.values())
    for block in layout.pair_blocks:
        grids["pairs", block.name] = layout.grid(block.name)
    places: list[Grid] = list(sets)
    for grid in grids.values():
        if not any(_bijections(grid, place) for place in places):
            places.append(grid)
    grids["network", ""] = NOTHING
    hubs = []
    for place in places:
        links = {key: _links(grid, place, has_diagonals=not layout.is_weighed) for key, grid in grids.items()}
        turns = _bijections(place, place)
        reads = [HubLink(key, axes) for key, found in links.items() for axes in found]
        writes = [HubLink(key, axes) for key, found in links.items() for axes in found if _is_first(axes, found, turns)]
        hubs.append(Hub(place, place in sets, tuple(reads), tuple(writes)))
    everything = [HubLink(key, (POOLED,) * len(grid.sizes)) for key, grid in grids.items()]
    if is_local:
        own = [link for link in everything if link.key[0] != "network"]
        units, network = [link for link in own if link.key[0] == "units"], [everything[-1]]
        hubs += [Hub(NOTHING, False, (link,), (link,)) for link in own]
        hubs += [
            Hub(NOTHING, False, (*network, *units), tuple(network)),
            Hub(NOTHING, False, tuple(network), tuple(units)),
        ]
    else:
        hubs.append(Hub(NOTHING, False, tuple(everything), tuple(everything)))
    kept = (
        Hub(hub.grid, hub.is_set, hub.reads, tuple(link for link in hub.writes if _kind(link.key, layout) in targets))
        for hub in hubs
    )
    return tuple(hub for hub in kept if hub.writes)


def _kind(key: Key, layout: Layout) -> str:
    kind, name = key
    if kind == "pairs" and name in layout.unwritten:
        return "unwritten"
    return "positions" if kind == "units" and not layout.units[name].is_permuted else kind


def _links(grid: Grid, place: Grid, *, has_diagonals: bool = True) -> list[tuple[int, ...]]:
    """Return all ways to assign axes of features to axes of a hub. An axis of nested units is assigned together with
    the axes of the units that contain them.

    If the copies of a split unit count as one unit, diagonals are left out, because diagonals would distinguish the
    copies.
    """
    choices = [
        (POOLED, *(k for k, other in enumerate(place.groups) if other == group and len(place.bases[k]) == len(own)))
        for group, own in zip(grid.groups, grid.bases, strict=True)
    ]
    return [
        axes
        for axes in product(*choices)
        if {*axes} - {POOLED} == {*range(len(place.groups))}
        and (has_diagonals or len([k for k in axes if k != POOLED]) == len(place.groups))
        and all(
            here == POOLED or tuple(axes[base] for base in own) == place.bases[here]
            for here, own in zip(axes, grid.bases, strict=True)
        )
    ]


def _bijections(grid: Grid, place: Grid) -> list[tuple[int, ...]]:
    if len(grid.groups) != len(place.groups):
        return []
    return [axes for axes in _links(grid, place) if POOLED not in axes]


def _is_first(axes: tuple[int, ...], found: list[tuple[int, ...]], turns: list[tuple[int, ...]]) -> bool:
    """Return whether a link is the first among links that differ only by a permutation of the hub's axes."""
    turned = [tuple(POOLED if k == POOLED else turn[k] for k in axes) for turn in turns]
    return found.index(axes) == min(found.index(other) for other in turned)


def count_fans(hubs: tuple[Hub, ...]) -> dict[Key, int]:
    """Return, for each tensor of features, the number of pooled feature tensors that are summed in its update."""
    fans: dict[Key, int] = {}
    for hub in hubs:
        for link in hub.writes:
            fans[link.key] = fans.get(link.key, 0) + len(hub.reads)
    return fans
