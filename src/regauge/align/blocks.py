"""Nested groups: every pair of blocks is a problem of its own, and an assignment of blocks chooses among them.

A block permutation with groups inside it (attention heads, experts, normalization groups) is solved in two
levels: for each pair of blocks (u, v) the best inner elements bring block v of the second network to block u
of the first; the values that they reach are the profits of an assignment between blocks. Where the inner
groups do not share a tensor their problems are solved exactly, so the whole is exact. Where they do, each pair
is solved by coordinate ascent from two starts. Deeper nesting repeats the same within each pair.

All tensors here have one leading axis of independent problems.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from regauge.align.places import (
    Family,
    Tensors,
    barycentre,
    coupled_tensors,
    families,
    group_cost,
    inner_products,
    shift_cost,
    unfold,
)
from regauge.core import act as _act
from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.closest import Character, Cost, ShiftCost, character, closest
from regauge.core.element import Element, Value, map_value
from regauge.core.groups import Group

ROUNDS = 20
"""Most rounds of coordinate ascent among the inner groups of one pair of blocks."""
SIGN_FAMILIES = 4
"""A base with more families of signs than this keeps them at plus one."""


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a root: tensors `[problem, block, ...]`, and where the inner groups act on one block."""

    a: dict[str, Tensor]
    b: dict[str, Tensor]
    characters: dict[str, Character]
    families: list[Family]


@dataclass(frozen=True)
class _Inner:
    """What the inner groups gain over the identity for each pair of blocks, `[problem, u, v]`, and how."""

    gain: Tensor
    values: dict[str, Value]


def solve_family(family: Family, a: Tensors, b: Tensors) -> tuple[Element, Tensor]:
    """The best element of a family, all other groups held fixed.

    Args:
        family: Its sites are relative to the tensors without their leading axis.
        a: First networks, `[problem, ...]`.
        b: Second networks, moved by what is known.

    Returns:
        One element for each problem, and what it gains over the identity in the linear objective.
    """
    if not family.is_nested:
        cost = group_cost(family.root, family.sites, a, b, lead=1)
        found = closest(family.root, cost)
        gain = found.objective - cost.at_identity().cpu()
        return complete(family, {family.root.name: found.value}, gain.shape), gain
    root, n = family.root, family.root.size
    blocks = _split(family, a, b)
    problems = next(iter(blocks.a.values())).shape[0]
    best: Tensor | None = None
    signs = torch.ones(root.signs, problems, n, n if root.is_permuted else 1, dtype=torch.int8)
    kept: dict[str, Value] = {}
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
            kept = {name: _where(better, found_values[name], kept[name]) for name in kept}
    assert best is not None
    before = _diagonal(_block_products(root, blocks.a, blocks.b)).sum(-1)
    if root.is_permuted:
        perm = closest(Group(root.name, n, ()), best).value.perm
        assert perm is not None
    else:
        perm = None
    columns = torch.zeros(problems, n, dtype=torch.int64) if perm is None else perm
    values = {
        group.name: _moved_base(family, group, _pick(kept[group.name], columns))
        for group in family.members
        if group.name in kept
    }
    sign = signs.gather(-1, columns.expand(root.signs, -1, -1).unsqueeze(-1)).squeeze(-1).movedim(0, 1)
    values[root.name] = Value(perm=perm, sign=sign if root.signs else None)
    reached = best.gather(-1, columns.unsqueeze(-1)).squeeze(-1).sum(-1)
    return complete(family, values, (problems,)), reached - before


def ascend_problems(group_families: Sequence[Family], a: Tensors, b: Tensors) -> tuple[Element, Tensor]:
    """Coordinate ascent over several families that share tensors, for many problems at once.

    It starts from the identity and from the barycentre, and keeps the better end of each problem, so that no
    problem becomes worse.

    Returns:
        One element for each problem, and what it gains over the identity.
    """
    groups = _groups(group_families)
    problems = next(iter(a.values())).shape[0]
    blank = _element.identity(groups, (problems,))
    from_identity = _ascend(group_families, groups, a, dict(b), blank)
    element, moved = blank, dict(b)
    unknown = {family.root.name for family in group_families}
    for family in sorted(group_families, key=lambda f: -_anchored(f, group_families, unknown, a, b)):
        unknown.discard(family.root.name)
        left, right = _averaged(family, group_families, unknown, a, moved)
        if left:
            partial = replace(family, sites={name: family.sites[name] for name in left})
            step, _ = solve_family(partial, left, right)
            element, moved = _step(group_families, groups, family, step, element, moved)
    from_barycentre = _ascend(group_families, groups, a, moved, element)
    start = _objectives(group_families, a, b, b)
    gains = [_objectives(group_families, a, end, b) - start for _, end in (from_identity, from_barycentre)]
    is_better = gains[1] > gains[0]
    return _choose(is_better, from_barycentre[0], from_identity[0]), torch.where(is_better, gains[1], gains[0])


def complete(family: Family, values: Mapping[str, Value], batch: Sequence[int]) -> Element:
    """An element of a family's groups with the identity where `values` says nothing (positive scales)."""
    element = _element.identity((*family.members, *family.fixed), tuple(batch))
    for name, value in values.items():
        blank = element[name]
        chosen = {
            key: getattr(value, key) for key in ("perm", "sign", "shift", "matrix") if getattr(value, key) is not None
        }
        element = element.replace(name, replace(blank, **chosen))
    return element


def _split(family: Family, a: Tensors, b: Tensors) -> _Blocks:
    """One tensor per site of the root, its blocks along axis 1, with the sites of the inner groups on a block."""
    root = family.root
    inner = {group.name: _outside(group, root) for group in (*family.members[1:], *family.fixed)}
    blocks = _Blocks({}, {}, {}, [])
    sites: dict[str, list[Site]] = {}
    for name, local in family.sites.items():
        for k, site in enumerate(local):
            if site.group.name != root.name:
                continue
            key, axis = f"{name}@{k}", site.placement.axis
            rows = site.positions.reshape(root.size, -1).sort(-1).values
            for source, into in ((a[name], blocks.a), (b[name], blocks.b)):
                picked = source.index_select(1 + axis, rows.flatten().to(source.device))
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


def _block_products(root: Group, a: Tensors, b: Tensors) -> Tensor:
    """Inner products of all pairs of blocks (of u with itself where nothing is reordered), `[problem, u, v]`."""
    terms = [inner_products(root, a[key].flatten(2), b[key].flatten(2)).double() for key in a]
    return torch.stack(terms).sum(0).cpu()


def _components(blocks: _Blocks, b: Tensors, root: Group) -> list[_Inner]:
    """Inner families that share tensors are solved together, the others alone."""
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
        left = {key: blocks.a[key].unsqueeze(2).expand(-1, -1, v, *blocks.a[key].shape[2:]) for key in keys}
        right = {key: b[key].unsqueeze(1 if v > 1 else 2).expand_as(left[key]) for key in keys}
        flat_a = {key: t.flatten(0, 2) for key, t in left.items()}
        flat_b = {key: t.flatten(0, 2) for key, t in right.items()}
        if len(together) == 1 and not coupled_tensors(together[0]):
            element, gain = solve_family(together[0], flat_a, flat_b)
        else:
            element, gain = ascend_problems(together, flat_a, flat_b)
        shape = (-1, size, v)
        members = [group.name for family in together for group in family.members]
        values = {name: _reshaped(element[name], shape) for name in members}
        result.append(_Inner(gain.reshape(shape), values))
    return result


def _all_pairs(family: Family, a: Tensors, b: Tensors, root: Group) -> _Inner:
    """One inner group alone: its cost for all pairs of blocks in one product of matrices for each place."""
    group, blocks = family.root, root.size
    matrices: dict[Character, Tensor] = {}
    shifts: list[ShiftCost] = []
    for key, local in family.sites.items():
        for site in local:
            left, right = unfold(a[key], site, 2), unfold(b[key], site, 2)
            if root.is_permuted and (group.is_permuted or group.matrix != "none"):
                term = left.flatten(1, 2) @ right.flatten(1, 2).mT
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
    return _Inner(found.objective - cost.at_identity().cpu(), {group.name: found.value})


def _ascend(
    group_families: Sequence[Family],
    groups: tuple[Group, ...],
    a: Tensors,
    b: dict[str, Tensor],
    element: Element,
) -> tuple[Element, dict[str, Tensor]]:
    start, reached = dict(b), None
    for _ in range(ROUNDS):
        is_moved = False
        for family in group_families:
            step, gain = solve_family(family, {k: a[k] for k in family.sites}, {k: b[k] for k in family.sites})
            if not bool((gain > 0).any()):
                continue
            reached = _objectives(group_families, a, b, start) if reached is None else reached
            candidate, moved = _step(group_families, groups, family, step, element, b)
            objective = _objectives(group_families, a, moved, start)
            is_better = objective > reached + 1e-9 * reached.abs().clamp(min=1e-30)
            if bool(is_better.any()):
                is_moved = True
                element = _choose(is_better, candidate, element)
                reached = torch.where(is_better, objective, reached)
                b = {key: _select(is_better, moved[key], b[key]) for key in b}
        if not is_moved:
            break
    return element, b


def _step(
    group_families: Sequence[Family],
    groups: tuple[Group, ...],
    family: Family,
    step: Element,
    element: Element,
    b: dict[str, Tensor],
) -> tuple[Element, dict[str, Tensor]]:
    """Compose a family's step with what is known, and move the tensors by it."""
    whole = _element.identity(groups, step.batch)
    for group in family.members:
        whole = whole.replace(group.name, step[group.name])
    names = {group.name for group in family.members}
    sites = {key: [s for s in local if s.group.name in names] for key, local in family.sites.items()}
    ndims = {key: b[key].ndim - 1 for key in sites}
    return _element.compose(groups, whole, element), _act.act(groups, sites, whole, b, ndims)


def _groups(group_families: Sequence[Family]) -> tuple[Group, ...]:
    found = {group.name: group for family in group_families for group in family.fixed}
    found |= {group.name: group for family in group_families for group in family.members}
    return tuple(found.values())


def _objectives(group_families: Sequence[Family], a: Tensors, b: Tensors, start: Tensors) -> Tensor:
    """The objective of every problem: `<a, b> - (|b|^2 - |start|^2) / 2`, whose second part only shifts change."""
    keys = dict.fromkeys(key for family in group_families for key in family.sites)
    total: Tensor | None = None
    for key in keys:
        x, y, z = (t[key].flatten(1).double() for t in (a, b, start))
        term = ((x * y) - (y * y - z * z) / 2).sum(-1).cpu()
        total = term if total is None else total + term
    assert total is not None
    return total


def _unknown_sites(family: Family, others: Sequence[Family], unknown: set[str], key: str) -> list[Site]:
    return [
        site
        for other in others
        if other.root.name in unknown and other is not family
        for site in other.sites.get(key, ())
        if site.group.name in {group.name for group in other.members}
    ]


def _averaged(
    family: Family, others: Sequence[Family], unknown: set[str], a: Tensors, b: Tensors
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    left, right = {}, {}
    for key in family.sites:
        sites = _unknown_sites(family, others, unknown, key)
        x, y = barycentre(a[key], sites, 1), barycentre(b[key], sites, 1)
        if x is not None and y is not None:
            left[key], right[key] = x, y
    return left, right


def _anchored(family: Family, others: Sequence[Family], unknown: set[str], a: Tensors, b: Tensors) -> float:
    """The share of a family's tensors that its unknown neighbors cannot change."""
    left, right = _averaged(family, others, unknown, a, b)
    known = sum(float(left[key].norm() * right[key].norm()) for key in left)
    return known / (sum(float(a[key].norm() * b[key].norm()) for key in family.sites) or 1.0)


def _moved_base(family: Family, group: Group, value: Value) -> Value:
    """An inner value `[problem, block, *other bases, ...]` with the block axis where the group's bases have it."""
    place = 1 + group.within.index(family.root.name)
    return map_value(value, lambda t: t.movedim(1, place))


def _pick(value: Value, columns: Tensor) -> Value:
    """Entries `[problem, u, columns[problem, u], ...]` of `[problem, u, v, ...]`."""
    problems = torch.arange(columns.shape[0]).unsqueeze(-1)
    units = torch.arange(columns.shape[1])
    return map_value(value, lambda t: t[problems, units, columns])


def _reshaped(value: Value, shape: tuple[int, ...]) -> Value:
    return map_value(value, lambda t: t.reshape(*shape, *t.shape[1:]))


def _choose(mask: Tensor, yes: Element, no: Element) -> Element:
    return Element({name: _where(mask, yes[name], no[name]) for name in yes}, yes.batch)


def _where(mask: Tensor, yes: Value, no: Value) -> Value:
    fields = {}
    for key in ("perm", "scale", "sign", "shift", "matrix"):
        x, y = getattr(yes, key), getattr(no, key)
        if x is not None:
            fields[key] = _select(mask, x, y)
    return Value(**fields)


def _select(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.reshape(*mask.shape, *([1] * (yes.ndim - mask.ndim))).to(yes.device), yes, no)


def _character_sign(key: Character, pattern: tuple[int, ...]) -> int:
    # Without a pattern (too many families, or none) the base keeps its signs.
    return -1 if sum(e for e, s in zip(key, pattern, strict=False) if s < 0) % 2 else 1


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.squeeze(-1) if matrix.shape[-1] == 1 else matrix.diagonal(dim1=-2, dim2=-1)
