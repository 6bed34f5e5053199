"""Slices of groups: tensors and symmetries from which some units of some groups are cut."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regauge.core.act import take
from regauge.core.arguments import check_arguments
from regauge.core.behind_gains import constant, ranges_of
from regauge.core.chart import chart_gains
from regauge.core.families import move_tensor
from regauge.core.groups import Group, Placement
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.pruning.cut_translations import cut_translations

Kept = Mapping[str, Int[Tensor, "*bases kept"]]
"""For each cut group, the ascending indices of the kept units; for a nested group, indices for each copy."""


@check_arguments
def cut_params(params: Mapping[str, Tensor], symmetry: Symmetry, kept: Kept) -> Params:
    """Return the tensors of a network after all units except the kept units are cut.

    The symmetry permutes the kept units to the front of each group, from nested groups outwards. Next, the entries
    after the kept units are cut off.

    Args:
        params: One network, which is not changed.
        symmetry: The symmetry, with every size known.
        kept: The indices of the kept units, in order. For a group that is repeated within other groups, the shape is
            `[*bases, kept]`.
    """
    return _cut_tensors(params, symmetry.bind(params), kept)


def cut_coordinates(coordinates: Mapping[str, Tensor], symmetry: Symmetry, kept: Kept) -> dict[str, Tensor]:
    """Return the coordinates of a network (see `Symmetry.split`) after all units except the kept units are cut.

    The result has no coordinates of translation families that the smaller network lacks.

    Args:
        coordinates: The coordinates of the network with all units.
        symmetry: The symmetry of the network, with every size known.
        kept: The indices of the kept units.
    """
    masks = kept_entries(symmetry, {one: units.shape[-1] for one, units in kept.items()})
    found = {}
    for name, own in cut_translations(symmetry.translations, symmetry.shapes, masks).items():
        family = symmetry.translation(name)
        home = family.entries.parameter
        held = _cut_tensors({home: family.embed(coordinates[name], symmetry.shapes[home])}, symmetry, kept)
        found[own.name] = own.shorten(own.vector(held[home]))
    gains = {name: tensor for name, tensor in coordinates.items() if name in chart_gains(symmetry)}
    return found | _cut_tensors(gains, symmetry.on_sums, kept)


def _cut_tensors(tensors: Mapping[str, Tensor], symmetry: Symmetry, kept: Kept) -> Params:
    """Return some tensors of a network after all units except the kept units are cut."""
    needed = {*kept, *(base for name in kept for base in symmetry[name].within)}
    small = replace(symmetry, groups=tuple(_reordered(group) for group in symmetry.groups if group.name in needed))
    moved = dict(tensors)
    for depth in sorted({len(symmetry[name].within) for name in kept}, reverse=True):
        element = small.identity()
        for name, units in kept.items():
            if len(symmetry[name].within) == depth:
                value = replace(element[name], perm=_to_front(units, symmetry[name].size))
                element = element.replace(name, value)
        moved = {name: move_tensor(small, element, name, tensor) for name, tensor in moved.items()}
    for name, masks in kept_entries(symmetry, {one: units.shape[-1] for one, units in kept.items()}).items():
        for axis, mask in masks.items() if name in moved else ():
            moved[name] = take(moved[name].contiguous(), axis, mask.nonzero().flatten().to(moved[name].device))
    return moved


@check_arguments
def cut_symmetry(symmetry: Symmetry, sizes: Mapping[str, int]) -> Symmetry:
    """Return the symmetry of a network after some of its groups are cut to smaller sizes."""
    masks = kept_entries(symmetry, sizes)
    shapes = dict(symmetry.shapes)
    for name, by_axis in masks.items():
        lengths = [int(by_axis[axis].sum()) if axis in by_axis else n for axis, n in enumerate(shapes[name])]
        shapes[name] = tuple(lengths)
    groups = []
    for group in symmetry.groups:
        size = sizes.get(group.name, group.size)
        placements = []
        for site in (s for name in dict.fromkeys(p.parameter for p in group.placements) for s in symmetry.sites[name]):
            if site.group.name == group.name:
                mask = masks.get(site.placement.parameter, {}).get(site.placement.axis)
                rows = site.positions.reshape(group.size, -1)[:size]
                placements.append(site.placement if mask is None else _placed(site.placement, rows, mask))
        classes = group.classes if size == group.size else ()
        groups.append(replace(group, size=size, placements=tuple(placements), classes=classes))
    frozen = tuple(
        replace(one, size=shapes[one.parameter][one.axis]) if one.parameter in shapes else one
        for one in symmetry.frozen
    )
    left = tuple(cut_translations(symmetry.translations, symmetry.shapes, masks).values())
    added = dict(symmetry.added)
    for name, number in added.items():
        if isinstance(number, tuple) and name in masks:
            added[name] = ranges_of(torch.as_tensor(constant(number, len(masks[name][0])))[masks[name][0]])
    return replace(symmetry, groups=tuple(groups), shapes=shapes, frozen=frozen, translations=left, added=added)


def _reordered(group: Group) -> Group:
    """Return the group of permutations that is contained in a group of matrices."""
    return group if group.matrix == "none" else replace(group, matrix="none", is_permuted=True)


def _to_front(units: Int[Tensor, "*bases kept"], size: int) -> Int[Tensor, "*bases size"]:
    """Return the permutation of all units that moves the given units to the front."""
    behind = torch.ones(*units.shape[:-1], size, dtype=torch.int64).scatter(-1, units, 0)
    return behind.argsort(dim=-1, stable=True)


def kept_entries(symmetry: Symmetry, sizes: Mapping[str, int]) -> dict[str, dict[int, Bool[Tensor, " length"]]]:
    """Return masks of the kept indices on each cut axis, if kept units come first in each group."""
    result: dict[str, dict[int, Tensor]] = {}
    for name, local in symmetry.sites.items():
        for site in local:
            size = sizes.get(site.group.name, site.group.size)
            if size < site.group.size:
                axis = site.placement.axis
                whole = torch.ones(symmetry.shapes[name][axis], dtype=torch.bool)
                mask = result.setdefault(name, {}).setdefault(axis, whole)
                mask[site.positions[site.units >= size]] = False
    return result


def _placed(placement: Placement, rows: Int[Tensor, "units entries"], mask: Bool[Tensor, " length"]) -> Placement:
    """Return a placement on an axis after only the masked indices are kept."""
    columns = mask[rows].all(0)
    if not torch.equal(mask[rows].any(0), columns):
        raise ValueError(f"the remaining entries of {_axis(placement)} are not evenly spaced; cut other groups")
    return placed_on(placement, (mask.cumsum(0) - 1)[rows[:, columns]])


def placed_on(placement: Placement, rows: Int[Tensor, "units entries"]) -> Placement:
    """Return a placement with new axis indices for each unit; raise a ValueError if the indices are irregular."""
    places = rows.sort(1).values
    start, stride = int(places[0, 0]), int(places[1, 0] - places[0, 0]) if len(places) > 1 else 1
    offsets = (places[0] - start).tolist()
    repeats = _repeats(offsets)
    again = torch.tensor(offsets) + start + stride * torch.arange(len(places)).unsqueeze(1)
    if not torch.equal(again, places) or _written_out(repeats) != offsets:
        raise ValueError(f"the remaining entries of {_axis(placement)} are not evenly spaced; cut other groups")
    return replace(placement, start=start, stride=stride, repeats=repeats)


def _axis(placement: Placement) -> str:
    return f"axis {placement.axis} of {placement.parameter!r}"


def _repeats(offsets: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return sizes and strides whose sums are the given offsets, which ascend from zero."""
    result: list[tuple[int, int]] = []
    block = 1
    while block < len(offsets):
        step, count = offsets[block], 1
        while block * count < len(offsets) and offsets[block * count] == count * step:
            count += 1
        result.insert(0, (count, step))
        block *= count
    return tuple(result)


def _written_out(repeats: Sequence[tuple[int, int]]) -> list[int]:
    total = torch.zeros(1, dtype=torch.int64)
    for size, stride in repeats:
        total = (total.unsqueeze(-1) + torch.arange(size) * stride).flatten()
    found: list[int] = total.sort().values.tolist()
    return found
