"""Symmetries and tensors of networks with additional units: the inverse of `regauge.pruning.slices`."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from regauge.core.act import covered
from regauge.core.behind_gains import constant, ranges_of
from regauge.core.groups import Group, Placement
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.pruning.slices import kept_entries, placed_on


def extend_symmetry(symmetry: Symmetry, sizes: Mapping[str, int]) -> Symmetry:
    """Return the symmetry of a network in which some groups have additional units after the existing units.

    Cutting the result with `cut_symmetry` gives the original symmetry. The result has no translations, because the
    entries of translations for the new units are not known.

    Args:
        symmetry: The symmetry, with every size known.
        sizes: The larger numbers of units, by group name.

    Raises:
        ValueError: Units cannot be added, because the units of a group do not fill their section of an axis.
    """
    shapes = {name: list(shape) for name, shape in symmetry.shapes.items()}
    axes: dict[tuple[str, int], dict[int, tuple[Group, Placement]]] = {}
    places = [(group, place) for group in symmetry.groups for place in group.placements]
    for k, (group, place) in enumerate(places):
        axes.setdefault((place.parameter, place.axis), {})[k] = (group, place)
    for (parameter, axis), own in axes.items():
        for name in dict.fromkeys(group.name for group, _ in own.values() if group.name in sizes):
            shapes[parameter][axis] = _extend_axis(own, shapes[parameter][axis], name, sizes[name])
        for k, (_, place) in own.items():
            places[k] = (places[k][0], place)
    groups = tuple(
        replace(
            group,
            size=sizes.get(group.name, group.size),
            placements=tuple(p for g, p in places if g is group),
            classes=() if group.name in sizes else group.classes,
        )
        for group in symmetry.groups
    )
    known = {name: tuple(shape) for name, shape in shapes.items()}
    frozen = tuple(
        replace(one, size=known[one.parameter][one.axis]) if one.parameter in known else one for one in symmetry.frozen
    )
    found = replace(symmetry, groups=groups, shapes=known, frozen=frozen, translations=())
    added = dict(symmetry.added)
    ranges = {name: number for name, number in symmetry.added.items() if isinstance(number, tuple)}
    masks = kept_entries(found, {group.name: group.size for group in symmetry.groups}) if ranges else {}
    for name in ranges.keys() & masks.keys():  # Additional units come after the units of the same range.
        numbers = torch.as_tensor(constant(ranges[name], symmetry.shapes[name][0]))
        added[name] = ranges_of(numbers[masks[name][0].cumsum(0) - 1])
    return replace(found, added=added)


def pad_params(params: Mapping[str, Tensor], symmetry: Symmetry, sizes: Mapping[str, int]) -> Params:
    """Return the tensors of a network, padded with zeros for missing units after the existing units.

    Args:
        params: One network, which is not changed.
        symmetry: The symmetry of the network with all units.
        sizes: The numbers of units of the given network, by name of the group that lacks units.
    """
    padded = dict(params)
    for name, masks in kept_entries(symmetry, sizes).items():
        for axis, mask in masks.items():
            tensor = padded[name]
            shape = (*tensor.shape[:axis], len(mask), *tensor.shape[axis + 1 :])
            where = mask.nonzero().flatten().to(tensor.device)
            padded[name] = tensor.new_zeros(shape).index_copy(axis, where, tensor)
    return padded


def _extend_axis(own: dict[int, tuple[Group, Placement]], length: int, name: str, size: int) -> int:
    """Shift the placements on one axis after a group gets more units, and return the axis's new length."""
    old = next(group.size for group, _ in own.values() if group.name == name)
    source, ends, copies = [torch.arange(length)], [2 * torch.arange(length)], [torch.zeros(length, dtype=torch.int64)]
    for group, place in own.values():
        if group.name == name:
            last, end = _last_unit(group, place)
            for number in range(1, size - old + 1):
                source.append(last)
                ends.append(2 * end - 1)  # after all entries before the end of the block, and before later entries
                copies.append(torch.full_like(last, number))
    origin, copy, key = torch.cat(source), torch.cat(copies), torch.cat(ends)
    order = ((key * (size + 1) + copy) * length + origin).argsort()
    index = order.argsort()
    for k, (group, place) in own.items():
        positions, units = covered(group, place, (0,) * place.axis + (length,))
        rows, owner = index[positions].reshape(group.size, -1), torch.full((length,), -1)
        owner[positions] = units
        new = owner[origin[length:]]
        if group.name == name:
            new = torch.where(new == old - 1, old - 1 + copy[length:], -1)
            rows = torch.cat([rows, _by_owner(new, index[length:], range(old, size))])
        else:
            rows = torch.cat([rows, _by_owner(new, index[length:], range(group.size))], 1)
        bigger = replace(group, size=len(rows), classes=())
        own[k] = (bigger, placed_on(place, rows))
    return len(order)


def _last_unit(group: Group, place: Placement) -> tuple[Tensor, Tensor]:
    """Return the indices of the last unit of a group, each with the end of its block of units."""
    inner = [(n, step) for n, step in place.repeats if step < place.stride]
    if prod(n for n, _ in inner) != place.stride:
        raise ValueError(
            f"group {group.name!r} does not fill axis {place.axis} of {place.parameter!r}; extend other groups"
        )
    blocks = torch.tensor([place.start])
    for n, step in place.repeats:
        if step >= place.stride:
            blocks = (blocks.unsqueeze(-1) + torch.arange(n) * step).flatten()
    ends = (blocks + group.size * place.stride).unsqueeze(-1).expand(-1, place.stride)
    return (ends - 1 - torch.arange(place.stride)).flatten(), ends.flatten()


def _by_owner(owners: Tensor, places: Tensor, units: range) -> Tensor:
    """Return the indices that belong to each unit; raise a ValueError if the numbers of indices differ between
    units.
    """
    is_own = (owners >= units.start) & (owners < units.stop)
    order = owners[is_own].argsort(stable=True)
    counts = torch.bincount(owners[is_own] - units.start, minlength=len(units))
    if bool((counts != counts[0]).any()):
        raise ValueError(
            "more units would lie in no regular order on an axis that several groups share; extend other groups"
        )
    return places[is_own][order].reshape(len(units), -1)
