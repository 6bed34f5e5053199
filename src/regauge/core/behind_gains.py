"""The symmetry of representatives (networks whose gains are one), and its relation to the whole symmetry.

Scales and signs that change gains cannot act on representatives. However, some rotations can act on representatives,
but not on networks with other gains; `Group.behind_gains` names these rotations.

Some models store a gain as `weight` and multiply by `1 + weight`. For such a gain, a scale s changes the weight by `w
-> s (w + 1) - 1`. If the model multiplies by `1 + layer(x)`, a scale changes the bias of the layer in the same way.
Functions that read or set gains use the sums `1 + weight`, because the action on the sums is linear.

If a model uses only the exponential of a parameter, scales multiply the exponential, and therefore add numbers to the
parameter. Functions that read or set a parameter of this form use its exponential instead of the sum `1 + weight`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from regauge.core.element import Element, Value
from regauge.core.groups import Exponent, Group, Placement
from regauge.core.matrices import null_space
from regauge.core.params import Params
from regauge.core.remembered import remembered
from regauge.core.translations import TranslationFamily
from regauge.core.unit_gains import Scaled, gain_scales, without_gains

Added = float | tuple[tuple[int, int, float], ...] | Exponent
"""A constant that a model adds to all entries of a vector, or to ranges of its entries: start, stop and constant.

If the model uses only exponentials of a parameter, an `Exponent` takes the place of the constant."""


class Gained(Scaled, Protocol):
    """A protocol: the properties of a symmetry with gains and translations that this module needs."""

    @property
    def gains(self) -> tuple[str, ...]:
        """The gains (multipliers of activations) that an element of the symmetry can set to one."""

    @property
    def translations(self) -> tuple[TranslationFamily, ...]:
        """The families of translations."""

    @property
    def added(self) -> Mapping[str, Added]:
        """The constants that the model adds to parameters before use."""

    @property
    def ones(self) -> tuple[str, ...]:
        """The gains that must be one for the symmetry to hold."""

    def _act_on(self, element: Element, params: Mapping[str, Tensor]) -> Params: ...


Owner = TypeVar("Owner", bound=Gained)


@dataclass(frozen=True)
class _Kept:
    """The combinations of a group's scales and signs that leave all gains unchanged."""

    scales: tuple[tuple[int, ...], ...]
    signs: tuple[tuple[int, ...], ...]

    def place(self, place: Placement) -> Placement:
        """Return a copy of a placement, with one exponent for each combination of scales or signs that keeps gains."""
        scale = tuple(sum(x * y for x, y in zip(row, place.scale, strict=True)) for row in self.scales)
        sign = tuple(sum(x * y for x, y in zip(row, place.sign, strict=True)) % 2 for row in self.signs)
        return replace(place, scale=scale, sign=sign)

    def lift(self, value: Value, blank: Value) -> Value:
        """Return the value of the whole group, given a value for each combination of scales or signs that keeps
        gains.
        """
        scale, sign = blank.scale, blank.sign
        if scale is not None and value.scale is not None:
            rows = torch.tensor(self.scales, dtype=value.scale.dtype)
            scale = (rows.mT @ value.scale.log()).exp()
        if sign is not None and value.sign is not None:
            sign = torch.ones_like(sign)
            for k, row in enumerate(self.signs):
                for family, is_in in enumerate(row):
                    sign[..., family, :] *= value.sign[..., k, :] if is_in else 1
        return replace(value, scale=scale, sign=sign)

    def lower(self, value: Value) -> Value:
        """Return a value for each combination of scales and signs that keeps gains, given a value of the whole group.

        The given value must leave the gains of the group unchanged.
        """
        scale = sign = None
        if self.scales and value.scale is not None:
            rows = torch.tensor(self.scales, dtype=value.scale.dtype)
            scale = (torch.linalg.pinv(rows.mT) @ value.scale.log()).exp()
        if self.signs and value.sign is not None:
            own = [next(k for k, x in enumerate(row) if x and sum(r[k] for r in self.signs) == 1) for row in self.signs]
            sign = value.sign[..., own, :]
        return replace(value, scale=scale, sign=sign)


@remembered
def _kept(symmetry: Gained) -> dict[str, _Kept]:
    """Return, for each group with gains, the combinations of its scales and signs that leave the gains unchanged."""
    found = {}
    for one in gain_scales(symmetry, symmetry.gains):
        places = [site.placement for site in one.sites.values()]
        scales = null_space([place.scale for place in places], one.group.scales)
        signs = null_space([place.sign for place in places], one.group.signs, modulus=2)
        found[one.group.name] = _Kept(tuple(scales), tuple(signs))
    return found


@remembered
def rotatable(symmetry: Gained) -> tuple[str, ...]:
    """Return the names of the groups that may act by rotations on representatives, which are networks with gains of
    one.

    Groups that act on structure tensors, such as masks, may not rotate."""
    known = {one.group.name for one in gain_scales(symmetry, symmetry.gains)}
    several = (g for g in symmetry.groups if g.behind_gains != "none" and g.name in known)
    return tuple(group.name for group in several if not group.classes)


@remembered
def on_representatives(symmetry: Owner, rotated: tuple[str, ...] = ()) -> Owner:
    """Return the symmetry of networks with gains of one (representatives), in which some groups rotate; see
    `Symmetry.on_representatives`.
    """
    gains = [name for one in gain_scales(symmetry, symmetry.gains) for name in one.sites]
    # These running statistics are the same in every representative, so no scale acts on them.
    constant = {family.entries.parameter for family in symmetry.translations if family.is_stored_only}
    groups = []
    for group in symmetry.groups:
        group = replace(group, placements=tuple(p for p in group.placements if p.parameter not in constant))
        if group.name in rotated:
            group = rotated_group(symmetry, group.name)
        elif group.name in _kept(symmetry):
            kept = _kept(symmetry)[group.name]
            places = tuple(map(kept.place, group.placements))
            group = replace(group, placements=places, scales=len(kept.scales), signs=len(kept.signs))
        groups.append(replace(group, behind_gains="none"))
    ones = (*symmetry.ones, *gains) if rotated else symmetry.ones
    change: dict[str, Any] = {"groups": tuple(groups), "gains": (), "translations": (), "ones": ones}
    return replace(symmetry, **change)  # type: ignore[type-var]  # Symmetries are dataclasses.


def rotated_group(symmetry: Gained, name: str) -> Group:
    """Return the group of rotations that replaces a permutation group if all gains are one."""
    group, gains = symmetry[name], gains_of(symmetry, name)
    places = tuple(
        Placement(place.parameter, place.axis, place.start, place.stride, place.repeats)
        for place in group.placements
        if place.parameter not in gains
    )
    is_centered = group.behind_gains == "centered"
    return Group(name, group.size, places, False, matrix="orthogonal", keeps_ones=is_centered, is_base=group.is_base)


@remembered
def gains_of(symmetry: Gained, name: str) -> tuple[str, ...]:
    """Return the gains that the scales of a group can set to one."""
    return tuple(gain for one in gain_scales(symmetry, symmetry.gains) if one.group.name == name for gain in one.sites)


def lift(symmetry: Gained, element: Element, rotated: Collection[str] = ()) -> Element:
    """Return an element of the whole symmetry that acts on networks with gains of one in the same way as `element`.

    The argument `element` belongs to the symmetry that `on_representatives` returns.
    """
    blank, values, kept = symmetry.identity(element.batch), {}, _kept(symmetry)
    for name in blank:
        if name in rotated:
            values[name] = blank[name]
        else:
            values[name] = kept[name].lift(element[name], blank[name]) if name in kept else element[name]
    return Element(values, element.batch, rotation=matrices(element, rotated))


def matrices(element: Element, names: Collection[str]) -> dict[str, Tensor]:
    """Return the rotation matrices of the named groups."""
    return {name: matrix for name in names if (matrix := element[name].matrix) is not None}


def lower(symmetry: Gained, element: Element, rotated: Collection[str] = ()) -> Element:
    """Return the element of the symmetry of representatives (networks with gains of one) that acts on them in the same
    way as `element`.
    """
    linear, kept, values = without_gains(symmetry, element, symmetry.gains), _kept(symmetry), {}
    for name in linear:
        if name in rotated:
            size = symmetry[name].size
            eye = torch.eye(size, dtype=torch.float64).expand(*element.batch, size, size)
            values[name] = Value(matrix=element.rotation.get(name, eye) @ carry_rows(symmetry, linear, name, eye))
        else:
            values[name] = kept[name].lower(linear[name]) if name in kept else linear[name]
    return Element(values, element.batch)


def carry_rows(symmetry: Gained, linear: Element, name: str, matrix: Tensor) -> Tensor:
    """Permute rows `[*batch, size, n]` and flip their signs, as an element does with the units of a network with gains
    of one.
    """
    value = linear[name]
    if value.perm is not None:
        matrix = matrix.take_along_dim(value.perm.unsqueeze(-1), -2)
    if value.sign is not None:
        gains = gains_of(symmetry, name)
        place = next(place for place in symmetry[name].placements if place.parameter not in gains)
        used = [family for family, exponent in enumerate(place.sign) if exponent % 2]
        matrix = matrix * value.sign[..., used, :].prod(-2).unsqueeze(-1)
    return matrix


def carry_rotation(symmetry: Gained, element: Element, name: str, matrix: Tensor) -> Tensor:
    """Return the rotation `[*batch, size, size]` of a group, expressed in the order and signs that its units have after
    an element without rotations.
    """
    linear = without_gains(symmetry, element, symmetry.gains)
    return carry_rows(symmetry, linear, name, carry_rows(symmetry, linear, name, matrix).mT).mT


def zero_gains(symmetry: Gained, params: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Return, for each gain of the named groups, whether at least one entry of the gain is zero: bool `[*lead]`.

    Networks in which a gain of a group is zero are not rotated along the axes of the group.
    """
    gains = [gain for name in names for gain in gains_of(symmetry, name)]
    found = sums(symmetry.added, {gain: params[gain] for gain in gains})
    return {gain: (found[gain] == 0).any(-1).cpu() for gain in gains}


def rotate(
    symmetry: Gained, rotation: Mapping[str, Tensor], representative: Mapping[str, Tensor], batch: tuple[int, ...]
) -> Params:
    """Rotate networks with gains of one (representatives), `[*batch, ...]`. A network with a zero gain on the rotated
    axes is not rotated.
    """
    behind = on_representatives(symmetry, tuple(rotation))
    names = {place.parameter for name in rotation for place in behind[name].placements}
    element = turn(symmetry, behind, rotation, representative, batch)
    return {
        **representative,
        **behind._act_on(element, {name: representative[name] for name in names if name in representative}),
    }


def turn(
    symmetry: Gained,
    behind: Gained,
    rotation: Mapping[str, Tensor],
    representative: Mapping[str, Tensor],
    batch: tuple[int, ...] = (),
) -> Element:
    """Return the element that acts by the given rotations on representatives, which are networks with gains of one.

    If a gain on the rotated axes of a network is zero, the rotation of this network is the identity.

    Args:
        symmetry: The whole symmetry.
        behind: The symmetry of representatives, in which some groups act by rotations.
        rotation: The rotation matrices of the groups.
        representative: The representatives, whose gains `[*batch, n]` are read.
        batch: The batch shape.
    """
    element = behind.identity(batch)
    for name, matrix in rotation.items():
        stays = torch.zeros(batch, dtype=torch.bool)
        for is_zero in zero_gains(symmetry, representative, [name]).values():
            stays = stays | is_zero
        kept = torch.where(stays[..., None, None], torch.eye(symmetry[name].size, dtype=matrix.dtype), matrix)
        element = element.replace(name, Value(matrix=kept))
    return element


def constant(added: float | tuple[tuple[int, int, float], ...], length: int) -> float | Tensor:
    """Return the number that is added to all entries of a vector, or one number for each entry, in float64."""
    if not isinstance(added, tuple):
        return added
    found = torch.zeros(length, dtype=torch.float64)
    for start, stop, number in added:
        if stop > length:
            raise ValueError(
                f"a number is added to entries {start} to {stop - 1} of a vector of {length} entries; the parameters "
                "do not fit the symmetry: discover it again from their module"
            )
        found[start:stop] = number
    return found


def ranges_of(numbers: Tensor) -> Added:
    """Invert the function `constant`: return the constants and ranges from which it computes the given numbers."""
    values = numbers.tolist()
    if len({*values}) == 1:
        return float(values[0])
    ends = [k for k in range(1, len(values) + 1) if k == len(values) or values[k] != values[k - 1]]
    return tuple((a, b, float(values[a])) for a, b in zip([0, *ends], ends, strict=False) if values[a])


def plus(tensor: Tensor, added: Added, sign: int = 1) -> Tensor:
    """Return a vector, or a population of vectors, plus or minus the constants that the model adds to it.

    For a parameter with an `Exponent`, return the exponential of its product with the rate. If the sign is negative,
    invert this exponential: return the logarithm divided by the rate.
    """
    if isinstance(added, Exponent):
        return (tensor * added.rate).exp() if sign > 0 else tensor.log() / added.rate
    number = constant(added, tensor.shape[-1] if tensor.ndim else 1)
    return tensor + sign * (number.to(tensor) if isinstance(number, Tensor) else number)


def sums(added: Mapping[str, Added], params: Mapping[str, Tensor]) -> Params:
    """Return parameters plus the constants that the model adds to them before use, computed in at least 32 bits."""
    there = {name: (params[name], number) for name, number in added.items() if name in params}
    wide = {
        name: plus(t.to(torch.promote_types(t.dtype, torch.float32)), number) for name, (t, number) in there.items()
    }
    return {**params, **wide}


def from_sums(added: Mapping[str, Added], summed: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Params:
    """Return the parameters, computed from sums of parameters and the constants that the model adds to them.

    If a parameter in `given` gives the same sum as in `summed`, this parameter is returned, because it has no rounding
    error.
    """
    found = dict(summed)
    for name in added:
        if name in summed:
            same = sums(added, {name: given[name]})[name]
            is_same = same.shape == summed[name].shape and torch.equal(same, summed[name].to(same))
            found[name] = given[name].to(summed[name].dtype) if is_same else plus(summed[name], added[name], -1)
    return found
