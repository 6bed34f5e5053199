"""Scrambled networks ("strangers"), in which a separate random element acts on each tensor: a control."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment import align_pairs
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.comparison.common import restrict
from regauge.comparison.pair import Pair, measure_shares
from regauge.comparison.verdicts import by_chance
from regauge.core.element import Element
from regauge.core.families import move_tensor
from regauge.core.interpolation import mean_share
from regauge.core.params import Params
from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry

STRANGERS = 4
"""The number of scrambled networks that measure the share by chance for small networks.

For large networks, one scrambled network is enough, because the share by chance is small.
"""
SMALL = 1 << 14
"""The largest number of entries of a network that counts as small."""


def estimate_chance(
    b: Mapping[str, Tensor], symmetry: Symmetry, pair: Callable[[Params], tuple[Params, Params]], behind: Symmetry
) -> float | None:
    """Estimate the share by chance: the explained share that alignment reaches with scrambled copies.

    Args:
        b: The network that is scrambled.
        symmetry: The symmetry of the network `b`.
        pair: A function that returns the first network and a scrambled copy, as they are compared.
        behind: The symmetry of the compared pairs.
    """
    seeds = range(STRANGERS if sum(tensor.numel() for tensor in b.values()) <= SMALL else 1)
    return by_chance(explain([pair(stranger_of(b, symmetry, seed)) for seed in seeds], behind))


def explain(pairs: Sequence[tuple[Params, Params]], symmetry: Symmetry) -> list[float | None]:
    """Return the mean explained share (squared correlation) of the matrices of each pair of networks after alignment.

    All pairs are aligned at once. The tensors of a single pair are not copied, because they may be large.
    """
    first, second = (
        {n: torch.stack([one[n] for one in side]) if len(side) > 1 else side[0][n].unsqueeze(0) for n in side[0]}
        for side in zip(*pairs, strict=True)
    )
    found = align_pairs(first, second, symmetry, method=WeightMatching()).element
    return [mean_share(measure_shares(Pair(*pair, symmetry), found.item(k))) for k, pair in enumerate(pairs)]


def stranger_of(params: Mapping[str, Tensor], symmetry: Symmetry, seed: int) -> Params:
    """Return a scrambled copy of a network.

    A separate random permutation, with signs and rotations, acts on each tensor.

    Scrambling removes the correspondence of units between tensors. After alignment, the explained share is still
    positive, because alignment chooses the best of many elements.
    """
    return {name: scramble(symmetry, name, tensor, seed) for name, tensor in params.items()}


def scramble(symmetry: Symmetry, name: str, tensor: Tensor, seed: int) -> Tensor:
    """Return one tensor after a random permutation, random signs and random rotations of its units."""
    if name not in symmetry.sites:
        return tensor
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))  # torch's CPU generator reads 32 bits
    element = _acting_on(symmetry, name).random(generator, ("permutation", "sign", "linear"))
    return move_tensor(symmetry, _without_stretching(symmetry, element), name, tensor)


@remembered
def _acting_on(symmetry: Symmetry, name: str) -> Symmetry:
    """Return the symmetry with only the groups that act on one tensor, and their bases."""
    return restrict(symmetry, {name: symmetry.shapes[name]})


def _without_stretching(symmetry: Symmetry, element: Element) -> Element:
    """Return the element in which the nearest rotation replaces each invertible matrix."""
    for name, value in element.items():
        if value.matrix is not None and symmetry[name].matrix == "linear":
            u, _, vh = torch.linalg.svd(value.matrix)
            element = element.replace(name, replace(value, matrix=u @ vh))
    return element
