"""Groups (the factors of a symmetry), placements (where groups act on axes of parameters), and classes of units."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

Kind = Literal["permutation", "signed", "dihedral", "scaled", "orthogonal", "centered", "rotation", "linear", "nested"]
Matrix = Literal["none", "orthogonal", "linear"]


@dataclass(frozen=True)
class Exponent:
    """A number by which a model multiplies a parameter before it takes the exponential function of the product.

    Groups act on the exponential, which scales multiply by factors. A factor f adds `log(f) / rate` to the parameter.
    """

    rate: float


@dataclass(frozen=True)
class Placement:
    """The description of how a group acts on one axis of one parameter.

    Unit `u` of the group owns the axis indices `start + u * stride + sum(k_j * stride_j)` for all `0 <= k_j < size_j`.
    Each entry of `repeats` is one pair `(size_j, stride_j)`. An ordinary axis has stride 1 and no repeats. The
    flattened output axis of a convolution, C x (H W), has stride H W and the repeat (H W, 1). A head axis of length H x
    d has stride d and the repeat (d, 1).

    The product of `scale ** exponent`, `sign ** exponent` and `(-1) ** (parity * shift)` over all families of the group
    multiplies the entries of a unit. After the multiplication, `shift * amount` is added to the entries of a unit.

    Attributes:
        parameter: The name of the parameter or buffer.
        axis: The axis of the parameter, counted without a leading model axis. A parameter without axes, which is a
            number, counts as a vector of one entry: its axis is 0.
        start: The index on the axis at which the first unit begins.
        stride: The distance between the first indices of consecutive units.
        repeats: Pairs (size, stride), which describe the block of axis indices that each unit owns.
        is_inverse: Whether the inverse transpose of the group's matrix acts on the axis, instead of the matrix itself.
            Only orthogonal and linear groups use the field `is_inverse`.
        scale: The exponent of each family of positive scales.
        sign: The exponent (0 or 1) of each family of signs.
        parity: For each family of shifts, whether an odd shift flips the sign of the entries on this axis.
        shift: For each family of shifts, the amount that one step adds to the entries on this axis.
    """

    parameter: str
    axis: int
    start: int = 0
    stride: int = 1
    repeats: tuple[tuple[int, int], ...] = ()
    is_inverse: bool = False
    scale: tuple[int, ...] = ()
    sign: tuple[int, ...] = ()
    parity: tuple[int, ...] = ()
    shift: tuple[float, ...] = ()


@dataclass(frozen=True, repr=False)
class Group:
    """One factor of the symmetry, which acts on several axes in the same way.

    Attributes:
        name: The name, unique within a symmetry.
        size: The number of units. The size is 0 in a symmetry written by hand, until parameters are given.
        placements: The axes on which the group acts.
        is_permuted: Whether the group permutes units.
        scales: The number of independent families of positive factors for each unit.
        signs: The number of independent families of signs for each unit.
        shifts: The number of independent families of half-period shifts for each unit; such shifts belong to periodic
            activations.
        matrix: The kind of matrix that acts instead of permutations, scales and signs: a rotation or an invertible
            matrix over all units.
        keeps_ones: Whether the rotations must map the vector of all ones to itself, as LayerNorm requires.
        is_proper: Whether the rotations must be proper, that is, without reflections. With two units, proper rotations
            are rotations by an angle. Rotations by an angle commute with the rotary position embeddings of attention.
        within: The names of the groups within which this group is repeated. A repeated group has one independent copy
            for each index of the groups in `within`.
        is_base: Whether this group contains another group, which is repeated for each of its units.
        behind_gains: The kind of rotations, "orthogonal" or "centered", that the group allows once all gains are one.
            Gains are one in representatives, so representatives can be rotated.
        classes: The class of each unit, which is the same in every copy of the group. Only units of the same class are
            exchanged with one another. The tuple `classes` is empty if all units belong to one class, or if the
            structure tensors are not known yet.
    """

    name: str
    size: int
    placements: tuple[Placement, ...]
    is_permuted: bool = True
    scales: int = 0
    signs: int = 0
    shifts: int = 0
    matrix: Matrix = "none"
    keeps_ones: bool = False
    is_proper: bool = False
    within: tuple[str, ...] = ()
    is_base: bool = False
    classes: tuple[int, ...] = ()
    behind_gains: Literal["none", "orthogonal", "centered"] = "none"

    def __post_init__(self) -> None:
        if self.behind_gains != "none" and (self.matrix != "none" or self.within):
            raise ValueError(
                f"group {self.name!r} is {self.behind_gains} behind gains, but "
                + (f"repeated within {self.within}" if self.within else f"{self.matrix} already")
                + "; leave `behind_gains` out"
            )
        if self.classes and (not self.is_permuted or len(self.classes) != self.size):
            raise ValueError(
                f"group {self.name!r} has {len(self.classes)} classes of units, but "
                + (f"{self.size} units" if self.is_permuted else "its units are not reordered")
                + "; give each unit that can be reordered the number of its class, or none"
            )
        for p in self.placements:
            lengths = (len(p.scale), len(p.sign), len(p.parity), len(p.shift))
            if lengths != (self.scales, self.signs, self.shifts, self.shifts):
                raise ValueError(
                    f"placement of group {self.name!r} on axis {p.axis} of {p.parameter!r} has {lengths} exponents "
                    "for scale, sign, parity and shift; the group has "
                    f"{(self.scales, self.signs, self.shifts, self.shifts)} families, so write as many"
                )
        if self.keeps_ones and self.matrix != "orthogonal":
            raise ValueError(
                f"group {self.name!r} keeps the vector of all ones, which is only possible for rotations, but its "
                f"matrix is {self.matrix!r}; write matrix='orthogonal'"
            )
        if self.is_proper and (self.matrix != "orthogonal" or self.keeps_ones):
            raise ValueError(
                f"group {self.name!r} is proper, which says that rotations act but no reflections, but its matrix is "
                f"{self.matrix!r}{' and keeps the ones' if self.keeps_ones else ''}; write matrix='orthogonal' alone"
            )
        if self.matrix != "none" and (self.is_permuted or self.scales or self.signs or self.shifts):
            raise ValueError(
                f"group {self.name!r} is {self.matrix}: it contains permutations, scales and signs, so it cannot have "
                "families of them as well; make two groups"
            )

    def __repr__(self) -> str:
        return f"Group({self.name!r}, {self.kind}, size {self.size or '?'}, on {len(self.placements)} axes)"

    @property
    def kind(self) -> Kind:
        """Return the kind of the group as a short word for tables and filters."""
        if self.matrix == "orthogonal":
            return "centered" if self.keeps_ones else "rotation" if self.is_proper else "orthogonal"
        if self.matrix == "linear":
            return "linear"
        if self.is_base:
            return "nested"
        if self.shifts:
            return "dihedral"
        if self.scales:
            return "scaled"
        if self.signs:
            return "signed"
        return "permutation"

    def without(self, *exponents: Literal["scale", "sign", "parity", "shift"]) -> "Group":
        """Return the group with some exponents of its placements set to zero.

        The number of families stays the same, so elements of the group remain valid.
        """
        counts = {"scale": self.scales, "sign": self.signs, "parity": self.shifts, "shift": self.shifts}
        zeros: dict[str, Any] = {name: (0,) * counts[name] for name in exponents}
        return replace(self, placements=tuple(replace(place, **zeros) for place in self.placements))

    @property
    def unordered(self) -> "Group":
        """Return the group without its permutations."""
        return replace(self, is_permuted=False, classes=())

    @property
    def class_sizes(self) -> tuple[int, ...]:
        """Return the number of units of each class. Units of one class can be exchanged."""
        if not self.is_permuted and self.matrix == "none":
            return (1,) * self.size
        return tuple(Counter(self.classes).values()) if self.classes else (self.size,)

    @property
    def has_order(self) -> bool:
        """Return whether at least two units can be exchanged."""
        return self.is_permuted and any(size > 1 for size in self.class_sizes)

    @property
    def has_many_values(self) -> bool:
        """Return whether two random elements have the same permutation and signs with a probability below 1e-6."""
        orders = [sum(math.lgamma(size + 1) for size in self.class_sizes) / math.log(10)] if self.has_order else []
        choices = [self.size * math.log10(2)] if self.signs or self.shifts else []
        return all(order >= 6 for order in [*orders, *choices]) and (self.matrix == "none" or self.size > 1)

    @property
    def log10_order(self) -> float:
        """Return log10 of the number of permutations, signs and half-period shifts of one copy of the group."""
        if self.matrix != "none":
            return 0.0
        order = sum(math.lgamma(size + 1) for size in self.class_sizes) / math.log(10)
        return order + (self.signs + self.shifts) * self.size * math.log10(2)


@dataclass(frozen=True)
class Frozen:
    """An axis of a parameter on which no group acts, and the reason."""

    parameter: str
    axis: int
    size: int
    reason: str


def groups_from_axes(
    axes: Mapping[str, Sequence[str | None]], kinds: Mapping[str, Kind], omegas: Mapping[str, float]
) -> tuple[Group, ...]:
    """Return the groups that a dictionary of axes describes, without sizes; see `Symmetry.from_axes`."""
    found: dict[str, list[Placement]] = {}
    for parameter, row in axes.items():
        for axis, text in enumerate(row):
            if text is None:
                continue
            name, inner, is_inverse = _read_axis(parameter, axis, text)
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
        raise ValueError(f"group {name!r} has a kind but no axis; the axes name {sorted(found)}; name its axes, too")
    carried = {name: _FAMILIES[kinds.get(name, "permutation")] for name in found}
    return tuple(Group(name, 0, tuple(places), **carried[name]) for name, places in found.items())


def readers_from_axes(axes: Mapping[str, Sequence[str | None]]) -> tuple[tuple[str, int], ...]:
    """Return the axes (parameter, axis) along which layers sum over units: the axes on which the inverse of a group
    acts.
    """
    return tuple(
        (parameter, axis)
        for parameter, row in axes.items()
        for axis, text in enumerate(row)
        if text is not None and _read_axis(parameter, axis, text)[2]
    )


def _read_axis(parameter: str, axis: int, text: str) -> tuple[str, int, bool]:
    """Parse the text of an axis, such as "h*4": the group, the number of entries per unit, and whether the inverse
    acts.
    """
    match = re.fullmatch(r"(.+?)(?:\*(\d+))?(\^[+-]1)?", text)
    if match is None:
        raise ValueError(f"axis {axis} of {parameter!r} is {text!r}; write 'name', 'name*4' or 'name^-1'")
    return match[1], int(match[2] or 1), axis > 0 if match[3] is None else match[3] == "^-1"


def axes_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor, or the shape `(1,)` for a tensor without axes, which placements treat as a vector
    of one entry.
    """
    return tuple(shape) or (1,)


def set_sizes(group: Group, shapes: Mapping[str, tuple[int, ...]]) -> Group:
    """Return the group with its size, which is determined by the shapes of the parameters on which it acts."""
    if group.size:
        return group
    sizes = {}
    for p in group.placements:
        length = axes_of(shapes[p.parameter])[p.axis]
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


def class_labels(group: Group) -> Int[Tensor, " size"]:
    """Return the index of each unit's class. Classes are numbered from zero in the order of their first units."""
    return _labels(group.classes or (0,) * group.size)


def within_classes(group: Group, orders: Int[Tensor, "*lead size"]) -> Int[Tensor, "*lead size"]:
    """Convert arbitrary permutations of units to permutations that exchange only units of the same class.

    Uniformly random permutations stay uniformly random.
    """
    if not group.classes:
        return orders
    labels = class_labels(group)
    targets = labels.argsort(stable=True).expand_as(orders)
    sources = orders.gather(-1, labels[orders].argsort(dim=-1, stable=True))
    return torch.empty_like(orders).scatter_(-1, targets, sources)


def forbid_between_classes(
    group: Group, profits: Float[Tensor, "*lead target source"]
) -> Float[Tensor, "*lead target source"]:
    """Lower the profits of assigning a unit to a unit of another class.

    A single assignment between classes costs more than all other assignments together can gain.
    """
    if not group.classes:
        return profits
    labels = class_labels(group).to(profits.device)
    profits = profits.double()
    low, high = profits.amin((-2, -1), keepdim=True), profits.amax((-2, -1), keepdim=True)
    spread = torch.where(high > low, high - low, 1.0)
    return torch.where(labels.unsqueeze(-1) == labels, profits, low - (group.size + 1) * spread)


def class_sums(group: Group, tensor: Num[Tensor, "..."], axis: int, units: Int[Tensor, " units"]) -> Num[Tensor, "..."]:
    """Return, for each class of exchangeable units, the sum of their entries divided by the square root of the number
    of these units.

    `units` gives, for each index of the axis, the unit that owns the index.
    """
    labels, sizes = class_labels(group), torch.tensor(group.class_sizes)
    shape = list(tensor.shape)
    shape[axis] = len(sizes)
    sums = tensor.new_zeros(shape).index_add(axis, labels[units].to(tensor.device), tensor)
    roots = sizes.to(tensor).sqrt().reshape([-1 if k == axis else 1 for k in range(tensor.ndim)])
    return sums / roots


def class_means(group: Group, values: Num[Tensor, "*lead units values"]) -> Num[Tensor, "*lead units values"]:
    """Replace the entries of every unit by the mean over all units of the same class."""
    axis, labels = values.ndim - 2, class_labels(group).to(values.device)
    sizes = torch.tensor(group.class_sizes).to(values).unsqueeze(-1)
    sums = values.new_zeros(*values.shape[:-2], len(sizes), values.shape[-1]).index_add(axis, labels, values)
    return (sums / sizes).index_select(axis, labels)


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
"""The fields of a `Group` for each kind that `Symmetry.from_axes` accepts."""


@lru_cache(maxsize=256)
def _labels(classes: tuple[int, ...]) -> Int[Tensor, " size"]:
    numbers = {label: k for k, label in enumerate(dict.fromkeys(classes))}
    return torch.tensor([numbers[label] for label in classes], dtype=torch.int64)
