"""Conversion between two descriptions of one symmetry, in which the same group may have different names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.core.act import covered
from regauge.core.groups import Group, Placement, axes_of
from regauge.core.symmetry import Symmetry
from regauge.discovery.systems import combination

Floats = NDArray[np.float64]
AxisKey = tuple[str, int]
"""The name of a parameter, and the number of one of its axes."""


def carry_over(
    symmetry: Symmetry, found: Sequence[Group], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Return the groups of a symmetry, with placements on intermediate values instead of parameters.

    The placements are computed from the placements of discovered groups. A group of the symmetry corresponds to the
    discovered group that has the same units on the same parameters. The families of the group are expressed as
    combinations of the discovered families. The combinations of discovered families determine how the families of the
    group act on intermediate values. `shapes` contains the shapes of the values. Also return a message for each group
    without a corresponding discovered group.
    """
    owners = {group.name: _owners(group, symmetry.shapes) for group in symmetry.groups}
    theirs = [(group, _owners(group, symmetry.shapes)) for group in found]
    partner: dict[str, str] = {}
    groups, notes = [], []
    for group in symmetry.groups:
        bare = replace(group, placements=())
        for other, there in theirs:
            bases = {partner.get(base, "") for base in group.within}
            if not bases <= set(other.within) or not _has_same_units(group, owners[group.name], other, there, symmetry):
                continue
            translate = _translation(group, other, symmetry)
            if translate is not None:
                partner[group.name] = other.name
                placements = [translate(p) for p in other.placements if p.parameter in shapes]
                bare = replace(group, placements=tuple(p for p in placements if p is not None))
                break
        else:
            notes.append(
                f"discovery does not find group {group.name!r} in this module, so its action on intermediate values is "
                "unknown; use the symmetry that `regauge.discover` returns, or a part of it"
            )
        groups.append(bare)
    return tuple(groups), tuple(notes)


def _owners(group: Group, shapes: Mapping[str, tuple[int, ...]]) -> dict[AxisKey, Tensor]:
    """Return the unit at each index of the axes on which a group acts. The unit is -1 at each index where the group
    does not act.
    """
    result: dict[AxisKey, Tensor] = {}
    for place in group.placements:
        if place.parameter in shapes:
            key, shape = (place.parameter, place.axis), axes_of(shapes[place.parameter])
            positions, units = covered(group, place, shape)
            result.setdefault(key, torch.full((shape[place.axis],), -1))[positions] = units
    return result


def _has_same_units(
    group: Group,
    here: Mapping[AxisKey, Tensor],
    other: Group,
    there: Mapping[AxisKey, Tensor],
    symmetry: Symmetry,
) -> bool:
    if group.size != other.size or not here or not here.keys() <= there.keys():
        return False
    if (group.matrix == "none") != (other.matrix == "none") or (group.is_permuted and not other.is_permuted):
        return False
    is_wider = (other.keeps_ones and not group.keeps_ones) or (other.is_proper and not group.is_proper)
    if (group.matrix == "linear" and other.matrix != "linear") or is_wider:
        return False
    if group.is_permuted or group.is_base or group.matrix != "none":
        # For tied parameters, one name is enough.
        tied = {name: names for names in symmetry.tied for name in names}
        known = {(name, axis) for parameter, axis in here for name in tied.get(parameter, (parameter,))}
        return there.keys() <= known and all(torch.equal(here[key], there[key]) for key in here)
    return all(torch.equal(units[units >= 0], there[key][units >= 0]) for key, units in here.items())


def _translation(group: Group, other: Group, symmetry: Symmetry) -> Callable[[Placement], Placement | None] | None:
    """Return a function that converts placements of the group `other` to placements of `group`.

    If a family of `group` is not a combination of families of `other`, return None.

    Let s be the factors, e the signs (zero or one) and k the shifts of an element of `group`. The corresponding element
    of `other` has the log factors `log s @ scale` and the shifts `k @ shift`. The signs of the corresponding element
    are `e @ sign + k @ parity` modulo two.
    """
    mine, its = _tables(group, other, symmetry)
    scale, shift = _combination(mine["scale"], its["scale"]), _combination(mine["shift"], its["shift"])
    sign = _combination_mod_2(mine["sign"], its["sign"])
    if scale is None or shift is None or sign is None:
        return None
    # Parities of the second group give a part of the first group's parities; signs of the second must give the rest.
    parity = _combination_mod_2((mine["parity"] - shift @ its["parity"]).round() % 2, its["sign"])
    ways = {
        a.is_inverse != b.is_inverse
        for a in group.placements
        for b in other.placements
        if (a.parameter, a.axis, a.start) == (b.parameter, b.axis, b.start)
    }
    if parity is None or (group.matrix == "linear" and len(ways) != 1):
        return None

    def translate(place: Placement) -> Placement | None:
        """Return the placement of `group` that corresponds to a placement of `other`, or None if `group` has no effect
        on that axis.
        """
        own, steps = np.array(place.sign, dtype=float), np.array(place.parity, dtype=float)
        result = replace(
            place,
            is_inverse=place.is_inverse != (ways == {True}),
            scale=tuple(int(e) for e in (scale @ np.array(place.scale, dtype=float)).round()),
            sign=tuple(int(e) for e in (sign @ own).round() % 2),
            parity=tuple(int(e) for e in (shift @ steps + parity @ own).round() % 2),
            shift=tuple(float(a) for a in shift @ np.array(place.shift, dtype=float)),
        )
        acts = group.matrix != "none" or group.is_permuted or group.is_base
        return result if acts or any((*result.scale, *result.sign, *result.parity, *result.shift)) else None

    return translate


def _tables(group: Group, other: Group, symmetry: Symmetry) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return the exponents of the families of two groups as matrices `[family, entry]`. Only the entries of the first
    unit of each group are listed.

    The first unit is enough, because each family has the same exponents for all units. In the matrices of both groups,
    the same column describes the same entry.
    """
    names = {p.parameter for p in group.placements}
    spared = {name for tied in symmetry.tied if names & set(tied) for name in tied} - names
    columns: dict[tuple[str, int, int], int] = {}
    entries: list[list[tuple[int, Placement]]] = [[], []]
    for into, source in zip(entries, (group, other), strict=True):
        for place in source.placements:
            if place.parameter not in symmetry.shapes or place.parameter in spared:
                continue
            positions, units = covered(source, place, symmetry.shapes[place.parameter])
            for position in positions[units == 0].tolist():
                where = (place.parameter, place.axis, position)
                into.append((columns.setdefault(where, len(columns)), place))
    tables = []
    for source, listed in zip((group, other), entries, strict=True):
        counts = {"scale": source.scales, "sign": source.signs, "parity": source.shifts, "shift": source.shifts}
        table = {key: np.zeros((count, len(columns))) for key, count in counts.items()}
        for column, place in listed:
            exponents = {"scale": place.scale, "sign": place.sign, "parity": place.parity, "shift": place.shift}
            for key, row in exponents.items():
                table[key][:, column] = row
        tables.append(table)
    return tables[0], tables[1]


def _combination(rows: Floats, basis: Floats) -> Floats | None:
    """Return coefficients c with `c @ basis == rows`, or None if this equation has no solution."""
    if not basis.size or not rows.size:
        return None if rows.any() else np.zeros((len(rows), len(basis)))
    found = np.linalg.lstsq(basis.T, rows.T, rcond=None)[0].T.astype(np.float64)
    return found if np.allclose(found @ basis, rows, atol=1e-9) else None


def _combination_mod_2(rows: Floats, basis: Floats) -> Floats | None:
    """Return coefficients c with `c @ basis == rows` modulo two, or None if this equation has no solution."""
    families = [dict(enumerate(row.astype(int).tolist())) for row in basis]
    found = np.zeros((len(rows), len(basis)))
    for k, row in enumerate(rows):
        coefficients = combination(families, dict(enumerate(row.astype(int).tolist())), modulus=2)
        if coefficients is None:
            return None
        found[k, list(coefficients)] = 1
    return found
