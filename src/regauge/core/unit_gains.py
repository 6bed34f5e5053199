"""Gains that scales and signs of a symmetry can set to one, because all later layers are linear in these gains."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor

from regauge.core.act import Site
from regauge.core.element import Element, Value
from regauge.core.groups import Group
from regauge.core.remembered import Remembering, remembered

ROUNDING = 1e-6
"""Singular values of a matrix of exponents below this number count as zero.

The exponents refer to an orthonormal basis of combinations of scale families, so their size is about one.
"""


class Scaled(Remembering, Protocol):
    """A protocol: the properties of a symmetry that this module needs (groups, shapes, buffers, and where
    groups act).
    """

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the symmetry."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the parameters."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of running statistics."""

    @property
    def sites(self) -> Mapping[str, list[Site]]:
        """The axes on which groups act, for each parameter."""

    def identity(self, batch: Sequence[int] = ()) -> Element:
        """Return the identity element."""

    def __getitem__(self, name: str) -> Group: ...


@remembered
def gain_scales(symmetry: Scaled, names: tuple[str, ...]) -> tuple["GainScales", ...]:
    """Return the groups that can set some of the named gains to one, for any nonzero entries of the gains."""
    found, left = [], list(names)
    for group in symmetry.groups:
        scales = GainScales.of(group, symmetry, left)
        if scales.sites:
            found.append(scales)
            left = [name for name in left if name not in scales.sites]
    return tuple(found)


def unit_element(symmetry: Scaled, params: Mapping[str, Tensor], names: tuple[str, ...], lead: int = 0) -> Element:
    """Return the element of scales and signs that sets gains to one. Gains of zero stay zero."""
    scales = gain_scales(symmetry, names)
    batch = tuple(next(iter(params[name] for one in scales for name in one.sites)).shape[:lead]) if scales else ()
    element = symmetry.identity(batch)
    for one in scales:
        element = element.replace(one.group.name, replace(element[one.group.name], **one.unit(params, lead)))
    return element


def without_gains(symmetry: Scaled, element: Element, names: tuple[str, ...]) -> Element:
    """Return the element without the effect of its scales and signs on the named gains.

    The returned element acts on networks with gains of one, which stay one.
    """
    for one in gain_scales(symmetry, names):
        element = element.replace(one.group.name, one.project(element[one.group.name]))
    return element


class GainScales:
    """The gains that scales and signs of one group can set to one, independently of one another.

    Scales that change running statistics are not used, because the function would change if the statistics were
    recomputed.
    """

    def __init__(
        self,
        group: Group,
        shape: tuple[int, ...],
        sites: Mapping[str, Site],
        flips: Sequence[tuple[int, ...]],
        kept: Tensor,
    ) -> None:
        self.group, self.shape, self.sites, self.flips = group, shape, dict(sites), tuple(flips)
        rows = torch.tensor([site.placement.scale for site in sites.values()], dtype=torch.float64)
        self.rows = rows.reshape(len(self.sites), group.scales)
        self.inverse = kept @ torch.linalg.pinv(self.rows @ kept)

    @classmethod
    def of(cls, group: Group, symmetry: Scaled, names: Sequence[str]) -> "GainScales":
        """Return gains that can be set to one independently. Each gain comes with families of signs that flip this gain
        but no earlier gain.
        """
        shape = (*(symmetry[base].size for base in group.within), group.size)
        sites: dict[str, Site] = {}
        flips: list[tuple[int, ...]] = []
        kept = _kept_scales(group, symmetry.buffers)
        for name in names if group.scales and group.signs else ():
            local = [site for site in symmetry.sites.get(name, ()) if site.group.name == group.name]
            if len(local) != 1 or not any(local[0].placement.scale):
                continue
            site, length = local[0], symmetry.shapes[name][local[0].placement.axis]
            is_flat = all(axis is None for axis, _ in site.bases)
            if not is_flat or site.positions.numel() != length or length != torch.Size(shape).numel():
                continue
            places = [one.placement for one in (*sites.values(), site)]
            rows = torch.tensor([place.scale for place in places], dtype=torch.float64)
            flip = _flipping([place.sign for place in places])
            if flip and int(torch.linalg.matrix_rank(rows @ kept, atol=ROUNDING)) == len(rows):
                sites[name] = site
                flips.append(flip)
        return cls(group, shape, sites, flips, kept)

    def unit(self, params: Mapping[str, Tensor], lead: int = 0) -> dict[str, Tensor]:
        """Return the scales and signs that set all nonzero gains to one."""
        gains = []
        for name in self.sites:
            gain = self._by_unit(name, params[name], lead)
            gains.append(torch.where(gain == 0, 1.0, gain))
        logs = torch.stack([gain.abs().log() for gain in gains], -2)  # [*lead, *bases, gains, size]
        flipped = torch.stack([torch.where(gain < 0, -1, 1) for gain in gains], -2)
        return {"scale": (-self.inverse @ logs).exp(), "sign": self._signs(flipped)}

    def project(self, value: Value) -> Value:
        """Return a value of the group, changed such that it no longer changes the gains."""
        assert value.scale is not None
        assert value.sign is not None
        logs = value.scale.log()
        scale = (logs - self.inverse @ (self.rows @ logs)).exp()
        exponents = torch.tensor([site.placement.sign for site in self.sites.values()])  # [gains, families]
        negative = (value.sign < 0).long()
        flipped = 1 - 2 * ((exponents.unsqueeze(-1) * negative.unsqueeze(-3)).sum(-2) % 2)
        return replace(value, scale=scale, sign=(value.sign * self._signs(flipped)).to(value.sign))

    def _signs(self, flipped: Tensor) -> Tensor:
        """Return one sign for each family and unit. Together, the returned signs flip the gains where the tensor `[...,
        gains, size]` has the entry -1.
        """
        signs = torch.ones(*flipped.shape[:-2], self.group.signs, flipped.shape[-1], dtype=torch.int8)
        for k, name in enumerate(self.sites):
            left = flipped[..., k, :].to(torch.int8)
            for family, exponent in enumerate(self.sites[name].placement.sign):
                left = left * signs[..., family, :] if exponent % 2 else left
            for family in self.flips[k]:
                signs[..., family, :] *= left
        return signs

    def _by_unit(self, name: str, gain: Tensor, lead: int) -> Tensor:
        """Return the entries of a gain in the order of the units of its group, `[*lead, *bases, size]`, in float64."""
        site = self.sites[name]
        flat = gain.to("cpu", torch.float64).flatten(lead)
        result = torch.ones(*flat.shape[:-1], *self.shape, dtype=torch.float64)
        key: tuple[EllipsisType | Tensor, ...] = (..., *(index for _, index in site.bases), site.units)
        result[key] = flat[..., site.positions]
        return result


def _kept_scales(group: Group, buffers: Sequence[str]) -> Tensor:
    """Return the combinations of scale families that change no running statistics, as columns of a matrix."""
    moving = {place.scale for place in group.placements if place.parameter in buffers and any(place.scale)}
    if not moving:
        return torch.eye(group.scales, dtype=torch.float64)
    rows = torch.tensor(sorted(moving), dtype=torch.float64)
    directions: Tensor = torch.linalg.svd(rows, full_matrices=True)[2]
    return directions[int(torch.linalg.matrix_rank(rows)) :].mT


def _flipping(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return families of signs that together flip only the last gain. If no combination of families flips only the last
    gain, return no families.

    Each of `rows` contains the exponents with which the families of signs act on one gain.
    """
    system: dict[int, tuple[int, int]] = {}  # pivot: (families of the equation as bits, right side)
    for number, row in enumerate(rows):
        bits, right = (
            sum(1 << family for family, exponent in enumerate(row) if exponent % 2),
            int(number == len(rows) - 1),
        )
        for pivot, (other, value) in system.items():
            if bits >> pivot & 1:
                bits, right = bits ^ other, right ^ value
        if not bits:
            if right:
                return ()
            continue
        first = bits.bit_length() - 1
        for pivot, (other, value) in system.items():
            if other >> first & 1:
                system[pivot] = (other ^ bits, value ^ right)
        system[first] = (bits, right)
    return tuple(pivot for pivot, (_, value) in system.items() if value)
