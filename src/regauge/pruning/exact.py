"""Unread, dead, constant and duplicate units, which can be removed without changing the outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regauge.core.act import Site
from regauge.core.families import unit_values
from regauge.core.groups import Group
from regauge.core.params import Params
from regauge.core.probe import perturb
from regauge.discovery.activations import Activations
from regauge.pruning.network import Network

CONSTANT_VARIATION = 1e-9
"""The largest variation of a unit that counts as constant, relative to the layer's activations."""
DRAWS = 8
"""The number of random samples of the other weights. A constant unit must be constant for each sample."""
Why = Literal["unread", "dead", "constant", "duplicate"]
EQUAL_ENTRIES = 1e-12
"""The largest difference of entries that count as equal, relative to the largest entry of a unit."""


@dataclass(frozen=True)
class Removal:
    """A unit that was removed without changing the function.

    Attributes:
        group: The group of the unit.
        unit: The index of the unit among the units of all copies of the group, copy by copy.
        why: The reason: no layer reads the unit, the unit is constant (such as zero) for all inputs, or it duplicates
            another unit.
        of: The unit that the removed unit duplicates, if it is a duplicate.
        factors: A factor for each parameter axis that reads a duplicate. The weights that read the duplicate are
            multiplied by the factor, and added to the weights that read the unit in `of`.
        values: The constants that the layers receive from a constant unit.
    """

    group: str
    unit: int
    why: Why
    of: int | None = None
    factors: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{self.group}[{self.unit}]: {self.why}" + ("" if self.of is None else f" of {self.of}")


def find_removals(network: Network, groups: Sequence[Group], gone: Mapping[str, Tensor]) -> list[Removal]:
    """Return remaining units that can be removed. Each removal is checked when it is applied.

    A unit is dead or constant under two conditions. First, a tensor that computes the unit contains only zeros for the
    unit. Second, the activations that layers read from the unit are the same for all inputs and for all values of
    preceding units.
    """
    found: list[Removal] = []
    silent: dict[str, Tensor] = {}
    for group in groups:
        readers = network.sites(group.name, reading=True)
        unread = ~gone[group.name] & bool(readers)
        for name, site in readers:
            unread &= (network.unit_entries(name, site, network.params) == 0).all(1)
        found += [Removal(group.name, int(unit), "unread") for unit in unread.nonzero()]
        some = torch.stack([torch.zeros_like(unread), *_zeros(network, group)]).any(0)
        silent[group.name] = some & ~gone[group.name] & ~unread
    constants = _constants(network, {name: units for name, units in silent.items() if bool(units.any())})
    found += constants
    taken = {(one.group, one.unit) for one in found}
    for group in groups:
        left = [int(unit) for unit in (~gone[group.name]).nonzero() if (group.name, int(unit)) not in taken]
        for unit, other, factors in find_duplicates(network, group, left):
            found.append(Removal(group.name, unit, "duplicate", other, factors))
    return found


def apply_removals(network: Network, removals: Sequence[Removal]) -> str:
    """Edit a network such that no layer reads the units in `removals` any longer, or return the reason why the edit is
    impossible.
    """
    for one in removals:
        if one.why == "constant":
            reason = _fold(network, one)
            if reason:
                return reason
        elif one.why == "duplicate":
            assert one.of is not None
            for (name, site), factor in zip(network.sites(one.group, reading=True), one.factors, strict=True):
                flat, entries = network.params[name].flatten().clone(), network.entries(name, site)
                flat[entries[one.of]] += factor * flat[entries[one.unit]]
                flat[entries[one.unit]] = 0.0
                network.put({name: flat.reshape(network.params[name].shape)})
    by_group: dict[str, list[int]] = {}
    for one in removals:
        by_group.setdefault(one.group, []).append(one.unit)
    for group, units in by_group.items():
        mask = torch.zeros(network.symmetry.count_copies(group) * network.symmetry[group].size, dtype=torch.bool)
        mask[units] = True
        network.remove(group, mask)
    return ""


def bias_of(network: Network, name: str, site: Site) -> tuple[str, int] | None:
    """Return the bias that is added to the product with a weight, and the corresponding axis of the weight."""
    stem, _, leaf = name.rpartition(".")
    bias = f"{stem}.{leaf.replace('weight', 'bias')}" if stem else leaf.replace("weight", "bias")
    held = network.params.get(bias)
    if bias == name or held is None or held.ndim != 1:
        return None
    shape = network.params[name].shape
    axes = [axis for axis in (0, 1) if axis != site.placement.axis and axis < len(shape)]
    axis = next((axis for axis in axes if shape[axis] == len(held)), None)
    return None if axis is None else (bias, axis)


def find_duplicates(network: Network, group: Group, left: Sequence[int]) -> list[tuple[int, int, tuple[float, ...]]]:
    """Return units that equal an earlier unit of the same copy up to scale and sign.

    Args:
        network: The network.
        group: The name of the group.
        left: The indices of the compared units, copy by copy.

    Returns:
        The unit, the earlier unit that it duplicates, and a factor for each parameter axis that reads both units. The
        weights that read the unit are multiplied by the factor, and added to the weights that read the earlier unit.
    """
    places = [
        (site, network.unit_entries(name, site, network.params))
        for name, site in network.sites(group.name, reading=False)
    ]
    places = [(site, values) for site, values in places if values.is_floating_point()]
    if len(left) < 2 or not places:
        return []
    logs, signs = _gauge(group, places)
    rows = torch.cat([values * _factor(site, -logs, signs).unsqueeze(1) for site, values in places], 1)[list(left)]
    size = rows.abs().amax(1, keepdim=True)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)
    keys = (rows / size.clamp_min(1e-300)) @ probe
    order = sorted(range(len(left)), key=lambda k: (left[k] // group.size, float(keys[k])))
    readers = [site for _, site in network.sites(group.name, reading=True)]
    first: dict[int, int] = {}
    found = []
    for before, here in pairwise(order):
        root = first.get(before, before)
        same = float((rows[here] - rows[root]).abs().max()) <= EQUAL_ENTRIES * float(size[root])
        if not same or left[here] // group.size != left[root] // group.size or not float(size[root]):
            continue
        first[here] = root
    for here, root in sorted(first.items()):
        unit, other = left[here], left[root]
        change = (logs[other] - logs[unit]).unsqueeze(0), (signs[other] * signs[unit]).unsqueeze(0)
        found.append((unit, other, tuple(float(_factor(site, *change)) for site in readers)))
    return found


def _fold(network: Network, one: Removal) -> str:
    """Add the contribution of a constant unit to the biases of the layers that read the unit."""
    for (name, site), value in zip(network.sites(one.group, reading=True), one.values, strict=True):
        if not value:
            continue
        found = bias_of(network, name, site)
        if found is None:
            return f"it is constant, but {name!r}, which reads it, has no bias that could take it up"
        bias, axis = found
        tensor, entries = network.params[name], network.entries(name, site)[one.unit]
        part = torch.zeros(tensor.numel(), dtype=tensor.dtype)
        part[entries] = tensor.flatten()[entries]
        others = [k for k in range(tensor.ndim) if k != axis]
        network.put({bias: network.params[bias] + value * part.reshape(tensor.shape).sum(others)})
    return ""


def _zeros(network: Network, group: Group) -> list[Tensor]:
    """Return a mask of all-zero units for each tensor that computes the units of a group."""
    return [
        (network.unit_entries(name, site, network.params) == 0).all(1)
        for name, site in network.sites(group.name, reading=False)
    ]


def _constants(network: Network, silent: Mapping[str, Tensor]) -> list[Removal]:
    """Return removals of units with zero weights and constant activation, with the constants that layers receive."""
    if not silent:
        return []
    names = _read_by_place(network, silent)
    wanted = {one for own in names.values() for one in own if one is not None}
    if not wanted:
        return []
    points = [network.params, *(_disturbed(network, silent, seed) for seed in range(DRAWS))]
    runs = [[network.values(point, wanted, which) for which in (0, 1)] for point in points]
    found = []
    for group, units in silent.items():
        places = [name for name in names[group] if name is not None]
        if len(places) < len(names[group]) or not places:
            continue
        read = [[_ranges(network.found, group, name, both) for both in runs] for name in places]
        is_constant = units.clone()
        for one in (one for every in read for one in every):
            is_constant &= one.high - one.low <= CONSTANT_VARIATION * one.size
        for unit in is_constant.nonzero().flatten().tolist():
            means = [(float(now.low[unit] + now.high[unit]) / 2, now.size) for now, *_ in read]
            values = tuple(0.0 if abs(mean) <= CONSTANT_VARIATION * size else mean for mean, size in means)
            found.append(Removal(group, unit, "constant" if any(values) else "dead", values=values))
    return found


def _read_by_place(network: Network, groups: Mapping[str, Tensor]) -> dict[str, list[str | None]]:
    """Return, for each group, the names of the activations that its reading layers read."""
    result: dict[str, list[str | None]] = {}
    for group in groups:
        placed = {p.parameter for p in network.found.symmetry[group].placements}
        result[group] = [
            network.found.intermediate.source(name, placed) for name, _ in network.sites(group, reading=True)
        ]
    return result


class _Ranges(NamedTuple):
    """The smallest and the largest activation of each unit, and the largest magnitude in the layer (at least one)."""

    low: Float[Tensor, " units"]
    high: Float[Tensor, " units"]
    size: float


def _ranges(found: Activations, group: str, name: str, runs: Sequence[Mapping[str, Tensor]]) -> _Ranges:
    """Return the range of each unit's activation over several evaluations."""
    site = next(site for site in found.symmetry.sites[name] if site.group.name == group)
    every = torch.cat([unit_values(found.symmetry, name, site, run[name]).flatten(0, -2).double() for run in runs], 1)
    return _Ranges(every.amin(1), every.amax(1), max(float(every.abs().max()), 1.0))


def _disturbed(network: Network, silent: Mapping[str, Tensor], seed: int) -> Params:
    """Return random values for all tensors. The zeros of units with zero weights stay zero."""
    generator = torch.Generator().manual_seed(seed)
    params = perturb(network.params, {*network.symmetry.buffers}, generator)
    for name, tensor in params.items():
        if tensor.is_floating_point() and name not in network.symmetry.buffers and tensor.numel():
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            params[name] = noise * tensor.square().mean().sqrt()
    for group, units in silent.items():
        places = network.sites(group, reading=False)
        for (name, site), zeros in zip(places, _zeros(network, network.symmetry[group]), strict=True):
            flat = params[name].flatten().clone()
            flat[network.entries(name, site)[units & zeros]] = 0.0
            params[name] = flat.reshape(params[name].shape)
    return params


def _gauge(
    group: Group, places: Sequence[tuple[Site, Float[Tensor, "units values"]]]
) -> tuple[Float[Tensor, "units scales"], Int[Tensor, "units signs"]]:
    """Return the log scale and the sign of each unit, measured on its weights."""
    units = len(places[0][1])
    sizes = torch.stack([values.norm(dim=1) for _, values in places], 1)
    known = torch.where(sizes > 0, sizes, 1.0).log()
    exponents = torch.tensor([site.placement.scale for site, _ in places], dtype=torch.float64).reshape(len(places), -1)
    logs = known @ torch.linalg.pinv(exponents).mT if group.scales else torch.zeros(units, 0, dtype=torch.float64)
    signs = torch.ones(units, group.signs, dtype=torch.float64)
    solved: set[int] = set()
    for site, values in sorted(places, key=lambda place: sum(e % 2 for e in place[0].placement.sign)):
        open_families = [f for f, e in enumerate(site.placement.sign) if e % 2 and f not in solved]
        if len(open_families) == 1:
            leading = values.gather(1, values.abs().argmax(1, keepdim=True)).flatten().sign()
            leading = torch.where(leading == 0, 1.0, leading)
            signs[:, open_families[0]] = leading * _factor(site, logs[:, :0], signs)
            solved.add(open_families[0])
    return logs, signs


def _factor(site: Site, logs: Tensor, signs: Tensor) -> Float[Tensor, " units"]:
    """Return the factor by which scales and signs multiply each unit's entries along an axis of a tensor."""
    factor = torch.ones(len(signs), dtype=torch.float64)
    for family, exponent in enumerate(site.placement.scale[: logs.shape[1]]):
        factor = factor * (exponent * logs[:, family]).exp()
    for family, exponent in enumerate(site.placement.sign):
        factor = factor * signs[:, family] ** (exponent % 2)
    return factor
