"""Pruning of representatives (networks without translations and gains). Results are transformed to the coordinates of
the given networks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from regauge.core.chart import charted
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.pruning.network import Network

ROUNDING = 1e-12
"""A share of a tensor's largest entry. Smaller entries count as rounding errors in float64."""


def take_representative(network: Network) -> dict[str, Tensor]:
    """Replace the tensors of a network by the tensors of its representative, and return the coordinates of the network.

    Entries that are zero up to rounding become exactly zero. A unit therefore counts as unread if the weights that read
    it contain only components that a norm removes.
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
    """Return a representative, transformed to the given coordinates.

    Entries that equal the given network's entries up to rounding are replaced by the given network's entries.
    """
    if not coordinates:
        return params
    symmetry = symmetry.on_data
    joined = symmetry.join(params, coordinates)
    for name in charted(symmetry) & joined.keys():
        tensor, known = joined[name], given[name].to(joined[name])
        joined[name] = torch.where((tensor - known).abs() <= ROUNDING * known.abs().max(), known, tensor)
    return joined
