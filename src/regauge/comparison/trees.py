"""Trees of networks: nearest common ancestors, and the lengths and certainty of the branches between them."""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from scipy.optimize import nnls
from torch import Tensor

CERTAIN = 0.9
"""The support from which a branch counts as certain."""
DRAWN = 0.5
"""The support above which a branch is drawn. Two drawn branches never contradict each other."""
ROUNDS = 6
"""The maximal number of alternations between fitting a tree and fitting the drift that all training runs share."""
CURVED = 8
"""The number of networks from which the drift that training runs share may be curved."""


@dataclass(frozen=True)
class Branch:
    """A branch from an ancestor to a network or to another ancestor.

    Attributes:
        parent: The endpoint nearer to the root.
        child: The other endpoint.
        length: The length of the branch, in the unit of the distances.
        support: The share of fitted tree models that contain the branch, or None if norms are not known. Branches to a
            single network, which every tree contains, also have support None.
    """

    parent: str
    child: str
    length: float
    support: float | None = None

    @property
    def is_certain(self) -> bool:
        """Return whether nearly all fitted tree models contain the branch, or all trees must contain it."""
        return self.support is None or self.support >= CERTAIN


def join_neighbors(names: list[str], distances: Float64[Tensor, "n n"]) -> list[Branch]:
    """Return the neighbor-joining tree, whose path lengths between networks approximate the distances.

    If the distances are path lengths of a tree, the result is this tree. Inner nodes are ancestors that are not among
    the networks. These ancestors are named "ancestor 1" and so on. A network that is itself an ancestor has a branch of
    length zero. For networks that were trained further from one another, pass *squared* distances. Different training
    runs take nearly orthogonal steps, so squared distances add up along the tree. The tree has no root. The branches
    are listed from the ancestor that was added last.

    Args:
        names: The names of two or more networks, without repetition.
        distances: The distances between all pairs, as a symmetric matrix.

    References:
        Saitou and Nei (1987), The neighbor-joining method; Studier and Keppler (1988) for the criterion.
    """
    if len(names) < 2 or len({*names}) < len(names):
        raise ValueError(f"a tree needs two networks or more with names of their own; these are {names}")
    nodes, known, branches = list(names), distances.double().clone(), list[Branch]()
    while len(nodes) > 2:
        n = len(nodes)
        sums = known.sum(1)
        criterion = (n - 2) * known - sums.unsqueeze(0) - sums.unsqueeze(1)
        criterion.fill_diagonal_(torch.inf)
        i, j = divmod(int(criterion.argmin()), n)
        first = float(known[i, j] / 2 + (sums[i] - sums[j]) / (2 * (n - 2)))
        parent = f"ancestor {len(names) - n + 1}"
        lengths = (first, float(known[i, j]) - first)
        branches += [Branch(parent, nodes[k], max(0.0, length)) for k, length in zip((i, j), lengths, strict=True)]
        others = [k for k in range(n) if k not in (i, j)]
        joined = (known[i, others] + known[j, others] - known[i, j]) / 2
        rest = known[others][:, others]
        known = torch.zeros(n - 1, n - 1, dtype=torch.float64)
        known[:-1, :-1], known[-1, :-1], known[:-1, -1] = rest, joined, joined
        nodes = [*(nodes[k] for k in others), parent]
    return [*branches, Branch(nodes[1], nodes[0], max(0.0, float(known[0, 1])))]


def grow_tree(names: list[str], squares: Float64[Tensor, "n n"], norms: Float64[Tensor, " n"]) -> list[Branch]:
    """Return the branches of the consensus of several tree models, and the share of models that contain each branch.

    Squared distances add up along a tree if training steps are orthogonal. However, training runs on one task share a
    drift. The distances are therefore `d_ij = path_ij + |c(t_i) - c(t_j)|^2` for a curve c of a training time t. Half
    of the models measure the time by squared norms, because training increases norms. The other half measure the time
    by the first principal coordinate of the distances. Each model fits a spanning tree of the networks and the drift
    alternately. The models differ in the measure of time, in the degree of the curve, in weights, and in whether a
    parent must be earlier. The branches that more than half of the models contain form the returned tree. The root of
    this tree is the network with the smallest norm. Branch lengths do not include the drift.

    Args:
        names: The names of four or more networks, without repetition.
        squares: The squared distances between all pairs, as a symmetric matrix.
        norms: The norms of the networks, in any unit.

    References:
        Prim (1957) for spanning trees, which are those of Chow and Liu (1968) where ancestors are among the networks;
        Margush and McMorris (1981), Consensus n-trees, for the majority rule.
    """
    known = squares.double().numpy()
    first = int(norms.argmin())
    votes, models = Counter[frozenset[int]](), 0
    pairs = np.triu_indices(len(names), 1)
    for clock in (norms.double().square().numpy(), _first_coordinate(known, norms)):
        degrees = (1, 2) if len(names) >= CURVED else (1,)
        for degree, is_ordered, power in itertools.product(degrees, (False, True), (0.5, 1.0)):
            drift = _drifts(clock, degree)[:, pairs[0], pairs[1]].T
            votes.update(_fit_spanning(known, clock, drift, pairs, is_ordered=is_ordered, power=power, first=first))
            models += 1
    kept = {side: count / models for side, count in votes.items() if count > DRAWN * models}
    drift = _drifts(norms.double().square().numpy(), degrees[-1])[:, pairs[0], pairs[1]].T
    return _hang(names, known[pairs], pairs, drift, kept, first)


def _first_coordinate(squares: np.ndarray, norms: Tensor) -> np.ndarray:
    """Return the first principal coordinate of networks, oriented from small to large norms."""
    center = np.eye(len(squares)) - 1 / len(squares)
    values, vectors = np.linalg.eigh(-center @ squares @ center / 2)
    found: np.ndarray = vectors[:, -1] * np.sqrt(max(float(values[-1]), 0.0))
    return found if found @ (norms - norms.mean()).numpy() >= 0 else -found


def _drifts(clock: np.ndarray, degree: int) -> np.ndarray:
    """Return squared distances between points on curves of a polynomial degree, `[curves, n, n]`.

    Positive sums of these matrices belong to further curves.
    """
    t = (clock - clock.mean()) / (clock.std() or 1.0)
    line: np.ndarray = t[:, None] - t
    if degree == 1:
        return line[None] ** 2
    bend = t**2 - t * (t**3).mean()
    bent = bend[:, None] - bend
    return np.stack([line**2, bent**2, (line + bent) ** 2, (line - bent) ** 2])


def _fit_spanning(
    squares: np.ndarray,
    clock: np.ndarray,
    drift: np.ndarray,
    pairs: tuple[np.ndarray, ...],
    *,
    is_ordered: bool,
    power: float,
    first: int,
) -> set[frozenset[int]]:
    """Return how the branches of the best-fitting spanning tree split the networks into two sides.

    Each split is given by its side without the first network.
    """
    wanted, rest = squares[pairs], squares.copy()
    weights = np.maximum(wanted, 1e-12 * wanted.max() + 1e-300) ** -power
    best, least, seen = np.zeros((0, len(squares)), bool), np.inf, set[bytes]()
    for _ in range(ROUNDS):
        below = _span(rest, clock if is_ordered else None)
        if below.tobytes() in seen:
            break
        seen.add(below.tobytes())
        table = np.hstack([below[:, pairs[0]].T != below[:, pairs[1]].T, drift])
        lengths, misfit = nnls(table * weights[:, None], wanted * weights)
        if misfit < least - 1e-9 * abs(misfit):
            best, least = below, misfit
        rest[pairs] = wanted - drift @ lengths[len(below) :]
        rest.T[pairs] = rest[pairs]
    sides = best ^ best[:, first : first + 1]
    return {frozenset(np.flatnonzero(side).tolist()) for side in sides if 1 < side.sum() < len(squares) - 1}


def _span(squares: np.ndarray, clock: np.ndarray | None) -> np.ndarray:
    """Return the nearest spanning tree: for each branch, a mask of the networks beyond it, `[n - 1, n]`.

    If a clock is given, each network except the first is joined to the nearest earlier network.
    """
    count = len(squares)
    order = [0] if clock is None else np.argsort(clock, kind="stable").tolist()
    parents = dict[int, int]()
    while len(parents) < count - 1:
        if clock is None:
            absent = [k for k in range(count) if k not in parents and k]
            near = squares[np.ix_(order, absent)]
            i, j = divmod(int(near.argmin()), len(absent))
            parents[absent[j]] = order[i]
            order.append(absent[j])
        else:
            k = len(parents) + 1
            parents[order[k]] = order[int(squares[order[k], order[:k]].argmin())]
    below = np.eye(count, dtype=bool)
    for child, parent in reversed(parents.items()):
        below[parent] |= below[child]
    return below[sorted(parents)]


def _hang(
    names: list[str],
    squares: np.ndarray,
    pairs: tuple[np.ndarray, ...],
    drift: np.ndarray,
    sides: dict[frozenset[int], float],
    first: int,
) -> list[Branch]:
    """Return the tree that consists of given splits, with lengths fitted together with the shared drift."""
    count = len(names)
    nodes = [frozenset(range(count)), *sorted(sides, key=len, reverse=True)]
    called = {node: f"ancestor {len(nodes) - k}" for k, node in enumerate(nodes)}
    ends = [*nodes[1:], *(frozenset([k]) for k in range(count))]
    table = np.array([[k in end for k in range(count)] for end in ends])
    lengths, _ = nnls(np.hstack([table[:, pairs[0]].T != table[:, pairs[1]].T, drift]), squares)
    branches = []
    for end, length in zip(ends, lengths[: len(ends)], strict=True):
        parent = min((node for node in nodes if end <= node and end != node), key=len)
        child = called[end] if end in called else names[min(end)]
        branches.append(Branch(called[parent], child, float(length), sides.get(end)))
    # The last branch names the root.
    return sorted(branches, key=lambda one: (one.parent == called[nodes[0]], one.child == names[first]))


def tree_lines(branches: list[Branch]) -> list[str]:
    """Return a tree as lines of text, each with a network or ancestor below its parent, and the branch length.

    The line of an uncertain branch ends with its support.
    """
    children: dict[str, list[Branch]] = {}
    for branch in branches:
        children.setdefault(branch.parent, []).append(branch)
    root = branches[-1].parent

    def lines(name: str, indent: str) -> list[str]:
        result = []
        own = sorted(children.get(name, []), key=lambda branch: branch.length)
        for k, branch in enumerate(own):
            is_last = k == len(own) - 1
            doubt = "" if branch.is_certain else f", uncertain: {branch.support:.0%}"
            result.append(f"{indent}{'└' if is_last else '├'}─ {branch.child}  ({branch.length:.3g}{doubt})")
            result += lines(branch.child, indent + ("   " if is_last else "│  "))
        return result

    return [root, *lines(root, "")]
