"""Symmetries written by hand: axes named in a dictionary, sizes taken from the parameters."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from regauge.core.groups import Group, Kind, Placement


def groups_from_axes(
    axes: Mapping[str, Sequence[str | None]], kinds: Mapping[str, Kind], omegas: Mapping[str, float]
) -> tuple[Group, ...]:
    """The groups that a dictionary of axes describes, without sizes; see `Symmetry.from_axes`."""
    found: dict[str, list[Placement]] = {}
    for parameter, row in axes.items():
        for axis, text in enumerate(row):
            if text is None:
                continue
            match = re.fullmatch(r"(.+?)(?:\*(\d+))?(\^[+-]1)?", text)
            if match is None:
                raise ValueError(f"axis {axis} of {parameter!r} is {text!r}; write 'name', 'name*4' or 'name^-1'")
            name, inner, power = match[1], int(match[2] or 1), match[3]
            is_inverse = axis > 0 if power is None else power == "^-1"
            kind = kinds.get(name, "permutation")
            if kind not in _FAMILIES:
                raise ValueError(
                    f"kind {kind!r} cannot be written as axes; choose permutation, signed, dihedral, scaled, "
                    "orthogonal, centered, rotation or linear, or build Group and Placement objects for nested groups"
                )
            place = Placement(parameter, axis, stride=inner, repeats=((inner, 1),) if inner > 1 else ())
            if kind == "scaled":
                place = replace(place, scale=(-1 if is_inverse else 1,))
            elif kind == "signed":
                place = replace(place, sign=(1,))
            elif kind == "dihedral":
                shift = math.pi / omegas.get(name, 1.0) if len(row) == 1 and not is_inverse else 0.0
                place = replace(place, sign=(1,), parity=(int(is_inverse),), shift=(shift,))
            elif "matrix" in _FAMILIES[kind]:
                place = replace(place, is_inverse=is_inverse)
            found.setdefault(name, []).append(place)
    for name in {*kinds, *omegas} - found.keys():
        raise ValueError(f"group {name!r} has a kind but no axis; the axes name {sorted(found)}")
    carried = {name: _FAMILIES[kinds.get(name, "permutation")] for name in found}
    return tuple(Group(name, 0, tuple(places), **carried[name]) for name, places in found.items())


def set_sizes(group: Group, shapes: Mapping[str, tuple[int, ...]]) -> Group:
    """The group with its size, read off the shapes of the parameters that it acts on."""
    if group.size:
        return group
    sizes = {}
    for p in group.placements:
        length = shapes[p.parameter][p.axis]
        if length % p.stride:
            raise ValueError(
                f"group {group.name!r} repeats each unit {p.stride} times on axis {p.axis} of {p.parameter!r}, "
                f"whose length {length} is no multiple of that; fix the spec"
            )
        sizes[p] = length // p.stride
    first, size = next(iter(sizes.items()))
    for p, other in sizes.items():
        if other != size:
            raise ValueError(
                f"group {group.name!r} has {size} units on axis {first.axis} of {first.parameter!r}, but axis {p.axis} "
                f"of {p.parameter!r} (shape {shapes[p.parameter]}) has {other}; these layers do not share a group: "
                "fix the spec"
            )
    return replace(group, size=size)


_ROTATED: dict[str, Any] = {"is_permuted": False, "matrix": "orthogonal"}
_FAMILIES: dict[str, dict[str, Any]] = {
    "permutation": {},
    "signed": {"signs": 1},
    "dihedral": {"signs": 1, "shifts": 1},
    "scaled": {"scales": 1},
    "orthogonal": _ROTATED,
    "centered": {**_ROTATED, "keeps_ones": True},
    "rotation": {**_ROTATED, "is_proper": True},
    "linear": {**_ROTATED, "matrix": "linear"},
}
"""What groups of each kind that axes can name carry."""
