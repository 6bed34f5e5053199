"""Lineages of many networks of one architecture: pairwise distances, families of related networks, and trees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.comparison.averages import Average, find_averages
from regauge.comparison.comparison import Comparison
from regauge.comparison.trees import Branch, grow_tree, join_neighbors
from regauge.core.families import connected
from regauge.core.progress import Progress, no_progress

RELATED = ("identical", "same network in another gauge", "descended")
"""Verdicts on pairs that belong into one tree."""


@dataclass(frozen=True)
class Lineage:
    """Networks, compared pair by pair.

    Attributes:
        names: The names of the networks.
        pairs: The comparison of each pair that can be compared, by the two names in the order of `names`.
        distances: Modulo the group, relative to the norm of the first of the pair, as far as it is compared; NaN for
            pairs that cannot be. Where all networks are in memory and of one shape, they are measured where the first
            network is balanced, and do not depend on where the networks are on their orbits.
        families: Names of networks that are related, directly or through other networks, in their order. Each unrelated
            network is a family of one.
        averages: The networks that are averages of other networks, by their weights or by provenance.
        trees: For each part of a family that is related without averages, of two or more, its branches; lengths are
            squares of these relative distances. Where norms are known, branches have a support; see `grow_tree`. An
            average has no place in a tree: it descends from several.
    """

    names: tuple[str, ...]
    pairs: Mapping[tuple[str, str], Comparison]
    distances: Float64[Tensor, "n n"]
    families: tuple[tuple[str, ...], ...]
    averages: tuple[Average, ...]
    trees: tuple[tuple[Branch, ...], ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of a table of the pairs."""
        return [
            {
                "a": a,
                "b": b,
                "verdict": found.verdict,
                "distance": found.relative_distance,
                "explained": found.share_after,
                "p-value": found.p_value,
                "compared": found.compared,
            }
            for (a, b), found in self.pairs.items()
        ]


def compare_many(
    names: list[str],
    compare: Callable[[str, str], Comparison | None],
    *,
    parents: Mapping[str, Sequence[str]] = MappingProxyType({}),
    progress: Progress = no_progress,
) -> Lineage:
    """Compare all pairs of networks, and build a tree of each family of related networks.

    Args:
        names: The names of the networks.
        compare: Compares two networks, as `rg.compare` does; returns None for a pair that cannot be compared.
        parents: For each network whose provenance names others of these networks as parents, the names of the parents.
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
    squares, norms_of = distances.clone(), {name: list[float]() for name in names}
    known = [_balanced(found) for found in pairs.values()]
    norms = [norm for _, norm, _ in filter(None, known) if norm]
    size = sum(norms) / len(norms) if norms else 0.0
    for ((first, second), found), balanced in zip(pairs.items(), known, strict=True):
        i, j = names.index(first), names.index(second)
        distance, relative = found.orbit_distance, found.relative_distance
        if all(known) and balanced is not None:
            distance, relative = balanced[0], balanced[0] / size if size else 0.0
            norms_of[first].append(balanced[1])
            norms_of[second].append(balanced[2])
        distances[i, j] = distances[j, i] = relative
        squares[i, j] = squares[j, i] = distance**2 if found.compared == 1 else torch.nan
    related = [pair for pair, found in pairs.items() if found.verdict in RELATED]
    told = {child: [one for one in own if one in names] for child, own in parents.items() if child in names}
    averages = find_averages(names, squares, {name for pair in related for name in pair}, told)
    made = [(one.child, parent) for one in averages for parent in one.parents]
    families = _families(names, [*related, *made, *((child, one) for child, own in told.items() for one in own)])
    mixed = {one.child for one in averages}
    rest = [name for name in names if name not in mixed]
    trees = []
    for family in _families(rest, [pair for pair in related if not mixed & {*pair}]):
        if len(family) > 1:
            own = torch.tensor([names.index(name) for name in family])
            lengths = distances[own][:, own].square()
            lengths = lengths.where(~lengths.isnan(), lengths.nan_to_num().max())  # Relatives by way of others.
            sizes = torch.tensor([max(norms_of[name], default=0.0) for name in family], dtype=torch.float64)
            is_measured = len(family) > 3 and bool(sizes.min() > 0) and not distances[own][:, own].isnan().any()
            tree = grow_tree(list(family), lengths, sizes) if is_measured else join_neighbors(list(family), lengths)
            trees.append(tuple(tree))
    return Lineage(tuple(names), pairs, distances, tuple(families), averages, tuple(trees))


def _balanced(found: Comparison) -> tuple[float, float, float] | None:
    """Return the distance where the first network is balanced, and norms there; nothing is between equal networks."""
    return (0.0, 0.0, 0.0) if found.verdict == "identical" and found.balanced is None else found.balanced


def _families(names: list[str], pairs: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return the names that pairs connect, directly or by way of others, in their order."""
    parts = connected([*({name} for name in names), *pairs])
    found = (tuple(name for name in names if name in part) for part in parts)
    return sorted(found, key=lambda family: names.index(family[0]))
