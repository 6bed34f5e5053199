"""The largest ranks that shapes allow for matrix products into which invertible matrices can be inserted."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor

from regauge.canonical.places import GroupSite
from regauge.core.symmetry import Symmetry

Ranks = Mapping[str, int]


def largest_ranks(symmetry: Symmetry, places: Mapping[str, Sequence[GroupSite]]) -> dict[str, int]:
    """Return, for each group of invertible matrices, the largest rank that the shapes allow for its product.

    The rank of a product is at most the number of entries per unit in either factor, and at most the rank of either
    factor. A low rank of one group in a chain of groups therefore limits the ranks of its neighbors.
    """
    ranks = {group.name: group.size for group in symmetry.groups if group.matrix == "linear"}
    before: dict[str, int] = {}
    while before != ranks:  # Ranks only decrease, so the loop ends.
        before = dict(ranks)
        for name in ranks:
            for is_inverse in (False, True):
                side = [place for place in places[name] if place.site.placement.is_inverse == is_inverse]
                if side:
                    ranks[name] = min(ranks[name], rank_of(symmetry, side, ranks))
    return ranks


def rank_of(symmetry: Symmetry, places: Sequence[GroupSite], ranks: Ranks) -> int:
    """Return the largest rank that entries of some tensors can have along one group's axes, given the ranks of other
    groups.
    """
    total = Fraction()
    for place in places:
        shape, site = symmetry.shapes[place.name], place.site
        copies = symmetry.count_copies(place.group.name)
        values = Fraction(site.positions.numel(), place.group.size)
        for axis, length in enumerate(shape):
            if axis != site.placement.axis:
                values *= length * _share(place, axis, length, ranks)
        total += values / copies
    return min(floor(total), places[0].group.size)


def _share(place: GroupSite, axis: int, length: int, ranks: Ranks) -> Fraction:
    """Return the fraction of full rank that is possible along an axis. The fraction is below one if another group of
    lower rank acts on the whole axis.
    """
    others = (other for other in place.others if other.site.placement.axis == axis and other.group.name in ranks)
    whole = [other.group for other in others if other.site.positions.numel() == length]
    return min((Fraction(ranks[group.name], group.size) for group in whole), default=Fraction(1))
