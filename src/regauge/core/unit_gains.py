"""Gains that the scales and signs of a symmetry bring to one: all that is read behind them is linear in them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regauge.core.act import Site
from regauge.core.element import Element, Value
from regauge.core.groups import Group
from regauge.core.remembered import remembered

if TYPE_CHECKING:
    from regauge.core.symmetry import Symmetry


@remembered
def gain_scales(symmetry: "Symmetry", names: tuple[str, ...]) -> tuple["GainScales", ...]:
    """The groups that bring some of these gains to one, whatever their values are but zero."""
    found, left = [], list(names)
    for group in symmetry.groups:
        scales = GainScales.of(group, symmetry, left)
        if scales.sites:
            found.append(scales)
            left = [name for name in left if name not in scales.sites]
    return tuple(found)


def unit_element(symmetry: "Symmetry", params: Mapping[str, Tensor], names: tuple[str, ...], lead: int = 0) -> Element:
    """The scales and signs that bring gains to one; entries that are zero stay."""
    scales = gain_scales(symmetry, names)
    batch = tuple(next(iter(params[name] for one in scales for name in one.sites)).shape[:lead]) if scales else ()
    element = symmetry.identity(batch)
    for one in scales:
        element = element.replace(one.group.name, replace(element[one.group.name], **one.unit(params, lead)))
    return element


def without_gains(symmetry: "Symmetry", element: Element, names: tuple[str, ...]) -> Element:
    """The element without what its scales and signs do to gains: what it does to networks whose gains are one."""
    for one in gain_scales(symmetry, names):
        element = element.replace(one.group.name, one.project(element[one.group.name]))
    return element


class GainScales:
    """The gains that the scales and signs of one group bring to one, each by itself."""

    def __init__(self, group: Group, shape: tuple[int, ...], sites: Mapping[str, Site]) -> None:
        self.group, self.shape, self.sites = group, shape, dict(sites)
        rows = torch.tensor([site.placement.scale for site in sites.values()], dtype=torch.float64)
        self.rows = rows.reshape(len(self.sites), group.scales)
        self.flips = [self._flip(k, name) for k, name in enumerate(self.sites)]

    @classmethod
    def of(cls, group: Group, symmetry: "Symmetry", names: Sequence[str]) -> "GainScales":
        """Gains whose exponents are independent, and each of which a sign flips that leaves those before it alone."""
        shape = (*(symmetry[base].size for base in group.within), group.size)
        found = cls(group, shape, {})
        for name in names if group.scales and group.signs else ():
            local = [site for site in symmetry.sites.get(name, ()) if site.group.name == group.name]
            if len(local) != 1 or not any(local[0].placement.scale):
                continue
            site, length = local[0], symmetry.shapes[name][local[0].placement.axis]
            is_flat = all(axis is None for axis, _ in site.bases)
            if is_flat and site.positions.numel() == length == torch.Size(shape).numel():
                more = cls(group, shape, {**found.sites, name: site})
                if int(torch.linalg.matrix_rank(more.rows)) == len(more.sites) and more.flips[-1]:
                    found = more
        return found

    def unit(self, params: Mapping[str, Tensor], lead: int = 0) -> dict[str, Tensor]:
        """The scales and signs that bring all of them to one at once, but entries that are zero."""
        gains = []
        for name in self.sites:
            gain = self._by_unit(name, params[name], lead)
            gains.append(torch.where(gain == 0, 1.0, gain))
        logs = torch.stack([gain.abs().log() for gain in gains], -2)  # [*lead, *bases, gains, size]
        flipped = torch.stack([torch.where(gain < 0, -1, 1) for gain in gains], -2)
        return {"scale": (-torch.linalg.pinv(self.rows) @ logs).exp(), "sign": self._signs(flipped)}

    def project(self, value: Value) -> Value:
        """A value of the group without what it does to these gains."""
        assert value.scale is not None
        assert value.sign is not None
        logs = value.scale.log()
        scale = (logs - torch.linalg.pinv(self.rows) @ (self.rows @ logs)).exp()
        exponents = torch.tensor([site.placement.sign for site in self.sites.values()])  # [gains, families]
        negative = (value.sign < 0).long()
        flipped = 1 - 2 * ((exponents.unsqueeze(-1) * negative.unsqueeze(-3)).sum(-2) % 2)
        return replace(value, scale=scale, sign=(value.sign * self._signs(flipped)).to(value.sign))

    def _signs(self, flipped: Tensor) -> Tensor:
        """The signs of all families that flip gains `[..., gains, size]` where these are -1."""
        signs = torch.ones(*flipped.shape[:-2], self.group.signs, flipped.shape[-1], dtype=torch.int8)
        for k, name in enumerate(self.sites):
            left = flipped[..., k, :].to(torch.int8)
            for family, exponent in enumerate(self.sites[name].placement.sign):
                left = left * signs[..., family, :] if exponent % 2 else left
            for family in self.flips[k]:
                signs[..., family, :] *= left
        return signs

    def _flip(self, number: int, name: str) -> tuple[int, ...]:
        """Families of signs that together flip one gain and none before it; empty where there are none."""
        before = [site.placement.sign for site in list(self.sites.values())[:number]]
        families = range(self.group.signs)
        for chosen in chain.from_iterable(combinations(families, size) for size in range(1, len(families) + 1)):
            is_kept = all(sum(signs[family] for family in chosen) % 2 == 0 for signs in before)
            if is_kept and sum(self.sites[name].placement.sign[family] for family in chosen) % 2:
                return chosen
        return ()

    def _by_unit(self, name: str, gain: Tensor, lead: int) -> Tensor:
        """The gain as `[*lead, *bases, size]`, in float64."""
        site = self.sites[name]
        flat = gain.detach().to("cpu", torch.float64).flatten(lead)
        result = torch.ones(*flat.shape[:-1], *self.shape, dtype=torch.float64)
        result[(..., *(index for _, index in site.bases), site.units)] = flat[..., site.positions]
        return result
