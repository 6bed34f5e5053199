"""Blocks of a nested group cut out of tensors, with the places where inner groups act on one block."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regauge.core.act import Site, take
from regauge.core.closest import Character
from regauge.core.families import Family, Tensors, families
from regauge.core.groups import Group


@dataclass(frozen=True)
class Blocks:
    """The blocks of a root: tensors `[problem, block, ...]`, and where the inner groups act on one block."""

    a: dict[str, Tensor]
    b: dict[str, Tensor]
    characters: dict[str, Character]
    families: list[Family]


def split(family: Family, a: Tensors, b: Tensors) -> Blocks:
    """One tensor per site of the root, its blocks along axis 1, with the sites of the inner groups on a block."""
    root = family.root
    inner = {group.name: _outside(group, root) for group in (*family.members[1:], *family.fixed)}
    blocks = Blocks({}, {}, {}, [])
    sites: dict[str, list[Site]] = {}
    for name, local in family.sites.items():
        for k, site in enumerate(local):
            if site.group.name != root.name:
                continue
            key, axis = f"{name}@{k}", site.placement.axis
            rows = site.positions.reshape(root.size, -1).sort(-1).values
            for source, into in ((a[name], blocks.a), (b[name], blocks.b)):
                picked = take(source, 1 + axis, rows.flatten().to(source.device))
                shape = (*source.shape[: 1 + axis], *rows.shape, *source.shape[2 + axis :])
                into[key] = picked.reshape(shape).movedim(1 + axis, 1)
            blocks.characters[key] = tuple(e % 2 for e in site.placement.sign)
            here = [_on_block(other, root, axis, rows[0], inner) for other in local if other.group.name in inner]
            sites[key] = [s for s in here if s is not None]
    blocks.families.extend(families(inner.values(), {key: local for key, local in sites.items() if local}))
    return blocks


def _outside(group: Group, root: Group) -> Group:
    return replace(group, within=tuple(base for base in group.within if base != root.name))


def _on_block(site: Site, root: Group, axis: int, row: Tensor, inner: Mapping[str, Group]) -> Site | None:
    """A site of an inner group in the coordinates of one block; None where another axis has its copies."""
    within = site.group.within
    if root.name in within:
        where = site.bases[within.index(root.name)][0]
        if (site.placement.axis if where is None else where) != axis:
            return None
    positions, units, mask = site.positions, site.units, torch.ones(site.positions.numel(), dtype=torch.bool)
    placement = site.placement
    if placement.axis == axis:
        mask = torch.isin(positions, row)
        if not bool(mask.any()):  # Fused parameters have several blocks on one axis; this one belongs to another.
            return None
        positions, units = torch.searchsorted(row, positions[mask]), units[mask]
        per_unit = positions.numel() // site.group.size
        stride = int(positions[per_unit] - positions[0]) if site.group.size > 1 else 1
        placement = replace(placement, start=0, stride=stride, repeats=())
    bases: list[tuple[int | None, Tensor]] = []
    for base, (other, index) in zip(within, site.bases, strict=True):
        if base == root.name:
            continue
        if other is None:
            bases.append((None, index[mask]))
        else:
            bases.append((other, index[row] if other == axis else index))
    return Site(inner[site.group.name], placement, positions, units, tuple(bases))
