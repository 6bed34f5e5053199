"""Where the tensors of a network meet: over the units, and the combinations of units, that they have in common."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from regauge.weightspace.layout import Block, Layout

POOLED = -1
"""In place of a hub's axis: the values along this axis are pooled."""

Key = tuple[str, str]
"""What features belong to: "units", "pairs" or "network", and the name of the set or block."""


@dataclass(frozen=True)
class Link:
    """One way in which features are read at a hub, or written from it.

    Attributes:
        key: Whose features.
        axes: For each of their axes the hub's axis that it runs along with, or `POOLED`. Two axes that run along with
            the same one are the diagonal: where both ends are one unit.
    """

    key: Key
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Hub:
    """Units, or combinations of units, at which features meet.

    Attributes:
        sizes: Number of units along each axis; none where everything is pooled.
        is_set: Whether it is one set of units, on which set layers work.
        reads: What arrives.
        writes: What goes out.
    """

    sizes: tuple[int, ...]
    is_set: bool
    reads: tuple[Link, ...]
    writes: tuple[Link, ...]


@dataclass(frozen=True)
class _Grid:
    """The axes of features or of a hub: their groups, for each axis those that it is repeated within, and sizes."""

    groups: tuple[str, ...]
    bases: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]


@lru_cache(maxsize=256)
def find_hubs(layout: Layout, targets: frozenset[str], *, is_local: bool) -> tuple[Hub, ...]:
    """The hubs of a layout: every set of units, every combination of sets that some block has, and the whole network.

    Args:
        layout: Of the networks.
        targets: What is written, in the words of `weightspace.layers`.
        is_local: Whether features hear only from those that have units in common with them. Then the pooled features of
            a block go to itself alone, and those of the network exchange with those of units.
    """
    grids: dict[Key, _Grid] = {("units", name): _grid_of_set(layout, name) for name in layout.units}
    sets = tuple(grids.values())
    for block in layout.pair_blocks:
        grids["pairs", block.name] = _grid_of_block(layout, block)
    places: list[_Grid] = list(sets)
    for grid in grids.values():
        if not any(_bijections(grid, place) for place in places):
            places.append(grid)
    grids["network", ""] = _Grid((), (), ())
    hubs = []
    for place in places:
        links = {key: _links(grid, place) for key, grid in grids.items()}
        turns = _bijections(place, place)
        reads = [Link(key, axes) for key, found in links.items() for axes in found]
        writes = [Link(key, axes) for key, found in links.items() for axes in found if _is_first(axes, found, turns)]
        hubs.append(Hub(place.sizes, place in sets, tuple(reads), tuple(writes)))
    everything = [Link(key, (POOLED,) * len(grid.sizes)) for key, grid in grids.items()]
    if is_local:
        own = [link for link in everything if link.key[0] != "network"]
        units, network = [link for link in own if link.key[0] == "units"], [everything[-1]]
        hubs += [Hub((), False, (link,), (link,)) for link in own]
        hubs += [Hub((), False, (*network, *units), tuple(network)), Hub((), False, tuple(network), tuple(units))]
    else:
        hubs.append(Hub((), False, tuple(everything), tuple(everything)))
    kept = (
        Hub(hub.sizes, hub.is_set, hub.reads, tuple(link for link in hub.writes if _kind(link.key, layout) in targets))
        for hub in hubs
    )
    return tuple(hub for hub in kept if hub.writes)


def _kind(key: Key, layout: Layout) -> str:
    kind, name = key
    if kind == "pairs" and name in layout.unwritten:
        return "unwritten"
    return "positions" if kind == "units" and not layout.units[name].is_permuted else kind


def _grid_of_set(layout: Layout, name: str) -> _Grid:
    units = layout.units[name]
    bases = tuple(tuple(units.axes.index(base) for base in layout.units[axis].axes[:-1]) for axis in units.axes)
    return _Grid(units.axes, bases, units.sizes)


def _grid_of_block(layout: Layout, block: Block) -> _Grid:
    groups = tuple(label.group for label in block.labels)
    bases: list[tuple[int, ...]] = [()] * len(groups)
    for end in block.ends:
        place = dict(zip(layout.units[end.units].axes, end.axes, strict=True))
        for axis in end.axes:
            bases[axis] = tuple(place[base] for base in layout.units[groups[axis]].axes[:-1])
    return _Grid(groups, tuple(bases), block.sizes)


def _links(grid: _Grid, place: _Grid) -> list[tuple[int, ...]]:
    """All ways in which axes of features cover those of a hub, each with the copies that it is repeated within."""
    choices = [
        (POOLED, *(k for k, other in enumerate(place.groups) if other == group and len(place.bases[k]) == len(own)))
        for group, own in zip(grid.groups, grid.bases, strict=True)
    ]
    return [
        axes
        for axes in product(*choices)
        if {*axes} - {POOLED} == {*range(len(place.groups))}
        and all(
            here == POOLED or tuple(axes[base] for base in own) == place.bases[here]
            for here, own in zip(axes, grid.bases, strict=True)
        )
    ]


def _bijections(grid: _Grid, place: _Grid) -> list[tuple[int, ...]]:
    if len(grid.groups) != len(place.groups):
        return []
    return [axes for axes in _links(grid, place) if POOLED not in axes]


def _is_first(axes: tuple[int, ...], found: list[tuple[int, ...]], turns: list[tuple[int, ...]]) -> bool:
    """Whether a link is the first of those that differ by a turn of the hub, which would write the same once more."""
    turned = [tuple(POOLED if k == POOLED else turn[k] for k in axes) for turn in turns]
    return found.index(axes) == min(found.index(other) for other in turned)


def count_fans(hubs: tuple[Hub, ...]) -> dict[Key, int]:
    """For everything that is written, the number of features that it is a sum over."""
    fans: dict[Key, int] = {}
    for hub in hubs:
        for link in hub.writes:
            fans[link.key] = fans.get(link.key, 0) + len(hub.reads)
    return fans
