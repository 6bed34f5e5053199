"""Widths of networks of one architecture: the groups whose numbers of units differ, and these numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from regauge.core.symmetry import Symmetry
from regauge.pruning import cut_symmetry
from regauge.pruning.extension import extend_symmetry

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class Widths:
    """Groups whose numbers of units differ between two networks.

    Attributes:
        sizes: The numbers of units of these groups in the first and in the second network.
        sides: The symmetry of each network.
        whole: The symmetry of a network with the larger number of units of each group.
        common: The symmetry with the smaller numbers of units.
    """

    sizes: Mapping[str, tuple[int, int]]
    sides: tuple[Symmetry, Symmetry]
    whole: Symmetry
    common: Symmetry

    def narrow(self, shapes: Shapes) -> dict[str, Shape]:
        """Return the shapes of one of the networks after a cut to the smaller numbers of units."""
        result = dict(shapes)
        for group in (self.common[name] for name in self.sizes):
            for place in group.placements:
                if place.parameter in shapes:
                    own = list(result[place.parameter])
                    own[place.axis] = self.common.shapes[place.parameter][place.axis]
                    result[place.parameter] = tuple(own)
        return result


def find_widths(a: Shapes, b: Shapes, symmetry: Symmetry) -> Widths | None:
    """Return the groups of a symmetry whose numbers of units differ between two networks; None if there are none.

    Only units that can be reordered one by one are counted. A group is counted if, in both networks, all axes that it
    acts on give the same number of units, as in networks made by `regauge.prune`.

    Args:
        a: The shapes of the first network.
        b: The shapes of the second network.
        symmetry: The symmetry of either network, or of another network of the same architecture.
    """
    if not symmetry.is_sized:
        return None
    found = [count_units(shapes, symmetry) for shapes in (a, b)]
    names = [name for name in found[0] if found[0][name] != found[1][name]]
    if not names:
        return None
    try:
        first, second = (resize(symmetry, sizes) for sizes in found)
        sizes = {name: (found[0][name], found[1][name]) for name in names}
        whole = resize(first, {name: max(pair) for name, pair in sizes.items()})
        common = resize(first, {name: min(pair) for name, pair in sizes.items()})
    except ValueError:  # Axes on which units lie in no regular order.
        return None
    return Widths(sizes, (first, second), whole, common)


def fit_widths(symmetry: Symmetry, shapes: Shapes) -> Symmetry:
    """Return a symmetry with the numbers of units of a network. Return it unchanged if it fits, or if no resized one
    fits.
    """
    if not symmetry.is_sized or _fits(symmetry, shapes):
        return symmetry
    try:
        fitting = resize(symmetry, count_units(shapes, symmetry))
    except ValueError:  # Units lie in no regular order.
        return symmetry
    return fitting if _fits(fitting, shapes) else symmetry


def _fits(symmetry: Symmetry, shapes: Shapes) -> bool:
    return all(shapes[name] == symmetry.shapes[name] for name in symmetry.sites if name in shapes)


def resize(symmetry: Symmetry, sizes: Mapping[str, int]) -> Symmetry:
    """Return the symmetry of a network in which some groups have more or fewer units.

    Raises:
        ValueError: There is no regular place for them.
    """
    less = {name: size for name, size in sizes.items() if size < symmetry[name].size}
    more = {name: size for name, size in sizes.items() if size > symmetry[name].size}
    symmetry = cut_symmetry(symmetry, less) if less else symmetry
    return extend_symmetry(symmetry, more) if more else symmetry


def count_units(shapes: Shapes, symmetry: Symmetry) -> dict[str, int]:
    """Return the number of units of each group in a network. If the axes of a group disagree, return its number in the
    symmetry.

    A group that shares all its axes with other groups is counted as soon as the other groups are.
    """
    counts: dict[str, int] = {}
    while True:
        told: dict[str, set[int]] = {}
        for name, count in _tell(shapes, symmetry, counts):
            told.setdefault(name, set()).add(count)
        if not told:
            return {group.name: counts.get(group.name, group.size) for group in symmetry.groups}
        for name, numbers in told.items():
            count = numbers.pop() if len(numbers) == 1 else 0
            counts[name] = count or symmetry[name].size
        try:
            symmetry = resize(symmetry, {name: counts[name] for name in told})
        except ValueError:
            counts |= {name: symmetry[name].size for name in told}


def _tell(shapes: Shapes, symmetry: Symmetry, known: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield groups and their numbers of units, from each axis with one uncounted group; 0 where no number fits."""
    for name, sites in symmetry.sites.items():
        if name not in shapes:
            continue
        there, here = shapes[name], symmetry.shapes[name]
        entries: dict[int, dict[str, int]] = {}
        for site in sites:
            if site.group.name not in known and site.group.is_permuted:
                own = entries.setdefault(site.placement.axis, {})
                own[site.group.name] = own.get(site.group.name, 0) + site.positions.numel() // site.group.size
        for axis, own in entries.items():
            if len(own) == 1:
                (group, each), *_ = own.items()
                more = there[axis] - here[axis] if len(there) == len(here) else None
                yield group, 0 if more is None or more % each else max(0, symmetry[group].size + more // each)
