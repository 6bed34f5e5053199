"""The action of an element on parameters: entries are permuted, multiplied, rotated and shifted.

After a permutation, each entry has the value that another entry, its source, had before. The index of the source is the
entry's own index plus one displacement for each placement on the parameter. Therefore a single gather, whose index is a
broadcast sum of displacements, applies all permutations to a parameter. If the displacements along one axis do not
depend on the index along another axis, the entries can also be gathered axis by axis. Gathering axis by axis needs no
index tensor as large as the parameter.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, permutations
from types import EllipsisType

import torch
from jaxtyping import Float, Int, Num, Shaped
from torch import Tensor

from regauge.core.axis_products import multiply_copies
from regauge.core.element import Element, Value
from regauge.core.groups import Exponent, Group, Placement, axes_of
from regauge.core.params import Params, require_held

FLAT_LIMIT = 1 << 22
"""If a parameter has at least this number of entries, a batch of elements acts on it axis by axis, without a flat
index."""
LONGEST_SHARED_AXIS = 1 << 24
"""The longest axis on which several groups are compared index by index."""
LONG_ROW = 8
"""Rows with at least this many consecutive entries are gathered row by row.

Shorter rows are gathered entry by entry.
"""


@dataclass(frozen=True)
class Site:
    """A placement on a parameter of known shape: the axis indices on which it acts, and the unit that owns each index.

    A base of a group is another group within which the first group is repeated. The field `bases` has one pair (axis,
    base index) for each base. For each index of the axis, the base index gives the unit of the base (the containing
    group) that contains this index. If the axis of a pair is None, the placement's own axis determines the base, and
    the base index has shape `[m]`. If another axis determines the base, the base index has the length of this axis. The
    field `added` is the constant that the model adds to the parameter before use, or one constant for each index of the
    axis. Factors multiply the sum of the parameter and the added constant.
    """

    group: Group
    placement: Placement
    positions: Int[Tensor, " m"]
    units: Int[Tensor, " m"]
    bases: tuple[tuple[int | None, Int[Tensor, " _"]], ...]
    added: float | Float[Tensor, " length"] | Exponent = 0.0

    @property
    def has_added(self) -> bool:
        """Whether the model adds a constant to the parameter."""
        return isinstance(self.added, Tensor | Exponent) or bool(self.added)

    @cached_property
    def is_sorted(self) -> bool:
        """Whether the axis indices of the site are in ascending order.

        If the site also covers every index of an axis, the entries along this axis need no rearrangement.
        """
        return bool((self.positions[1:] > self.positions[:-1]).all())

    @cached_property
    def is_plain(self) -> bool:
        """Whether each unit i owns the index i and no other index."""
        place = self.placement
        is_dense = place.start == 0 and place.stride == 1 and not place.repeats
        return is_dense and self.positions.numel() == self.group.size  # In one block, a unit may own several indices.

    @cached_property
    def by_copies(self) -> Int[Tensor, "copies n"]:
        """For each copy of the group, the positions on the axis that belong to its units."""
        order = self.units.argsort(stable=True)
        return self.positions[order].reshape(self.group.size, -1).T

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes whose indices determine to which copy of the group and to which unit an entry belongs. The axis of
        the placement comes last.
        """
        return (*sorted({axis for axis, _ in self.bases if axis is not None}), self.placement.axis)

    @cached_property
    def base_index(self) -> tuple[Tensor, ...]:
        """The index of each base (a group around a nested group), shaped to broadcast over axes: `[*other axes, m]`."""
        others = self.axes[:-1]
        return tuple(
            base if axis is None else base.reshape([-1 if other == axis else 1 for other in others] + [1])
            for axis, base in self.bases
        )


def resolve(
    groups: tuple[Group, ...], parameter: str, shape: tuple[int, ...], added: float | Tensor | Exponent = 0.0
) -> list[Site]:
    """Return the sites (axis indices and their units) of all placements of all groups on one parameter.

    A ValueError is raised if a placement does not fit the shape of the parameter."""
    by_name = {group.name: group for group in groups}
    sites = []
    for group in groups:
        for placement in group.placements:
            if placement.parameter != parameter:
                continue
            positions, units = covered(group, placement, shape)
            bases = tuple(_base_index(by_name[base], parameter, placement, positions, shape) for base in group.within)
            sites.append(Site(group, placement, positions, units, bases, added))
    return sites


def covered(group: Group, placement: Placement, shape: tuple[int, ...]) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Return the axis indices that a placement covers, and for each index the unit that owns it."""
    shape = axes_of(shape)
    if placement.axis >= len(shape):
        raise ValueError(
            f"group {group.name!r} acts on axis {placement.axis} of {placement.parameter!r}, which has only "
            f"{len(shape)} axes (shape {shape}); the symmetry belongs to another architecture: discover the symmetry "
            "of this model"
        )
    factors = [(group.size, placement.stride), *placement.repeats]
    last = placement.start + sum((size - 1) * stride for size, stride in factors)
    length = shape[placement.axis]
    if last >= length:
        raise ValueError(
            f"group {group.name!r} has {group.size} units and needs indices up to {last} on axis {placement.axis} "
            f"of {placement.parameter!r}, whose shape is {shape}. The parameters do not fit the symmetry: "
            "discover it again from their module, or correct the spec"
        )
    units = torch.arange(group.size)
    positions = placement.start + units * placement.stride
    for size, stride in placement.repeats:
        positions = (positions.unsqueeze(-1) + torch.arange(size) * stride).flatten()
        units = units.unsqueeze(-1).expand(-1, size).flatten()
    return positions, units


def span(group: Group, place: Placement) -> tuple[int, int]:
    """Return the first and the last axis index that a placement covers."""
    return place.start, place.start + sum(
        (size - 1) * stride for size, stride in ((group.size, place.stride), *place.repeats)
    )


def overlapping(
    groups: Sequence[Group], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Group, Group, Placement]]:
    """Yield pairs of groups that act on one axis, if the first group moves entries between units of the second group.
    Each pair comes with the placement of the first group.

    The two groups of a pair do not act independently of each other.
    """
    moving: dict[tuple[str, int], list[tuple[Group, Placement]]] = {}
    for group in groups:
        if group.size and (group.is_permuted or group.matrix != "none"):
            for place in group.placements:
                moving.setdefault((place.parameter, place.axis), []).append((group, place))
    for (parameter, axis), several in moving.items():
        shape = axes_of(shapes[parameter])
        spans = sorted(span(*one) for one in several)
        are_apart = all(end < start for (_, end), (start, _) in pairwise(spans)) and spans[-1][1] < shape[axis]
        if len(several) > 1 and not are_apart and shape[axis] > LONGEST_SHARED_AXIS:
            raise ValueError(
                f"several groups share axis {axis} of {parameter!r}, which is too long to compare them; leave one of "
                "them out"
            )
        found = [covered(*one, shape) for one in several] if len(several) > 1 and not are_apart else []
        for (one, (positions, _)), (other, (there, units)) in permutations(zip(several, found, strict=False), 2):
            owner = torch.full((shape[axis],), -1)
            owner[there] = units
            blocks = owner[positions].reshape(one[0].size, -1)
            if not torch.equal(blocks, blocks[:1].expand_as(blocks)):
                yield one[0], other[0], one[1]


@dataclass(frozen=True)
class Moves:
    """The change of one parameter by an element, stored as small tables. Each table depends on the indices along only
    some axes of the parameter.

    A table of displacements, factors or shifts acts along the last axis on which it depends. A displacement is the
    index of an entry's source along an axis, minus the index of the entry itself. An element first multiplies entries
    by factors and then adds shifts. Matrices replace entries by linear combinations of the entries along an axis.
    """

    displacements: dict[tuple[int, ...], Int[Tensor, "..."]]
    factors: dict[tuple[int, ...], Float[Tensor, "..."]]
    shifts: dict[tuple[int, ...], Float[Tensor, "..."]]
    matrices: list[tuple[Site, Value]]


class ReadValues:
    """Factors, displacements and inverse matrices of an element, computed once for all tensors.

    Args:
        element: The element. The caller must not change the element while a `ReadValues` object uses it.
    """

    def __init__(self, element: Element) -> None:
        self.element = element
        self._known: dict[str, dict[Hashable, Tensor | None]] = {}

    @cached_property
    def single(self) -> "ReadValues":
        """The factors, displacements and inverse matrices of the only element in a batch of size one."""
        return ReadValues(self.element.item(0))

    def replaced(self, name: str, value: Value) -> "ReadValues":
        """Return a copy in which one group of the element has another value.

        Cached results that do not depend on this group are kept."""
        result = ReadValues(self.element.replace(name, value))
        result._known = {group: known for group, known in self._known.items() if group != name}
        if "single" in self.__dict__:
            result.single = self.single.replaced(name, value.map(lambda tensor: tensor[0]))
        return result

    def _once(self, site: Site, key: Hashable, find: Callable[[Site, Value], Tensor | None]) -> Tensor | None:
        value = self.element[site.group.name]
        if not site.is_plain or site.bases:
            return find(site, value)
        known = self._known.setdefault(site.group.name, {})
        if key not in known:
            known[key] = find(site, value)
        return known[key]

    def factor(self, site: Site) -> Float[Tensor, "..."] | None:
        """Return the factors by which an element multiplies entries along an axis, or None if all are one."""
        place = site.placement
        return self._once(site, ("factor", place.scale, place.sign, place.parity), _factor)

    def displacement(self, site: Site) -> Int[Tensor, "..."] | None:
        """Return, for each entry along an axis, the index from which it is taken minus its own index, or None if no
        entry moves.
        """
        return self._once(site, "displacement", self._displacement)

    def _displacement(self, site: Site, value: Value) -> Tensor | None:
        if value.perm is None:
            return None
        found = (_look_up(site, value.perm) - site.units) * site.placement.stride
        return found if self.element.batch or bool(found.any()) else None

    def order(self, site: Site) -> Int[Tensor, " size"] | None:
        """Return the permutation of units at a placement where unit i owns only index i, or None for the identity.

        This method needs a single element, not a batch.
        """
        return self._once(site, "order", _order)

    def dual(self, group: Group) -> Float[Tensor, "..."]:
        """Return the inverse transpose of a group's matrix A, for which `<A^-T v, A w> = <v, w>`."""
        matrix = self.element[group.name].matrix
        assert matrix is not None
        known = self._known.setdefault(group.name, {})
        found = known.get("dual")
        if found is None:
            found = known["dual"] = matrix if group.matrix == "orthogonal" else torch.linalg.inv(matrix).mT
        return found


def _order(site: Site, value: Value) -> Tensor | None:
    return None if value.perm is None or torch.equal(value.perm, site.units) else value.perm


def moves_of(sites: list[Site], read: ReadValues, shape: tuple[int, ...], dtype: torch.dtype) -> Moves:
    """Return the change that an element makes to one parameter, with factors and shifts in the given dtype."""
    moves = Moves({}, {}, {}, [])
    for site in sites:
        value, displacement, factor = read.element[site.group.name], read.displacement(site), read.factor(site)
        if displacement is not None:
            _merge(moves.displacements, site, displacement, shape)
        if factor is not None:
            _merge(moves.factors, site, factor.to(dtype), shape, is_product=True)
        if value.matrix is not None:
            moves.matrices.append((site, value))
        if value.shift is not None:
            for family, amount in enumerate(site.placement.shift):
                if amount:
                    steps = _look_up(site, value.shift[..., family, :])
                    _merge(moves.shifts, site, steps.to(dtype) * amount, shape)
    added = sites[0].added
    if isinstance(added, Exponent):  # log(f exp(c w)) / c = w + log(f) / c
        moves.shifts.update((axes, factor.log() / added.rate) for axes, factor in moves.factors.items())
        moves.factors.clear()
    elif sites[0].has_added:  # g(w + c) - c = L w + (g(c) - c) for the linear part L of g
        numbers = added.to(dtype) if isinstance(added, Tensor) else torch.full(shape, added, dtype=dtype)
        there = _act_one([replace(site, added=0.0) for site in sites], read, numbers, 1)
        moves.shifts[(0,)] = there - numbers
    return moves


def act(
    groups: tuple[Group, ...],
    sites: Mapping[str, list[Site]],
    element: Element,
    params: Mapping[str, Tensor],
    ndims: Mapping[str, int],
    read: ReadValues | None = None,
) -> Params:
    """Apply `element` to parameters; see `Symmetry.act`.

    The argument `read` caches results that depend only on the element, for later calls.
    """
    moved, read = dict(params), read or ReadValues(element)
    if element.batch == (1,) and all(params[name].ndim == 1 + ndims[name] for name in sites):
        # For a single network, no index tensor as large as the network is needed.
        single = read.single
        one = act(groups, sites, single.element, {name: params[name][0] for name in sites}, ndims, single)
        return moved | {name: one[name].unsqueeze(0) for name in sites}
    for name, local in sites.items():
        tensor = params[name]
        lead = tensor.ndim - ndims[name]
        if lead not in (0, len(element.batch)) and element.batch:
            raise ValueError(
                f"{name!r} has {lead} leading model axes (shape {tuple(tensor.shape)}), but the element has batch "
                f"shape {element.batch}; give both the same batch shape, or none"
            )
        moved[name] = _act_one(local, read, tensor, ndims[name])
    return moved


def _act_one(sites: list[Site], read: ReadValues, tensor: Tensor, ndim: int) -> Tensor:
    if not ndim:  # A number counts as a vector of one entry.
        return _act_one(sites, read, tensor.unsqueeze(-1), 1).squeeze(-1)
    batch = read.element.batch
    if not batch and _are_apart(sites, tensor.shape[tensor.ndim - ndim :]):
        return _act_by_axes(sites, read, tensor, tensor.ndim - ndim)
    if batch and tensor.ndim == ndim:
        tensor = tensor.expand(*batch, *tensor.shape)
    lead, shape = tensor.ndim - ndim, tuple(tensor.shape[tensor.ndim - ndim :])
    device, dtype = tensor.device, tensor.dtype
    work, given = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype, tensor
    moves = moves_of(sites, read, shape, work)
    if moves.displacements:
        tensor = _gather(tensor, moves.displacements, lead, shape, len(batch))
    if moves.factors or moves.matrices or moves.shifts:
        tensor = tensor.to(work)
    for axes, factor in moves.factors.items():
        tensor = tensor * broadcastable(factor, axes, len(batch), lead, len(shape)).to(device)
    for site, value in moves.matrices:
        tensor = _mix(site, value, read, tensor, len(batch), lead)
    for axes, shift in moves.shifts.items():
        tensor = tensor + broadcastable(shift, axes, len(batch), lead, len(shape)).to(device)
    tensor = tensor.to(dtype)
    if moves.factors or moves.matrices or moves.shifts:
        require_held(sites[0].placement.parameter, tensor, (given,))
    return tensor


def _are_apart(sites: list[Site], shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is simple. In a simple parameter, unit i of every group has only index i of an axis,
    no other group acts on this axis, and the model adds no constant to the parameter. Most parameters are simple.
    """
    return len({site.placement.axis for site in sites}) == len(sites) and all(
        site.is_plain
        and site.group.size == shape[site.placement.axis]
        and not (site.bases or site.has_added or any(site.placement.shift))
        for site in sites
    )


def _act_by_axes(sites: list[Site], read: ReadValues, tensor: Tensor, lead: int) -> Tensor:
    """Apply an element without a batch to a tensor, axis by axis.

    This function needs fewer operations for each axis than `_act_one`.
    """
    given, dtype = tensor, tensor.dtype
    work = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    factors = [(site, factor) for site in sites if (factor := read.factor(site)) is not None]
    mixed = [(site, value) for site in sites if (value := read.element[site.group.name]).matrix is not None]
    for site in sites:
        order = read.order(site)
        if order is not None:
            tensor = take(tensor, lead + site.placement.axis, order.to(tensor.device))
    if not factors and not mixed:
        return tensor
    tensor = tensor.to(work)
    for site, factor in factors:
        shape = (-1, *[1] * (tensor.ndim - lead - site.placement.axis - 1))
        tensor = tensor * factor.to(tensor).reshape(shape)
    for site, value in mixed:
        tensor = _mix(site, value, read, tensor, 0, lead)
    tensor = tensor.to(dtype)
    require_held(sites[0].placement.parameter, tensor, (given,))
    return tensor


def _base_index(
    base: Group, parameter: str, placement: Placement, positions: Tensor, shape: tuple[int, ...]
) -> tuple[int | None, Tensor]:
    """Return the axis whose index determines the unit of a base (a containing group), and the unit for each index of
    the axis.

    The axis is None if the axis of the placement itself determines the index.
    """
    found: dict[int, Tensor] = {}
    for other in base.placements:
        if other.parameter == parameter:
            there, units = covered(base, other, shape)
            index = found.setdefault(other.axis, torch.full((shape[other.axis],), -1))
            index[there] = units
    if placement.axis in found and bool((found[placement.axis][positions] >= 0).all()):
        return None, found[placement.axis][positions]
    for axis, index in found.items():
        if axis != placement.axis and bool((index >= 0).all()):
            return axis, index
    raise ValueError(
        f"a group is repeated within {base.name!r}, but {base.name!r} does not cover {parameter!r} "
        f"where that group acts (axis {placement.axis}); place both groups on the same block"
    )


def _look_up(site: Site, values: Num[Tensor, "*lead size"]) -> Num[Tensor, "*axes m"]:
    """Return values for the positions of an axis, `[*batch, *other axes, m]`, given the values of a group for its
    units, `[*batch, *bases, size]`.
    """
    if not site.bases:
        return values if site.is_plain else values.index_select(-1, site.units)
    key: tuple[EllipsisType | Tensor, ...] = (..., *site.base_index, site.units)
    return values[key]


def _factor(site: Site, value: Value) -> Float[Tensor, "..."] | None:
    """Return the factors by which an element multiplies entries along an axis, or None if all are one."""
    factor = None
    placement = site.placement

    def times(new: Tensor) -> Tensor:
        return new if factor is None else factor * new

    if value.scale is not None:
        for family, exponent in enumerate(placement.scale):
            if exponent:
                factor = times(_look_up(site, value.scale[..., family, :]) ** exponent)
    if value.sign is not None:
        for family, exponent in enumerate(placement.sign):
            if exponent:
                factor = times(_look_up(site, value.sign[..., family, :]).to(torch.float64))
    if value.shift is not None:
        for family, parity in enumerate(placement.parity):
            if parity:
                odd = _look_up(site, value.shift[..., family, :]) % 2
                factor = times(1 - 2 * odd.to(torch.float64))
    if factor is None or factor.requires_grad:  # A factor of one may also need a gradient.
        return factor
    return None if bool((factor == 1).all()) else factor


def _merge(
    into: dict[tuple[int, ...], Tensor], site: Site, values: Tensor, shape: tuple[int, ...], *, is_product: bool = False
) -> None:
    """Add values that act along some axes of a tensor to earlier values along the same axes. The dictionary `into`
    contains one tensor of values for each tuple of axes.

    If `is_product`, the values are multiplied instead of added.
    """
    axes = site.axes
    if site.is_plain and values.shape[-1] == shape[axes[-1]]:  # the whole axis in its order
        known = into.get(axes)
        into[axes] = values if known is None else known * values if is_product else known + values
        return
    if axes in into:
        into[axes] = into[axes].clone()  # A copy, because the element's cache may hold this tensor.
    else:
        lead = values.shape[: values.ndim - len(axes)]
        into[axes] = torch.full((*lead, *(shape[axis] for axis in axes)), int(is_product), dtype=values.dtype)
    if is_product:
        into[axes][..., site.positions] *= values
    else:
        into[axes][..., site.positions] += values


def broadcastable(values: Tensor, axes: tuple[int, ...], batch: int, lead: int, ndim: int) -> Tensor:
    """Reshape `[*batch, *axes]` to `[*lead, *parameter axes]`.

    The result has length one along axes on which the values do not depend.
    """
    if len(axes) > 1:
        order = sorted(range(len(axes)), key=lambda k: axes[k])
        values = values.permute(*range(batch), *(batch + k for k in order))
    shape = [1] * ndim
    for k, axis in zip(range(len(axes)), sorted(axes), strict=True):
        shape[axis] = values.shape[batch + k]
    return values.reshape(*values.shape[:batch], *([1] * (lead - batch)), *shape)


def _gather(
    tensor: Shaped[Tensor, "*shape"],
    displacements: dict[tuple[int, ...], Tensor],
    lead: int,
    shape: tuple[int, ...],
    batch: int,
) -> Shaped[Tensor, "*shape"]:
    """Gather each entry of a tensor from its source. Each displacement is the number of positions from an entry to its
    source, along the last of the axes that it depends on.
    """
    depends = {axes[-1]: set(axes[:-1]) for axes in displacements if len(axes) > 1}
    # Gathering axis by axis handles axes that depend on one other axis, but no chains of such axes.
    is_chained = any(depends.get(other) for others in depends.values() for other in others)
    is_by_rows = lead == batch == 1 and not depends and any(_is_long(shape, axes[-1]) for axes in displacements)
    if is_chained or not (batch == 0 or tensor.numel() > FLAT_LIMIT or is_by_rows):
        flat, numel = flat_index(displacements, shape, batch), math.prod(shape)
        source = tensor.reshape(*tensor.shape[:lead], numel)
        index = flat.reshape(*flat.shape[: flat.ndim - len(shape)], *([1] * (lead - batch)), numel)
        return source.gather(-1, index.to(tensor.device).expand(source.shape)).reshape(tensor.shape)
    # One axis at a time, without a full-size index; outer groups before nested ones: the displacement of a nested
    # group is indexed by the destination on the outer axis, and moving that axis later would turn it into the source.
    for axes in sorted(displacements, key=len):
        axis = axes[-1]
        if any(other != axes and other[-1] == axis and len(other) > len(axes) for other in displacements):
            continue
        total = sum(
            broadcastable(displacement, other, batch, lead, len(shape))
            for other, displacement in displacements.items()
            if other[-1] == axis
        )
        here = broadcastable(torch.arange(shape[axis]), (axis,), 0, 0, len(shape))
        index = (here + total).to(tensor.device)
        if len(axes) == 1 and batch == 0:
            tensor = take(tensor, lead + axis, index.flatten())
        elif len(axes) == 1 and lead == batch == 1 and _is_long(shape, axis):
            tensor = _gather_rows(tensor, axis, index.reshape(-1, shape[axis]))
        else:
            tensor = tensor.gather(lead + axis, index.expand(tensor.shape))
    return tensor


def flat_index(displacements: Mapping[tuple[int, ...], Tensor], shape: tuple[int, ...], batch: int) -> Tensor:
    """Return, for each entry, the flat index of the entry from which it is taken, `[*batch, *shape]`."""
    index = torch.arange(math.prod(shape)).reshape(shape)
    for axes, displacement in displacements.items():
        stride = math.prod(shape[axes[-1] + 1 :])
        index = index + broadcastable(displacement * stride, axes, batch, batch, len(shape))
    return index


def take(tensor: Shaped[Tensor, "*shape"], axis: int, index: Int[Tensor, " length"]) -> Shaped[Tensor, "*taken"]:
    """Return `tensor.index_select(axis, index)`, computed on a view of the tensor with three axes.

    Torch selects along the middle of three axes up to ten times as fast.
    """
    outer, inner = math.prod(tensor.shape[:axis]), math.prod(tensor.shape[axis + 1 :])
    if outer == 1 or not tensor.is_contiguous():
        return tensor.index_select(axis, index)
    flat = tensor.reshape(outer, tensor.shape[axis], inner).index_select(1, index)
    return flat.reshape(*tensor.shape[:axis], len(index), *tensor.shape[axis + 1 :])


def _is_long(shape: tuple[int, ...], axis: int) -> bool:
    """Return whether the entries at each index of an axis form long consecutive rows in memory."""
    return math.prod(shape[axis + 1 :]) >= LONG_ROW


def _gather_rows(
    tensor: Shaped[Tensor, "models *shape"], axis: int, index: Int[Tensor, "models length"]
) -> Shaped[Tensor, "models *shape"]:
    """Return `tensor[model, ..., index[model], ...]`, gathered row by row.

    Gathering row by row is many times faster than gathering entry by entry.
    """
    models, length = len(tensor), tensor.shape[1 + axis]
    outer = math.prod(tensor.shape[1 : 1 + axis])
    first = torch.arange(models * outer, device=index.device).reshape(models, outer, 1) * length
    rows = tensor.reshape(models * outer * length, -1)
    flat = (first + index.unsqueeze(1)).flatten()
    return rows.index_select(0, flat).reshape(tensor.shape)


def _mix(site: Site, value: Value, read: ReadValues, tensor: Tensor, batch: int, lead: int) -> Tensor:
    """Multiply the units in each copy of a group by the matrix that belongs to the copy."""
    assert value.matrix is not None
    axis, n, work = lead + site.placement.axis, site.group.size, tensor.dtype
    if site.group.matrix == "linear" and tensor.device.type != "mps":  # MPS has no float64.
        # One layer is multiplied by the matrix, and the next layer by its inverse. Rounding limits how exactly these
        # two factors cancel.
        work = torch.float64
    if site.is_plain and not site.bases and n == tensor.shape[axis]:
        if value.product is not None:
            return value.product.times(tensor.to(work), axis).to(tensor.dtype)
        blocks = (read.dual(site.group) if site.placement.is_inverse else value.matrix).to(tensor.device, work)
        return multiply_copies(blocks, tensor.to(work), site.placement.axis, None, batch, lead).to(tensor.dtype)
    order = site.by_copies.flatten().to(tensor.device)
    matrix = read.dual(site.group) if site.placement.is_inverse else value.matrix
    if site.bases:  # The matrix of each copy, [*batch, *other axes, copies or 1, n, n].
        first = site.units.argsort(stable=True).reshape(n, -1)[0]
        index = [i[first] if a is None else i for (a, _), i in zip(site.bases, site.base_index, strict=True)]
        key: tuple[EllipsisType | Tensor | slice, ...] = (..., *index, slice(None), slice(None))
        matrix = matrix[key]
    blocks = matrix.to(device=tensor.device, dtype=work)
    is_whole = torch.equal(order, torch.arange(tensor.shape[axis], device=tensor.device))
    picked = (tensor if is_whole else take(tensor, axis, order)).to(work)
    others = site.axes[:-1] if site.bases else None
    product = multiply_copies(blocks, picked, site.placement.axis, others, batch, lead).to(tensor.dtype)
    if is_whole:
        return product
    if len(order) == tensor.shape[axis]:
        return take(product, axis, order.argsort())
    return tensor.index_copy(axis, order, product)
