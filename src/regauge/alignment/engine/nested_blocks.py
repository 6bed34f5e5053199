"""Matching of nested groups: first all pairs of blocks are matched, and then an assignment pairs the blocks.

A block permutation with groups inside the blocks (attention heads, experts, normalization groups) is solved on two
levels. First, for each pair of blocks (u, v), the best inner elements are found. The best inner elements bring block v
of the second network closest to block u of the first. Second, the objectives of the inner elements are the profits of
an assignment between blocks. If no inner groups share a tensor, the inner problems are solved exactly. If all inner
problems are solved exactly, the whole solution is exact. If inner groups share tensors, coordinate ascent from two
initial elements solves each pair of blocks. For deeper nesting, each pair of blocks is solved on two levels in the same
way.

All tensors in this module have one leading axis of independent problems.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from regauge.alignment.engine.ascent import climb_from_two_starts
from regauge.core.act import Site, take
from regauge.core.closest import Character, Cost, ShiftCost, character, closest, diagonal
from regauge.core.element import Element, Value
from regauge.core.families import (
    Family,
    Tensors,
    complete,
    coupled_tensors,
    families,
    group_cost,
    inner_products,
    shift_cost,
    unfold,
)
from regauge.core.groups import Group
from regauge.core.products import matmul


@dataclass(frozen=True)
class Blocks:
    """The blocks of an outer group: tensors `[problem, block, ...]`, and the axes of one block on which inner groups
    act.
    """

    a: dict[str, Tensor]
    b: dict[str, Tensor]
    characters: dict[str, Character]
    families: list[Family]


def split(family: Family, a: Tensors, b: Tensors) -> Blocks:
    """Return tensors on which the outer group acts, with blocks along axis 1, and the axes of a block on which inner
    groups act.
    """
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
    """Return where an inner group acts within one block, or None if the copies of the group lie along another axis."""
    within = site.group.within
    if root.name in within:
        where = site.bases[within.index(root.name)][0]
        if (site.placement.axis if where is None else where) != axis:
            return None
    positions, units, mask = site.positions, site.units, torch.ones(site.positions.numel(), dtype=torch.bool)
    placement = site.placement
    if placement.axis == axis:
        mask = torch.isin(positions, row)
        if not bool(mask.any()):  # In a fused parameter, the site may belong to other rows.
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


COMPRESSED = 1 << 22
"""If all pairs of blocks have more entries than this, inner products of rows are compared instead of blocks."""
SIGN_FAMILIES = 4
"""The largest number of sign families of a group whose signs are optimized. If a group has more sign families, all its
signs stay plus one.
"""


@dataclass(frozen=True)
class _Inner:
    """The best values of the groups inside blocks for each pair of blocks, and how much better they are than the
    identity, `[problem, u, v]`.
    """

    gain: Tensor
    values: dict[str, Value]


def solve_family(family: Family, a: Tensors, b: Tensors) -> tuple[Element, Tensor]:
    """Return the best element of a family while all other groups are fixed.

    Args:
        family: The family of groups. Axes on which its groups act are numbered without the leading axis of the tensors.
        a: The first networks, `[problem, ...]`.
        b: The second networks, after the fixed groups have been applied.

    Returns:
        One element for each problem, and its gain over the identity in the linear objective.
    """
    if not family.is_nested:
        cost = group_cost(family.root, family.sites, a, b, lead=1)
        found = closest(family.root, cost)
        gain = found.objective - cost.at_identity()
        return complete(family, {family.root.name: found.value}, gain.shape), gain
    root, n = family.root, family.root.size
    blocks = split(family, a, b)
    problems = next(iter(blocks.a.values())).shape[0]
    best: Tensor | None = None
    signs = torch.ones(root.signs, problems, n, n if root.is_permuted else 1, dtype=torch.int8)
    kept: dict[str, Value] = {}
    # Each pair of blocks has its own signs and inner elements. Their best values are found pair by pair before the
    # blocks are assigned, so one assignment of these maxima is exact.
    for pattern in product((1, -1), repeat=root.signs if root.signs <= SIGN_FAMILIES else 0):
        signed = {name: _character_sign(blocks.characters[name], pattern) * t for name, t in blocks.b.items()}
        profit = _block_products(root, blocks.a, signed)
        found_values: dict[str, Value] = {}
        for inner in _components(blocks, signed, root):
            profit = profit + inner.gain
            found_values |= inner.values
        here = torch.tensor(pattern, dtype=torch.int8).reshape(-1, 1, 1, 1)
        if best is None:
            best, kept = profit, found_values
            signs = here.expand_as(signs).clone() if pattern else signs
        else:
            better = profit > best
            best = torch.where(better, profit, best)
            signs = torch.where(better, here, signs)
            kept = {name: found_values[name].where(better, kept[name]) for name in kept}
    assert best is not None
    before = diagonal(_block_products(root, blocks.a, blocks.b)).sum(-1)
    if root.is_permuted:
        perm = closest(Group(root.name, n, (), classes=root.classes), best).value.perm
        assert perm is not None
    else:
        perm = None
    columns = torch.zeros(problems, n, dtype=torch.int64) if perm is None else perm
    values = {
        group.name: _move_base(family, group, _pick(kept[group.name], columns))
        for group in family.members
        if group.name in kept
    }
    sign = signs.gather(-1, columns.expand(root.signs, -1, -1).unsqueeze(-1)).squeeze(-1).movedim(0, 1)
    values[root.name] = Value(perm=perm, sign=sign if root.signs else None)
    reached = best.gather(-1, columns.unsqueeze(-1)).squeeze(-1).sum(-1)
    return complete(family, values, (problems,)), reached - before


def _block_products(root: Group, a: Tensors, b: Tensors) -> Tensor:
    """Return the inner products of all pairs of blocks, `[problem, u, v]`.

    If the outer group does not permute blocks, each block is compared only with itself.
    """
    terms = [inner_products(root, a[key].flatten(2), b[key].flatten(2)).double() for key in a]
    return torch.stack(terms).sum(0).cpu()


def _components(blocks: Blocks, b: Tensors, root: Group) -> list[_Inner]:
    """Optimize inner families that share tensors together, and every other family separately."""
    parts: list[tuple[set[str], list[Family]]] = []
    for family in blocks.families:
        keys, together = set(family.sites), [family]
        for part in [p for p in parts if p[0] & keys]:
            parts.remove(part)
            keys, together = keys | part[0], [*part[1], *together]
        parts.append((keys, together))
    result = []
    for keys, together in parts:
        is_direct = len(together) == 1 and not together[0].is_nested and not coupled_tensors(together[0])
        if is_direct:
            result.append(_all_pairs(together[0], blocks.a, b, root))
            continue
        size = root.size
        v = size if root.is_permuted else 1
        flat_a: dict[str, Tensor] = {}
        flat_b: dict[str, Tensor] = {}
        for key in keys:
            acting = [site for family in together for site in family.sites.get(key, ())]
            flat_a[key], flat_b[key] = pair_blocks(blocks.a[key], b[key], acting, is_permuted=root.is_permuted)
        if len(together) == 1 and not coupled_tensors(together[0]):
            element, gain = solve_family(together[0], flat_a, flat_b)
        else:
            element, gain = climb_from_two_starts(together, flat_a, flat_b, solve_family)
        shape = (-1, size, v)
        members = [group.name for family in together for group in family.members]
        values = {name: _reshape(element[name], shape) for name in members}
        result.append(_Inner(gain.reshape(shape), values))
    return result


def pair_blocks(a: Tensor, b: Tensor, sites: Sequence[Site], *, is_permuted: bool) -> tuple[Tensor, Tensor]:
    """Return all pairs of blocks of two networks. From blocks `[problem, block, ...]` of each network, the function
    makes tensors `[problem * u * v, ...]` for both networks.

    Instead of large blocks, only the inner products of their rows are needed. Inner products of rows sum over the axes
    on which no inner group acts. Inner products replace the first block, and an identity matrix replaces the second:
    `<A, g B> = <A B^T, g I>`.

    Args:
        a: The blocks of the first network.
        b: The blocks of the second network.
        sites: The axes of a block on which inner groups act.
        is_permuted: Whether all pairs of blocks are needed, or only the pair of each block with itself.
    """
    ndim, size = a.ndim - 2, a.shape[1]
    v = size if is_permuted else 1
    inner = sorted({axis for site in sites for axis in site.axes})
    free = [axis for axis in range(ndim) if axis not in inner]
    rows = math.prod(a.shape[2 + axis] for axis in inner)
    entries = math.prod(a.shape[2:])
    is_shifted = any(any(site.placement.shift) for site in sites)
    if is_shifted or not is_compressed(len(a) * size * v, rows, entries // max(1, rows)):
        left = a.unsqueeze(2).expand(-1, -1, v, *a.shape[2:])
        right = b.unsqueeze(1 if v > 1 else 2).expand_as(left)
        return left.flatten(0, 2), right.flatten(0, 2)
    x, y = (t.permute(0, 1, *(2 + axis for axis in (*inner, *free))).reshape(len(a), size, rows, -1) for t in (a, b))
    if v > 1:
        gram = matmul(x.flatten(1, 2), y.flatten(1, 2).mT).reshape(-1, size, rows, size, rows).transpose(2, 3)
    else:
        gram = x @ y.mT
    shape = (*(a.shape[2 + axis] for axis in inner), rows, *[1] * (len(free) - 1))
    order = [0, *(1 + (*inner, *free).index(axis) for axis in range(ndim))]
    one = torch.eye(rows, dtype=b.dtype, device=b.device).reshape(1, *shape)
    count = len(a) * size * v
    return gram.reshape(count, *shape).permute(order), one.permute(order).expand(count, *one.permute(order).shape[1:])


def is_compressed(pairs: int, rows: int, rest: int) -> bool:
    """Return whether inner products of rows are used in place of blocks, because the inner products have fewer entries.
    A block has `rows` times `rest` entries.
    """
    return rest > rows and pairs * rows * rest > COMPRESSED


def _all_pairs(family: Family, a: Tensors, b: Tensors, root: Group) -> _Inner:
    """Optimize one inner group separately. For each axis on which the group acts, one matrix product gives the costs of
    all pairs of blocks.
    """
    group, blocks = family.root, root.size
    matrices: dict[Character, Tensor] = {}
    shifts: list[ShiftCost] = []
    for key, local in family.sites.items():
        for site in local:
            left, right = unfold(a[key], site, 2), unfold(b[key], site, 2)
            if root.is_permuted and (group.is_permuted or group.matrix != "none"):
                term = matmul(left.flatten(1, 2), right.flatten(1, 2).mT)
                term = term.reshape(-1, blocks, group.size, blocks, group.size)
                term = term.transpose(2, 3)
            elif root.is_permuted:
                term = (left.unsqueeze(2) * right.unsqueeze(1)).sum(-1, keepdim=True)
            else:
                term = inner_products(group, left, right).unsqueeze(2)
            name = character(site.placement)
            matrices[name] = matrices[name] + term.double() if name in matrices else term.double()
            shift = shift_cost(site, left, right)
            if shift is not None:
                source = shift.source.unsqueeze(1 if root.is_permuted else 2)
                target = shift.target.unsqueeze(2).expand(*term.shape[:4])
                shifts.append(replace(shift, target=target, source=source.expand_as(target)))
    cost = Cost(matrices, tuple(shifts))
    found = closest(group, cost)
    return _Inner(found.objective - cost.at_identity(), {group.name: found.value})


def _move_base(family: Family, group: Group, value: Value) -> Value:
    """Return an inner group's value `[problem, block, *other bases, ...]` with the block axis at its position among the
    axes of all bases.
    """
    place = 1 + group.within.index(family.root.name)
    return value.map(lambda t: t.movedim(1, place))


def _pick(value: Value, columns: Tensor) -> Value:
    """Return, for each u, the entries of `[problem, u, v, ...]` at `v = columns[problem, u]`."""
    problems = torch.arange(columns.shape[0]).unsqueeze(-1)
    units = torch.arange(columns.shape[1])
    return value.map(lambda t: t[problems, units, columns])


def _reshape(value: Value, shape: tuple[int, ...]) -> Value:
    return value.map(lambda t: t.reshape(*shape, *t.shape[1:]))


def _character_sign(key: Character, pattern: tuple[int, ...]) -> int:
    # Without a pattern (too many families, or none) the base keeps its signs.
    return -1 if sum(e for e, s in zip(key, pattern, strict=False) if s < 0) % 2 else 1
