"""Operations on tensors for alignment: inner products and averages of units, and families of nested groups."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce

import torch
from jaxtyping import Int, Num
from torch import Tensor

from regauge.core import act as _act
from regauge.core import element as _element
from regauge.core.act import Site, take
from regauge.core.closest import Character, Cost, ShiftCost, character
from regauge.core.element import Element, Value
from regauge.core.groups import Group, Placement, axes_of, class_means, class_sums
from regauge.core.products import matmul
from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry

Sites = Mapping[str, Sequence[Site]]
Tensors = Mapping[str, Tensor]
CHUNK = 1 << 25
"""The size in bytes (as float32) of the chunks in which large tensors are processed."""


@dataclass(frozen=True)
class Family:
    """A group that is not repeated within another group, and all groups that are repeated within it.

    Coordinate ascent optimizes one family at a time, while all groups outside it are fixed. The groups of a family may
    also be repeated within groups outside it. The field `fixed` holds the outer groups, without signs, scales and other
    degrees of freedom.
    """

    root: Group
    members: tuple[Group, ...]
    fixed: tuple[Group, ...]
    sites: Sites

    @cached_property
    def own_sites(self) -> dict[str, list[Site]]:
        """The axes of tensors on which the family's own groups (not the fixed ones) act."""
        names = {group.name for group in self.members}
        return {name: [s for s in local if s.group.name in names] for name, local in self.sites.items()}

    @property
    def is_nested(self) -> bool:
        """Whether a group is repeated within the outermost group of the family (the root)."""
        return len(self.members) > 1


def families(groups: Iterable[Group], sites: Sites) -> list[Family]:
    """Return the families of groups that have a degree of freedom and act on tensors at the given sites (axes of
    tensors).
    """
    groups = tuple(groups)
    by_name = {group.name: group for group in groups}
    result = []
    for root in groups:
        if root.within:
            continue
        members = (root, *(group for group in groups if root.name in group.within))
        names = {group.name for group in members}
        others = dict.fromkeys(base for group in members for base in group.within if base not in names)
        bare = partial(Group, placements=(), is_permuted=False, is_base=True)
        fixed = {name: bare(name, by_name[name].size, within=by_name[name].within) for name in others}
        own: dict[str, list[Site]] = {}
        for name, local in sites.items():
            here = [site for site in local if site.group.name in names]
            if here:
                held = [_held(site, fixed) for site in local if site.group.name in fixed]
                own[name] = [*here, *held]
        if own and any(has_choice(group) for group in members):
            result.append(Family(root, members, tuple(fixed.values()), own))
    return result


def complete(family: Family, values: Mapping[str, Value], batch: Sequence[int]) -> Element:
    """Return an element of a family of groups, given its values for some of these groups.

    If `values` has no value for a group, the element has the identity for this group.
    """
    blank = _element.identity((*family.members, *family.fixed), tuple(batch))
    return Element(values, blank.batch).fill(blank)


def coupled_tensors(family: Family) -> frozenset[str]:
    """Return the tensors in which the root (the outermost group of a family) acts on two axes.

    The alignment objective of a tensor with the root on two axes is quadratic in the root.
    """
    return frozenset(
        name
        for name, local in family.sites.items()
        if len({site.placement.axis for site in local if site.group.name == family.root.name}) > 1
    )


def connected(sets: Iterable[Collection[str]]) -> list[frozenset[str]]:
    """Return the connected components of a list of sets. Two sets are connected if they share a member."""
    parts: list[frozenset[str]] = []
    for one in sets:
        whole = frozenset(one)
        for part in [part for part in parts if part & whole]:
            parts.remove(part)
            whole |= part
        parts.append(whole)
    return parts


def has_choice(group: Group) -> bool:
    """Return whether matching optimizes a group; groups that have only positive factors are not optimized."""
    return group.has_order or bool(group.signs or group.shifts) or group.matrix != "none"


def compared(networks: Sequence[Tensors], symmetry: Symmetry) -> list[dict[str, Tensor]]:
    """Return the parameters on which a symmetry acts and which matching compares, as floats on one device."""
    result: list[dict[str, Tensor]] = [{} for _ in networks]
    for name in symmetry.sites:
        tensors = [params[name] for params in networks]
        if name in symmetry.buffers or not all(t.is_floating_point() for t in tensors):
            continue
        dtype = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
        for into, tensor in zip(result, tensors, strict=True):
            into[name] = tensor.detach().to(device=tensors[0].device, dtype=dtype)
    return result


@remembered
def balanced_matrices(symmetry: Symmetry) -> dict[str, frozenset[str]]:
    """Return, for each group of invertible matrices, the compared parameters on which the group acts."""
    return {
        group.name: names
        for group in symmetry.groups
        if group.matrix == "linear"
        and (names := frozenset(p.parameter for p in group.placements) - {*symmetry.buffers})
    }


def row_ranges(
    symmetry: Symmetry, name: str, shape: Sequence[int] | None = None, chunk: int = CHUNK
) -> list[tuple[int, int] | None]:
    """Return ranges of axis 0 that can be read and transformed separately, or `[None]` if the tensor must stay whole.

    Each range has about `chunk` bytes as float32. The shape is needed only for tensors on which the symmetry does not
    act.
    """
    shape = symmetry.shapes[name] if shape is None else shape
    sites = symmetry.sites.get(name, [])
    used = {axis for site in sites for axis in site.axes}
    if not shape or 0 in used or 0 in shape:
        return [None]
    rows = max(1, chunk // (4 * math.prod(shape[1:])))
    return [(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows)]


def move_tensor(symmetry: Symmetry, element: Element, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor, or a chunk of a tensor, after an element has acted on it."""
    if name not in symmetry.sites:
        return tensor
    sites = {name: symmetry.sites[name]}
    return _act.act(symmetry.groups, sites, element, {name: tensor}, {name: tensor.ndim})[name]


def unfold(tensor: Num[Tensor, "..."], site: Site, lead: int = 0) -> Num[Tensor, "*lead units values"]:
    """Return the entries of a tensor that belong to each unit, as one row for each unit."""
    if tensor.ndim == lead:
        return tensor.reshape(*tensor.shape, 1, 1)
    axis = lead + site.placement.axis
    if not (site.is_sorted and site.positions.numel() == tensor.shape[axis]):
        tensor = take(tensor, axis, site.positions.to(tensor.device))
    tensor = tensor.movedim(axis, lead)
    return tensor.reshape(*tensor.shape[:lead], site.group.size, -1)


def inner_products(
    group: Group, a: Num[Tensor, "*lead n values"], b: Num[Tensor, "*lead n values"]
) -> Num[Tensor, "*lead n m"]:
    """Return the inner products of the entries of one network's units with those of another network's units.

    If the group does not permute units, each unit is compared only with itself.
    """
    if group.is_permuted or group.matrix != "none":
        return matmul(a, b.mT)
    return (a * b).sum(-1, keepdim=True)


def shift_cost(site: Site, a: Tensor, b: Tensor) -> ShiftCost | None:
    """Return the quadratic term in the objective that half-period shifts of one tensor cause, or None if no shift
    changes the tensor.
    """
    amounts = site.placement.shift
    if not any(amounts):
        return None
    return ShiftCost(character(site.placement), amounts, a.double().sum(-1), b.double().sum(-1), a.shape[-1])


def group_cost(group: Group, sites: Sites, a: Tensors, b: Tensors, lead: int = 0) -> Cost:
    """Return the alignment cost of one group while all other groups are fixed.

    The group must not contain other groups that are repeated within it.
    """
    matrices: dict[Character, Tensor] = {}
    shifts: list[ShiftCost] = []
    for name, local in sites.items():
        for site in local:
            if site.group.name == group.name:
                add_term(matrices, shifts, site, a[name], b[name], lead)
    return Cost(matrices, tuple(shifts))


def add_term(
    matrices: dict[Character, Tensor], shifts: list[ShiftCost], site: Site, a: Tensor, b: Tensor, lead: int = 0
) -> None:
    """Add the contribution of one tensor to the cost of a group that acts on it, in float64."""
    left, right = unfold(a, site, lead), unfold(b, site, lead)
    key, term = character(site.placement), inner_products(site.group, left, right).double()
    matrices[key] = matrices[key] + term if key in matrices else term
    shift = shift_cost(site, left, right)
    if shift is not None:
        shifts.append(shift)


def barycenter(tensor: Tensor, sites: Iterable[Site], lead: int = 0) -> Tensor | None:
    """Return the average of a tensor over all elements of some groups, which is the part that the groups do not change.

    The average over permutations gives all units the same entries. The average over signs or rotations is zero. The
    inner product of two averaged tensors is the expected inner product after a uniformly random element has acted.
    Therefore inner products of averages are the expected objective before elements are chosen. If a group acts on a
    whole axis, the result has one entry for each class of units along this axis. An entry that represents a class is
    the mean times the square root of the number of units, which keeps inner products correct. If the average is zero,
    the result is None.
    """
    for site in sites:
        axis, n, length = lead + site.placement.axis, site.group.size, site.positions.numel()
        is_all = length == tensor.shape[axis]
        if is_all and _averages_to_zero(site):
            return None
        if is_all and length == n and site.group.is_permuted:
            tensor = (
                class_sums(site.group, tensor, axis, site.units)
                if site.group.classes
                else (tensor.sum(axis, keepdim=True) / n**0.5)
            )
        else:
            tensor = average(tensor, site, lead)
    return tensor


def average(tensor: Num[Tensor, "*shape"], site: Site, lead: int = 0) -> Num[Tensor, "*shape"]:
    """Return the mean of a tensor over all elements of a group that acts on one of its axes."""
    axis, positions = lead + site.placement.axis, site.positions.to(tensor.device)
    if _averages_to_zero(site):
        return tensor.index_fill(axis, positions, 0.0)
    if not site.group.is_permuted:
        return tensor
    last = tensor.movedim(axis, -1)
    picked = last[..., positions].reshape(*last.shape[:-1], site.group.size, -1)
    means = class_means(site.group, picked) if site.group.classes else picked.mean(-2, keepdim=True).expand_as(picked)
    return last.index_copy(last.ndim - 1, positions, means.flatten(-2)).movedim(-1, axis)


def _averages_to_zero(site: Site) -> bool:
    """Return whether the average of a tensor over a group is zero, because rotations or signs act on it."""
    placement = site.placement
    return site.group.matrix != "none" or any(e % 2 for e in placement.sign) or any(placement.parity)


def _held(site: Site, fixed: Mapping[str, Group]) -> Site:
    place = site.placement
    bare = Placement(place.parameter, place.axis, place.start, place.stride, place.repeats)
    return replace(site, group=fixed[site.group.name], placement=bare)


def dot(x: Tensor, y: Tensor) -> float:
    """Return the inner product of two tensors.

    Each row is summed in the precision of the tensors, and the row sums are added in float64.
    """
    if x.ndim < 2:
        return float(torch.dot(x.flatten(), y.flatten()))
    return float(torch.linalg.vecdot(x.flatten(1), y.flatten(1)).sum(dtype=torch.float64))


def unit_index(symmetry: Symmetry, name: str, site: Site) -> Int[Tensor, "units values"]:
    """Return the flat indices of the entries of a parameter that belong to each unit, for every copy of the group.

    Units are ordered copy by copy, so the first axis can be reshaped to `[*bases, size]`.
    """
    shape, axis, group = axes_of(symmetry.shapes[name]), site.placement.axis, site.group
    flat = torch.arange(torch.Size(shape).numel()).reshape(shape)
    flat = flat.index_select(axis, site.positions).movedim(axis, -1)
    owner = site.units
    copies = torch.zeros(1, dtype=torch.int64)
    for base, (other, index) in zip(group.within, site.bases, strict=True):
        if other is not None:
            place = other if other < axis else other - 1
            index = index.reshape([-1 if k == place else 1 for k in range(flat.ndim)])
        copies = copies * symmetry[base].size + index
    owner = (copies * group.size + owner).expand(flat.shape)
    count = symmetry.count_copies(group.name) * group.size
    return flat.flatten()[owner.flatten().argsort(stable=True)].reshape(count, -1)


def unit_values(
    symmetry: Symmetry, name: str, site: Site, tensor: Num[Tensor, "..."], lead: int = 0
) -> Num[Tensor, "*lead size values"]:
    """Return the entries of a tensor that belong to each unit, for each copy of the group: `[*lead, *bases, size,
    values]`.
    """
    if not site.bases:
        return unfold(tensor, site, lead)
    group, before = site.group, tensor.shape[:lead]
    bases = tuple(symmetry[base].size for base in group.within)
    if any(other is not None for other, _ in site.bases):
        values = gather(tensor, unit_index(symmetry, name, site), len(symmetry.shapes[name]))
        return values.reshape(*before, *bases, group.size, -1)
    copies = torch.zeros(1, dtype=torch.int64)
    for size, (_, index) in zip(bases, site.bases, strict=True):
        copies = copies * size + index
    order, axis = (copies * group.size + site.units).argsort(stable=True), lead + site.placement.axis
    values = take(tensor, axis, site.positions[order].to(tensor.device)).movedim(axis, lead)
    return values.reshape(*before, *bases, group.size, -1)


def gather(
    tensor: Num[Tensor, "..."], index: Int[Tensor, "units values"], ndim: int
) -> Num[Tensor, "*lead units values"]:
    """Gather the entries that belong to each unit, given their flat indices.

    `ndim` is the number of axes of the parameter without leading model axes.
    """
    return tensor.reshape(*tensor.shape[: tensor.ndim - ndim], -1)[..., index.to(tensor.device)]


def scatter(
    tensor: Num[Tensor, "*shape"],
    index: Int[Tensor, "units values"],
    values: Num[Tensor, "*lead units values"],
    ndim: int,
) -> Num[Tensor, "*shape"]:
    """Return a tensor after values are written to the entries that belong to units, given the flat indices of these
    entries.
    """
    flat = tensor.reshape(*tensor.shape[: tensor.ndim - ndim], -1).clone()
    flat[..., index.to(tensor.device)] = values
    return flat.reshape(tensor.shape)
