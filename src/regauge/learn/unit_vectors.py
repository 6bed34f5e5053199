"""Vectors of units, stored as tensors on which the groups of a symmetry act, such that they can be matched like
weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from regauge.alignment.engine.mixing import Responses
from regauge.alignment.engine.paired_networks import act_on
from regauge.core.element import Element
from regauge.core.groups import Group, Placement
from regauge.core.symmetry import Symmetry
from regauge.weightspace.heads.unit_features import UnitFeatures, VectorHead
from regauge.weightspace.layout.characters import Character
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.metanet import Metanet

SMALLEST = 1e-6
"""Vectors with a smaller norm are treated as zero."""

Place = tuple[str, Character]
"""A set of units, and the signs that change the vectors of the set: one exponent for each family of signs, with zero
for no change."""


@dataclass(frozen=True, eq=False)
class Placed:
    """Vectors of units, as tensors on which the groups of a symmetry act.

    Attributes:
        symmetry: The symmetry of the networks. The groups of the symmetry also act on the vectors.
        names: For each set of units and each character (exponents of signs), the name of the tensor `[(bases ...,)
            size, width]`.
        groups: For each set of units, the name of the group that permutes the set.
    """

    symmetry: Symmetry
    names: Mapping[Place, str]
    groups: Mapping[str, str]


def place(symmetry: Symmetry, layout: Layout, width: int) -> Placed:
    """Extend the groups of a symmetry to the vectors of units. The sizes of all groups must be known.

    A group is identified by the axes on which it acts, not by its name. A set of units that no group of the symmetry
    permutes has no vectors.
    """
    groups = {name: group for name in layout.units if (group := _counterpart(layout.symmetry[name], symmetry))}
    names: dict[Place, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    more: dict[str, list[Placement]] = {group.name: [] for group in symmetry.groups}
    for name, units in layout.units.items():
        if not units.is_permuted or any(axis not in groups for axis in units.axes):
            continue
        own = [groups[axis] for axis in units.axes]
        if own[-1].within != tuple(group.name for group in own[:-1]):
            continue
        blank = tuple((False,) * (group.signs + group.shifts) for group in own)
        for k, character in enumerate((blank, *layout.unit_signs.get(name, ()))):
            tensor = f"%{name} {k}"
            names[name, character] = tensor
            shapes[tensor] = (*units.sizes, width)
            for axis, (group, exponents) in enumerate(zip(own, character, strict=True)):
                more[group.name].append(_placement(group, tensor, axis, exponents))
    placed = tuple(replace(group, placements=(*group.placements, *more[group.name])) for group in symmetry.groups)
    return Placed(
        replace(symmetry, groups=placed, shapes={**symmetry.shapes, **shapes}),
        names,
        {name: group.name for name, group in groups.items()},
    )


def length_of(net: Metanet) -> int:
    """Return the length of the vectors that a net computes for units."""
    head = net.settings.head
    assert isinstance(head, UnitFeatures)
    return head.width


def read_vectors(net: Metanet, params: Mapping[str, Tensor], placed: Placed) -> dict[str, Tensor]:
    """Return the normalized vectors of all units, `[models, (bases ...,) size, width]`, by the names in `placed`.

    If no sign changes the vectors of a set, the mean vector is subtracted, because a common component does not
    distinguish units.

    Raises:
        ValueError: Some vectors are not finite.
    """
    layout = net.layout_of(params)
    features, canonical = net.canonical_features(params)
    assert isinstance(net.head, VectorHead)
    even, result = net.head.read(features, layout), {}
    for (name, character), tensor in placed.names.items():
        is_even = not any(any(exponents) for exponents in character)
        if is_even:
            x = even[name] - even[name].mean(-2, keepdim=True)
        else:
            known = features.odd.units.get(name, {})
            x = known[character] if character in known else torch.zeros_like(even[name])
        if not bool(x.isfinite().all()):
            models = (~x.flatten(1).isfinite().all(1)).nonzero().flatten().tolist()
            raise ValueError(
                f"network {models[0]} holds NaN or Inf, or values too large to be read ({len(models)} of {len(x)} do); "
                "leave them out"
            )
        result[tensor] = functional.normalize(x, dim=-1, eps=SMALLEST)
    return result if canonical is None else _undo(canonical, layout, placed, result)


def _undo(canonical: Element, layout: Layout, placed: Placed, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the vectors of the original networks, given the vectors of their canonical forms."""
    back, symmetry = layout.symmetry.inverse(canonical), placed.symmetry
    known = {placed.groups[name]: value for name, value in back.items() if name in placed.groups}
    element = Element(known, back.batch).fill(symmetry.identity(back.batch))
    return act_on(symmetry.groups, {name: symmetry.sites[name] for name in vectors}, element, vectors)


def responses(placed: Placed, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Responses:
    """Return the vectors of both networks of each pair in the form in which matching methods compare activations."""
    pairs = len(next(iter(b.values()))) if b else 1
    reach = torch.zeros(pairs, dtype=torch.float64)
    for name in b:
        reach = reach + (a[name].norm(dim=-1) * b[name].norm(dim=-1)).flatten(1).sum(1).double().cpu()
    return Responses(placed.symmetry, a, b, reach)


def _counterpart(group: Group, symmetry: Symmetry) -> Group | None:
    """Return the group of a symmetry that acts on the same axes as a given group."""
    own = {(place.parameter, place.axis, place.start, place.stride) for place in group.placements}
    for other in symmetry.groups:
        there = {(place.parameter, place.axis, place.start, place.stride) for place in other.placements}
        if own & there and other.size == group.size and other.is_permuted == group.is_permuted:
            return other
    return None


def _placement(group: Group, tensor: str, axis: int, exponents: tuple[bool | int, ...]) -> Placement:
    """Return the placement of a group on vectors. The placement has no scales, because scales do not change normalized
    vectors.
    """
    flips = tuple(map(int, exponents[: group.signs + group.shifts]))
    scale, shift = (0,) * group.scales, (0,) * group.shifts
    return Placement(tensor, axis, scale=scale, sign=flips[: group.signs], parity=flips[group.signs :], shift=shift)
