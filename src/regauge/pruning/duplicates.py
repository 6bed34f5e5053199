"""Duplicate units, which compute the same as another unit up to the signs and scales of their group."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regauge.core.act import Site
from regauge.core.groups import Group
from regauge.pruning.network import Network

EQUAL_ENTRIES = 1e-12
"""Largest difference of equal entries, relative to the largest entry of a unit."""


def find_duplicates(network: Network, group: Group, left: Sequence[int]) -> list[tuple[int, int, tuple[float, ...]]]:
    """Return units that equal an earlier unit of the same copy up to scale and sign.

    Args:
        network: The network.
        group: The name of the group.
        left: The indices of the units that are compared, copy by copy.

    Returns:
        The unit, its earlier duplicate, and a factor for each place that reads them. The weights of the unit are
        multiplied by this factor when they are added to the weights of the duplicate.
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


def _gauge(
    group: Group, places: Sequence[tuple[Site, Float[Tensor, "units values"]]]
) -> tuple[Float[Tensor, "units scales"], Int[Tensor, "units signs"]]:
    """Return the logarithm of the scale and the sign of each unit, which move as the group moves the unit."""
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
    """Return the factor by which scales and signs multiply each unit's values at a site."""
    factor = torch.ones(len(signs), dtype=torch.float64)
    for family, exponent in enumerate(site.placement.scale[: logs.shape[1]]):
        factor = factor * (exponent * logs[:, family]).exp()
    for family, exponent in enumerate(site.placement.sign):
        factor = factor * signs[:, family] ** (exponent % 2)
    return factor
