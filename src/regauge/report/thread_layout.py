"""The layout of a symmetry as threads across layers: the band of each layer, and the lane of each group."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from regauge.core.groups import Frozen, Group, axes_of


@dataclass(frozen=True)
class Mark:
    """A layer on which a group acts. `is_read` is true if the layer sums over the units."""

    band: int
    parameter: str
    axis: int
    is_read: bool


@dataclass(frozen=True)
class Thread:
    """A group with its lane and its marks, from the first layer to the last."""

    group: Group
    lane: int
    marks: tuple[Mark, ...]

    @property
    def ends(self) -> tuple[int, int]:
        """The indices of the first and the last band."""
        return self.marks[0].band, self.marks[-1].band


@dataclass(frozen=True)
class ShownAxis:
    """An axis in the figure: its size, the indices of the threads on the axis, and the reason if the axis is frozen."""

    number: int
    size: int
    threads: tuple[int, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Band:
    """A layer: its name, and its parameters (by their names within the layer) with their axes."""

    name: str
    parameters: Mapping[str, tuple[ShownAxis, ...]]

    @property
    def axes(self) -> tuple[ShownAxis, ...]:
        """The axes of all parameters of the layer."""
        return tuple(axis for axes in self.parameters.values() for axis in axes)

    @property
    def is_pinned(self) -> bool:
        """Whether an axis of the layer is frozen."""
        return any(axis.reasons for axis in self.axes)


@dataclass(frozen=True)
class ThreadLayout:
    """The layers in their order, and the groups that act on these layers. Groups that act on no layer are excluded."""

    bands: tuple[Band, ...]
    threads: tuple[Thread, ...]

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return max((thread.lane + 1 for thread in self.threads), default=0)


def lay_out(
    groups: Sequence[Group],
    shapes: Mapping[str, tuple[int, ...]],
    frozen: Sequence[Frozen],
    readers: Collection[tuple[str, int]],
) -> ThreadLayout:
    """Lay out threads from top to bottom. Below the last layer of a thread, a new thread may use its lane."""
    places = [place for group in groups for place in group.placements]
    known = [(place.parameter, place.axis) for place in places] + [(row.parameter, row.axis) for row in frozen]
    ranks = {name: len(shape) for name, shape in shapes.items()}
    for name, axis in known:
        ranks[name] = max(ranks.get(name, 0), axis + 1)
    names = [name for name, rank in ranks.items() if rank]
    layers = [*dict.fromkeys(name.rpartition(".")[0] for name in names)]
    numbers = {name: layers.index(name.rpartition(".")[0]) for name in names}
    found = {}
    for group in groups:
        places_of = {
            (place.parameter, place.axis): Mark(
                numbers[place.parameter], place.parameter, place.axis, (place.parameter, place.axis) in readers
            )
            for place in group.placements
        }
        found[group.name] = sorted(places_of.values(), key=lambda mark: mark.band)
    drawn = [group for group in groups if found[group.name]]
    # Long threads come first, and are therefore drawn on the left.
    drawn.sort(key=lambda group: (found[group.name][0].band, -found[group.name][-1].band))
    threads, ends = [], list[int]()
    for group in drawn:
        marks = tuple(found[group.name])
        lane = next((k for k, end in enumerate(ends) if end < marks[0].band), len(ends))
        ends[lane : lane + 1] = [marks[-1].band]
        threads.append(Thread(group, lane, marks))
    on: dict[tuple[str, int], list[int]] = {}
    for k, thread in enumerate(threads):
        for mark in thread.marks:
            on.setdefault((mark.parameter, mark.axis), []).append(k)
    why: dict[tuple[str, int], list[str]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for row in frozen:
        why.setdefault((row.parameter, row.axis), []).append(row.reason)
        sizes[row.parameter, row.axis] = row.size
    bands = []
    for k, layer in enumerate(layers):
        parameters = {
            name.rpartition(".")[2]: tuple(
                ShownAxis(
                    axis,
                    axes_of(shapes[name])[axis] if name in shapes else sizes.get((name, axis), 0),
                    tuple(on.get((name, axis), ())),
                    tuple(why.get((name, axis), ())),
                )
                for axis in range(ranks[name])
            )
            for name in names
            if numbers[name] == k
        }
        bands.append(Band(layer, parameters))
    return ThreadLayout(tuple(bands), tuple(threads))
