"""Networks that are pruned at their representatives, and written in the coordinates in which they were given."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regauge.core.chart import charted
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.pruning.network import Network

ROUNDING = 1e-12
"""Share of the largest entry of a tensor up to which entries are rounding, in float64."""


def take_representative(network: Network) -> dict[str, Tensor]:
    """Let a network take the values of its representative, and return its coordinates; none without translations.

    What is zero but for rounding is zero: nothing reads a unit whose weights hold only what a norm removes.
    """
    symmetry = network.symmetry.on_data
    if not symmetry.translations:
        return {}
    representative, coordinates = symmetry.split(network.params)
    for name in charted(symmetry) & representative.keys():
        tensor, size = representative[name], network.params[name].abs().max()
        representative[name] = torch.where(tensor.abs() <= ROUNDING * size, 0.0, tensor)
    network.take(representative)
    return coordinates


def join_again(
    params: Params, coordinates: Mapping[str, Tensor], given: Mapping[str, Tensor], symmetry: Symmetry
) -> Params:
    """Return a network at its representative in some coordinates; entries that are those given but for rounding are
    these."""
    if not coordinates:
        return params
    symmetry = symmetry.on_data
    joined = symmetry.join(params, coordinates)
    for name in charted(symmetry) & joined.keys():
        tensor, known = joined[name], given[name].to(joined[name])
        joined[name] = torch.where((tensor - known).abs() <= ROUNDING * known.abs().max(), known, tensor)
    return joined
