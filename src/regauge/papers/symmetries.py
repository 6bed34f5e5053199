"""Smaller symmetries, to compare what each family of a larger one is worth."""

from dataclasses import replace

from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry


def without_shifts(symmetry: Symmetry) -> Symmetry:
    """The subgroup of permutations, signs and scales: sine networks as if only signs were known of them."""
    return replace(symmetry, groups=tuple(_without_shifts(group) for group in symmetry.groups))


def permutations_only(symmetry: Symmetry) -> Symmetry:
    """The subgroup of permutations."""
    return replace(symmetry, groups=tuple(_permutations(group) for group in symmetry.groups))


def _without_shifts(group: Group) -> Group:
    places = tuple(replace(place, parity=(), shift=()) for place in group.placements)
    return replace(group, shifts=0, placements=places)


def _permutations(group: Group) -> Group:
    places = tuple(replace(place, scale=(), sign=(), parity=(), shift=()) for place in group.placements)
    return replace(group, scales=0, signs=0, shifts=0, placements=places)
