"""Folding of gains into later layers by the element of the symmetry that sets the gains to one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from regauge.core.act import Site
from regauge.core.element import Element
from regauge.core.groups import Group, Placement
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.discovery.operators import COPIES, NORMS, PRODUCTS, operator_name
from regauge.discovery.systems import combination
from regauge.discovery.trace import Program


def gains(program: Program) -> tuple[str, ...]:
    """Return, in graph order, the parameters with one axis that multiply a value entry by entry.

    For example, gains of norms and factors in the model's own code are returned.
    """
    found: dict[str, None] = {}
    for node in program.graph.graph.nodes:
        if node.op != "call_function":
            continue
        name = operator_name(node)
        if name in NORMS:
            operands = node.args[NORMS[name] : NORMS[name] + 1]
        else:
            operands = node.args[:2] if name in PRODUCTS else ()
        for operand in operands:
            state = program.states.get(_original(operand))
            if state is not None and sum(n > 1 for n in program.shapes[state]) == 1:
                found[state] = None
    return tuple(found)


def _original(operand: object) -> str:
    """Return the name of the placeholder that an operand copies. If there is none, return an empty string."""
    while isinstance(operand, Node) and operand.op == "call_function" and operator_name(operand) in COPIES:
        operand = operand.args[0]
    return operand.name if isinstance(operand, Node) and operand.op == "placeholder" else ""


def fold_gains(
    params: Mapping[str, Tensor], symmetry: Symmetry, names: Sequence[str]
) -> tuple[Params, tuple[str, ...], dict[str, str]]:
    """Set gains to one by the scales and signs of the symmetry.

    If an entry of a gain is zero, no scale can set it to one. Instead, the parameter entries that read a zero entry of
    a gain become zero. All other parameters that the scale multiplies, such as the bias after the gain, must be zero at
    the same entry. If two gains share one scale, only the first gain is folded. Pass the network as
    `symmetry.sums(params)`, and the symmetry as `symmetry.on_sums`.

    Returns:
        The network, the gains that are now exactly one, and the remaining gains, each with the reason why it stays.
    """
    current = dict(params)
    ones: list[str] = []
    kept: dict[str, str] = dict.fromkeys(names, "no scale of the symmetry moves it")
    for group in symmetry.groups:
        family = _Family(group, symmetry, [name for name in names if name not in ones])
        for name in family.sites:
            kept[name] = "its scale makes another gain one, or its sign cannot follow"
        for name in family.choose(current):
            folded = family.fold(name, current)
            if folded is None:
                kept[name] = "it is zero where the bias next to it is not"
            else:
                current = folded
                ones.append(name)
                family.kept.append(name)
    ones += [name for name in names if name not in ones and bool((current[name] == 1).all())]
    for name in ones:
        del kept[name]
    return current, tuple(name for name in names if name in ones), kept


GAIN_IS_ZERO = "it has zeros, which no scale can make one"


def unit_gains(
    values: Mapping[str, Tensor], symmetry: Symmetry, names: Sequence[str]
) -> tuple[Element, tuple[str, ...], dict[str, str]]:
    """Return the element whose scales and signs set gains to one.

    Only the gains are read, so the network may have any size. Unlike `fold_gains`, this function does not change gains
    that have a zero entry.

    Returns:
        The element, the gains that the element sets to one (up to rounding), and the remaining gains, each with the
        reason why it stays.
    """
    values, symmetry = symmetry.sums(values), symmetry.on_sums
    element = symmetry.identity()
    ones: list[str] = []
    kept: dict[str, str] = dict.fromkeys(names, "no scale of the symmetry moves it")
    exact = {name: values[name].detach().to(device="cpu", dtype=torch.float64) for name in names}
    for group in symmetry.groups:
        family = _Family(group, symmetry, [name for name in names if name not in ones])
        for name in family.sites:
            is_zero = bool((exact[name] == 0).any())
            kept[name] = GAIN_IS_ZERO if is_zero else "its scale makes another gain one, or its sign cannot follow"
        family.sites = {name: site for name, site in family.sites.items() if kept[name] != GAIN_IS_ZERO}
        chosen = family.choose(exact)
        if chosen:
            element = element.replace(group.name, replace(element[group.name], **family.unit(chosen, exact)))
            ones += chosen
    ones += [name for name in names if name not in ones and bool((exact[name] == 1).all())]
    reasons = {name: reason for name, reason in kept.items() if name not in ones}
    return element, tuple(name for name in names if name in ones), reasons


class _Family:
    """The gains that one group can scale, the scaled axis of each gain, and the gains that are already one."""

    def __init__(self, group: Group, symmetry: Symmetry, names: Sequence[str]) -> None:
        self._group, self._symmetry = group, symmetry
        self.sites: dict[str, Site] = {}
        for name in names if group.scales else ():
            local = [site for site in symmetry.sites.get(name, ()) if site.group.name == group.name]
            if len(local) == 1 and any(local[0].placement.scale) and self._covers_once(local[0]):
                self.sites[name] = local[0]
        self.kept: list[str] = []

    def choose(self, params: Mapping[str, Tensor]) -> list[str]:
        """Return gains that the group can set to one at the same time.

        The exponents of the group's scales at the returned gains are linearly independent.
        """
        result: list[str] = []
        for name in self.sites:
            rows = [*result, name]
            scales = torch.tensor([self.sites[n].placement.scale for n in rows], dtype=torch.float64)
            is_positive = bool((params[name] >= 0).all())
            if int(torch.linalg.matrix_rank(scales)) == len(rows) and (is_positive or self._flips(result, name)):
                result.append(name)
        return result

    def unit(self, chosen: Sequence[str], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the scales and signs of the group that set all chosen gains to one."""
        gains = [self._by_unit(name, values[name]) for name in chosen]
        rows = torch.tensor([self.sites[name].placement.scale for name in chosen], dtype=torch.float64)
        logs = torch.stack([gain.abs().log() for gain in gains], -2)  # [*bases, gains, size]
        found = {"scale": (-torch.linalg.pinv(rows) @ logs).exp()}
        if self._group.signs:
            signs = torch.ones(*self._shape()[:-1], self._group.signs, self._group.size, dtype=torch.int8)
            for k, (name, gain) in enumerate(zip(chosen, gains, strict=True)):
                left = torch.where(gain < 0, -1, 1).to(torch.int8)
                for family, exponent in enumerate(self.sites[name].placement.sign):
                    left = left * signs[..., family, :] if exponent % 2 else left
                for family in self._flips(chosen[:k], name) if bool((left < 0).any()) else ():
                    signs[..., family, :] *= left
            found["sign"] = signs
        return found

    def fold(self, name: str, params: Params) -> Params | None:
        """Return the network after one more gain is set to one, while gains that are already one stay unchanged. Return
        None if the gain cannot be set to one.
        """
        gain = self._by_unit(name, params[name])
        rows = torch.tensor([self.sites[n].placement.scale for n in (*self.kept, name)], dtype=torch.float64)
        direction = torch.linalg.pinv(rows)[:, -1]
        is_zero = gain == 0
        size = torch.where(is_zero, 1.0, gain.abs())
        local = self._local(name, direction)
        element = local.identity()
        value = element[self._group.name]
        scale = torch.stack([size ** float(-d) for d in direction], dim=-2)
        sign = value.sign
        if bool((gain < 0).any()):
            flips = self._flips(self.kept, name)
            flipped = torch.where(gain < 0, -1, 1).to(torch.int8)
            sign = torch.stack(
                [flipped if f in flips else torch.ones_like(flipped) for f in range(self._group.signs)], -2
            )
        moved = element.replace(self._group.name, replace(value, scale=scale, sign=sign))
        result = {**params, **local.act(moved, {key: params[key] for key in local.shapes})}
        if bool(is_zero.any()):
            doubled = torch.stack([torch.where(is_zero, 2.0 ** float(d), 1.0) for d in direction], dim=-2)
            ones = {key: torch.ones_like(result[key]) for key in local.shapes}
            powers = local.act(element.replace(self._group.name, replace(value, scale=doubled)), ones)
            for key, power in powers.items():
                if key != name and bool(((power > 1) & (result[key] != 0)).any()):
                    return None
                result[key] = torch.where(power < 1, 0.0, result[key])
        tied = next((names for names in self._symmetry.tied if name in names), (name,))
        return {**result, **{key: torch.ones_like(result[key]) for key in tied if key in result}}

    def _local(self, name: str, direction: Tensor) -> Symmetry:
        """Return the symmetry of one group, restricted to the parameters that change if a gain is set to one.

        Parameters change by a combination of the group's scales (`direction`), or by the signs that flip the gain.

        The returned group does not permute units.
        """
        flips = self._flips(self.kept, name)

        def acts(place: Placement) -> bool:
            power = sum(e * float(d) for e, d in zip(place.scale, direction, strict=True))
            return abs(power) > 1e-9 or sum(place.sign[f] for f in flips) % 2 == 1

        touched = {p.parameter for p in self._group.placements if acts(p)}
        groups = [self._group.unordered]
        for base in (self._symmetry[name] for name in self._group.within):
            bare = tuple(replace(place, scale=(), sign=()) for place in base.placements)
            groups.append(replace(base.unordered, signs=0, scales=0, placements=bare))
        local = (replace(g, placements=tuple(p for p in g.placements if p.parameter in touched)) for g in groups)
        return Symmetry(tuple(local), {key: self._symmetry.shapes[key] for key in touched})

    def _flips(self, fixed: Sequence[str], name: str) -> frozenset[int]:
        """Return families of signs that together change the sign of one gain, but of no gain that is already one.
        Return no families if the sign of the gain cannot be changed.
        """
        gains = [self.sites[gain].placement.sign for gain in (*fixed, name)]
        families = [dict(enumerate(flips)) for flips in zip(*gains, strict=True)]
        return frozenset(combination(families, {len(fixed): 1}, modulus=2) or ())

    def _by_unit(self, name: str, gain: Tensor) -> Tensor:
        """Return the entries of a gain in the order of the units of its group, `[*bases, size]`."""
        site = self.sites[name]
        result = torch.ones(self._shape(), dtype=gain.dtype)
        result[(*(index for _, index in site.bases), site.units)] = gain.flatten()[site.positions]
        return result

    def _covers_once(self, site: Site) -> bool:
        is_flat = all(axis is None for axis, _ in site.bases)
        length = self._symmetry.shapes[site.placement.parameter][site.placement.axis]
        return is_flat and site.positions.numel() == length == torch.Size(self._shape()).numel()

    def _shape(self) -> tuple[int, ...]:
        return (*(self._symmetry[base].size for base in self._group.within), self._group.size)
