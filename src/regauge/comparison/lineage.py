"""Lineages of many networks of one architecture: pairwise distances, families of related networks, and trees."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.comparison.averages import Average, find_averages
from regauge.comparison.comparison import Comparison
from regauge.comparison.one_gauge import in_one_gauge
from regauge.comparison.trees import Branch, grow_tree, join_neighbors
from regauge.core.families import connected
from regauge.core.progress import Progress, no_progress

COPIES = ("identical", "same network in another gauge")
"""The verdicts for two copies of one network."""
RELATED = (*COPIES, "descended")
"""The verdicts that put two networks into one tree."""


@dataclass(frozen=True)
class Lineage:
    """The pairwise comparisons of several networks, and the trees of related networks.

    Attributes:
        names: The names of the compared networks.
        pairs: The comparison of each pair that can be compared. Each key consists of the two names in the order of
            `names`.
        distances: The distances up to symmetry, relative to the norm of the compared part of the first network; NaN for
            pairs that cannot be compared. If all networks are in memory and have one shape, distances are measured
            after the first network is balanced. Distances between balanced networks do not depend on the scales of the
            networks.
        families: The families, each a tuple of networks that are related directly or through other networks. Each
            unrelated network forms a family of one.
        averages: The networks that are averages of other networks, according to their weights or their provenance.
        trees: For each family with at least two networks that are not averages: the branches of its tree. Branch
            lengths are squares of the relative distances. If the networks were read, each branch leads from a parent to
            its child and has a support; see `grow_tree`. In trees of parents and children, an average is a child of the
            parent with the largest weight. If the networks were not read, neighbor joining computes the tree without
            averages.
    """

    names: tuple[str, ...]
    pairs: Mapping[tuple[str, str], Comparison]
    distances: Float64[Tensor, "n n"]
    families: tuple[tuple[str, ...], ...]
    averages: tuple[Average, ...]
    trees: tuple[tuple[Branch, ...], ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return a table of the pairs, as rows."""
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
    read: Callable[[str], Mapping[str, Tensor]] | None = None,
    progress: Progress = no_progress,
) -> Lineage:
    """Compare all pairs of networks, and build a tree for each family of related networks.

    Args:
        names: The names of the networks.
        compare: A function that compares two networks as `rg.compare` does. The function returns None for pairs that
            cannot be compared.
        parents: For each network, the names of those other networks that its provenance names as parents.
        read: A function that returns a network. Without `read`, trees are computed only from the distances of pairs.
        progress: A function that shows how many pairs are done.

    Raises:
        ValueError: There are fewer than two networks, or a name occurs twice.
    """
    count = len(names)
    if count < 2 or len({*names}) < count:
        raise ValueError(f"a comparison needs two or more networks with different names; these are {names}")
    advance = progress("comparing pairs", count * (count - 1) // 2)
    pairs: dict[tuple[str, str], Comparison] = {}
    distances = torch.full((count, count), torch.nan, dtype=torch.float64).fill_diagonal_(0)
    for first, second in combinations(names, 2):
        found = compare(first, second)
        if found is not None:
            pairs[first, second] = found
        advance()
    squares = distances.clone()
    known = [_balanced(found) for found in pairs.values()]
    norms = [norm for _, norm, _ in filter(None, known) if norm]
    size = sum(norms) / len(norms) if norms else 0.0
    for ((first, second), found), balanced in zip(pairs.items(), known, strict=True):
        i, j = names.index(first), names.index(second)
        distance, relative = found.orbit_distance, found.relative_distance
        if all(known) and balanced is not None:
            distance, relative = balanced[0], balanced[0] / size if size else 0.0
        distances[i, j] = distances[j, i] = relative
        squares[i, j] = squares[j, i] = distance**2 if found.compared == 1 else torch.nan
    related = [pair for pair, found in pairs.items() if found.verdict in RELATED]
    told = {child: [one for one in own if one in names] for child, own in parents.items() if child in names}
    bonds = [*related, *((child, one) for child, own in told.items() for one in own)]
    twins = {frozenset(pair) for pair, found in pairs.items() if found.verdict in COPIES}
    averages = tuple(
        average
        for family in _families(names, bonds)
        for average in _averages(family, names, squares, {name for pair in related for name in pair}, told, twins)
    )
    made = [(one.child, parent) for one in averages for parent in one.parents]
    families = _families(names, [*bonds, *made])
    mixed = {one.child for one in averages}
    rest = [name for name in names if name not in mixed]
    trees = []
    for family in _families(rest, [pair for pair in related if not mixed & {*pair}]):
        if len(family) > 1:
            own = torch.tensor([names.index(name) for name in family])
            lengths = distances[own][:, own].square()
            lengths = lengths.where(~lengths.isnan(), lengths.nan_to_num().max())  # related through others
            mixes = [one for one in averages if {*one.parents} & {*family}]
            whole = [name for name in names if name in {*family, *(one.child for one in mixes)}]
            tree = None if read is None or not size else _grow(whole, read, pairs, mixes, size)
            trees.append(tuple(tree or join_neighbors(list(family), lengths)))
    return Lineage(tuple(names), pairs, distances, tuple(families), averages, tuple(trees))


def _grow(
    names: list[str],
    read: Callable[[str], Mapping[str, Tensor]],
    pairs: Mapping[tuple[str, str], Comparison],
    averages: Sequence[Average],
    size: float,
) -> list[Branch] | None:
    """Return the tree of a family whose networks are all aligned to common coordinates, or None if this is
    impossible.
    """
    found = {pair: pairs[pair] for pair in combinations(names, 2) if pair in pairs}
    larger = {first for (first, _), one in found.items() if one.compared < 1}
    known = [_balanced(one) for one in found.values()]
    if len(found) < len(names) * (len(names) - 1) // 2 or not all(known):
        return None
    names = sorted(names, key=larger.__contains__)  # Networks with fewer entries come first.
    distances = torch.zeros(len(names), len(names), dtype=torch.float64)
    for (first, second), one in zip(found, known, strict=True):
        i, j = names.index(first), names.index(second)
        distances[i, j] = distances[j, i] = 0.0 if one is None else one[0]
    points = in_one_gauge(names, read, next(iter(found.values())).symmetry, distances)
    tree = None if points is None else grow_tree(points, averages)
    return tree and [replace(one, length=one.length / size**2) for one in tree]


def _averages(
    family: Sequence[str],
    names: Sequence[str],
    squares: Float64[Tensor, "n n"],
    related: Collection[str],
    told: Mapping[str, Sequence[str]],
    twins: Collection[Collection[str]],
) -> tuple[Average, ...]:
    """Return the networks in a family that are averages of other networks.

    Distances to unrelated networks are not used, because they would disturb the weights.
    """
    own = torch.tensor([names.index(name) for name in family])
    known = {child: parents for child, parents in told.items() if child in family}
    return find_averages(family, squares[own][:, own], {*related} & {*family}, known, twins)


def _balanced(found: Comparison) -> tuple[float, float, float] | None:
    """Return the distance between two balanced networks and their norms, or zeros if the networks are identical."""
    return (0.0, 0.0, 0.0) if found.verdict == "identical" and found.balanced is None else found.balanced


def _families(names: list[str], pairs: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return groups of names that are connected by pairs, directly or through other names, in the order of `names`."""
    parts = connected([*({name} for name in names), *pairs])
    found = (tuple(name for name in names if name in part) for part in parts)
    return sorted(found, key=lambda family: names.index(family[0]))
