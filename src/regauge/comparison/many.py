"""Many networks of one architecture: how near each pair is, which are related, and trees of those that are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.comparison.comparison import Comparison
from regauge.comparison.trees import Branch, join_neighbors
from regauge.core.families import connected
from regauge.core.progress import Progress, no_progress

RELATED = ("identical", "same network in another gauge", "descended")
"""Verdicts on pairs that belong into one tree."""


@dataclass(frozen=True)
class Lineage:
    """Networks, compared pair by pair.

    Attributes:
        names: Of the networks.
        pairs: The comparison of each pair that can be compared, by both names in their order.
        distances: Modulo the group, relative to the norm of the first of the pair, as far as it is compared; NaN for
            pairs that cannot be.
        families: Names of networks that are related, directly or by way of others, in their order; strangers alone.
        trees: For each family of two or more its branches; lengths are squares of these relative distances.
    """

    names: tuple[str, ...]
    pairs: Mapping[tuple[str, str], Comparison]
    distances: Float64[Tensor, "n n"]
    families: tuple[tuple[str, ...], ...]
    trees: tuple[tuple[Branch, ...], ...]


def compare_many(
    names: list[str], compare: Callable[[str, str], Comparison | None], *, progress: Progress = no_progress
) -> Lineage:
    """Compare all pairs of networks, and make a tree of each family of related ones.

    Args:
        names: Of the networks.
        compare: Compares two of them, as `rg.compare` does; None for a pair that cannot be compared.
        progress: Counts pairs.

    Raises:
        ValueError: There are fewer than two networks, or names are repeated.
    """
    count = len(names)
    if count < 2 or len({*names}) < count:
        raise ValueError(f"two networks or more with names of their own are compared; these are {names}")
    advance = progress("comparing pairs", count * (count - 1) // 2)
    pairs: dict[tuple[str, str], Comparison] = {}
    distances = torch.full((count, count), torch.nan, dtype=torch.float64).fill_diagonal_(0)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            found = compare(first, second)
            if found is not None:
                pairs[first, second] = found
            advance()
    for (first, second), found in pairs.items():
        i, j = names.index(first), names.index(second)
        distances[i, j] = distances[j, i] = found.orbit_distance / found.norm if found.norm else 0.0
    related = [pair for pair, found in pairs.items() if found.verdict in RELATED]
    parts = connected([*({name} for name in names), *related])
    families = sorted(
        (tuple(name for name in names if name in part) for part in parts), key=lambda f: names.index(f[0])
    )
    trees = []
    for family in (family for family in families if len(family) > 1):
        own = torch.tensor([names.index(name) for name in family])
        squares = distances[own][:, own].square()
        squares = squares.where(~squares.isnan(), squares.nan_to_num().max())  # Relatives by way of others.
        trees.append(tuple(join_neighbors(list(family), squares)))
    return Lineage(tuple(names), pairs, distances, tuple(families), tuple(trees))
