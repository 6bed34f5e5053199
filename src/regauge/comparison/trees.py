"""Trees of networks: the parent of each network, and the lengths and certainty of the branches between them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from regauge.comparison.averages import Average
from regauge.comparison.verdicts import MOVED

CERTAIN = 0.95
"""A branch with at least this support counts as certain."""
RESAMPLES = 100
"""The number of samples of weights for which a tree is built."""
DROPPED = 6
"""Each sample leaves out some networks: the number of networks divided by this number, rounded down."""
ORTHOGONAL = 0.5
"""The root is an ancestor of its neighbors only if the squared norm of some neighbor is larger, by at least this
fraction of the squared distance. If a training step is orthogonal to the weights, the squared norm grows by the whole
squared distance."""
MIXED = 1.25
"""A network descends from an average only if its squared distance from the average is at most this multiple of its
squared distance from a source of the average. Without drift, the average is nearer."""
CHANCE = 3.0
"""The growth of a norm has full weight if it is at least this multiple of the growth that occurs by chance."""
NEARLY = 0.3
"""A branch may be replaced by another branch with at least this fraction of its conductance."""
FIRM = 1.0
"""In the choice of a tree, the weight of the logarithm of a branch's conductance, relative to one branch along which
the norm grows."""
JITTER = 1e-10
"""The variance that is added to each network, relative to the mean squared distance, because the distance of copies
must not be zero."""


@dataclass(frozen=True)
class Branch:
    """A branch from a parent to a child. Parent and child are networks, or ancestors that are not among the networks.

    Attributes:
        parent: The endpoint nearer to the root.
        child: The endpoint farther from the root.
        length: The length, in the unit of the distances.
        support: The fraction of the sampled trees (each computed from a random sample of the weights) in which the
            child has this parent. The support is 1 for copies, averages and pruned networks. If several networks may be
            the original of a pruned network, the support is 1 divided by their number. The support is None if the
            weights were not sampled, as in `join_neighbors`.
        is_copy: Whether parent and child are equal up to rounding. If parent and child are equal, either of the two
            networks may be the original.
    """

    parent: str
    child: str
    length: float
    support: float | None = None
    is_copy: bool = False

    @property
    def is_certain(self) -> bool:
        """Return whether nearly all samples of the weights contain the branch."""
        return self.support is not None and self.support >= CERTAIN


@dataclass(frozen=True)
class Points:
    """Related networks as points in common coordinates, as `in_one_gauge` returns them.

    Attributes:
        names: The names of the networks.
        products: The inner products of the networks in blocks of entries. Summed over blocks, the inner products are
            the Gram matrix.
        tensors: For each block, the index of the tensor that contains the block.
        pruned: For each pair of networks, whether the second equals the first with some entries set to zero.
        rounding: For each network, the distance by which rounding of its stored entries moves it.
        entries: The number of entries that are compared.
        sizes: The number of all entries of each network, including entries that other networks lack.
    """

    names: Sequence[str]
    products: Float64[Tensor, "blocks n n"]
    tensors: Int64[Tensor, " blocks"]
    pruned: Bool[Tensor, "n n"]
    rounding: Float64[Tensor, " n"]
    entries: int
    sizes: Sequence[int]


def join_neighbors(names: list[str], distances: Float64[Tensor, "n n"]) -> list[Branch]:
    """Return the neighbor-joining tree, in which the lengths of paths between networks approximate distances.

    If the distances are path lengths of a tree, the result is that tree. Inner nodes are ancestors that are not among
    the networks. Inner nodes are named "ancestor 1" and so on. A network that is itself an ancestor has a branch of
    length zero. If some networks were trained further from other networks, pass *squared* distances. Different training
    runs take nearly orthogonal steps, so squared distances add up along the tree. The tree has no root. The branches
    are listed from the ancestor that was added last.

    Args:
        names: The names of two or more networks, without repetition.
        distances: The distances between all pairs, as a symmetric matrix.

    References:
        Saitou and Nei (1987), The neighbor-joining method; Studier and Keppler (1988) for the criterion.
    """
    if len(names) < 2 or len({*names}) < len(names):
        raise ValueError(f"a tree needs two or more networks with different names; these are {names}")
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


def grow_tree(points: Points, averages: Sequence[Average] = ()) -> list[Branch]:
    """Return the tree in which a branch leads to each network from its parent, with the support of each branch.

    Training changes a network by steps that are nearly independent of the steps of other networks, like a random walk
    along the tree. For independent steps, squared distances are lengths of paths. The path lengths are also the
    effective resistances of the tree as an electrical network. The pseudoinverse of the centered inner products is the
    Laplacian of this electrical network. The entry of the Laplacian for two networks is minus the conductance 1 /
    length of their branch, or zero if there is no branch. The branches are the spanning tree with the largest
    conductances. Training runs of one task also move in a common direction, which makes distances misleading, but
    changes conductances little.

    The root is the network for which most branches lead from smaller to larger norms, because training increases norms.
    The parent of a pruned network is the network that has the same entries wherever the pruned network is not zero.
    Pruned networks and averages may have children of their own, which were trained further. If the root is not older
    than its neighbors, a common ancestor that is not among the networks becomes the root. If another ancestor is not
    among the networks, its nearest relative takes its place in the tree.

    Branches are certain if they are in nearly all trees of samples. Each sample gives random weights to tensors and
    blocks of tensors, and leaves out some networks.

    Args:
        points: Two or more networks in one gauge. Among several copies, the first copy counts as the parent.
        averages: The networks that are averages of other networks. In the tree, an average is a child of the parent
            with the largest weight.

    References:
        Chow and Liu (1968) for spanning trees of networks as random variables; Klein and Randic (1993), Resistance
        distance; Felsenstein (1973) for random walks along trees; Rubin (1981), The Bayesian bootstrap.
    """
    numbers = {name: k for k, name in enumerate(points.names)}
    averaged = {numbers[one.child]: {numbers[n]: w for n, w in zip(one.parents, one.weights, strict=True)}
             for one in averages if one.child in numbers and {*one.parents} <= {*numbers}}  # fmt: skip
    products, pruned = points.products.numpy(), points.pruned.numpy().copy()
    whole = products.sum(0)
    squares = _squares(whole)
    originals = _originals(squares, np.diag(whole), points.rounding.numpy(), averaged)
    mixed = {k: weights for k, weights in averaged.items() if originals[k] == k}
    for k, averaged_ones in mixed.items():
        pruned[k, [*averaged_ones]] = False  # An average with a pruned copy has the same nonzero entries.
    uncut = {k: {originals[j] for j in np.flatnonzero(pruned[:, k]).tolist()}
             for k in numbers.values() if originals[k] == k and k not in mixed}  # fmt: skip
    cuts = {k: min(own, key=lambda j: (squares[j, k], j)) for k, own in uncut.items() if own}
    made = _Made({**{k: {parent: 1.0} for k, parent in cuts.items()}, **mixed}, originals)
    rest = [k for k in numbers.values() if originals[k] == k and k not in made.parents]
    parents, is_rooted = _find_parents(whole, rest, made, points.entries)
    votes, seen = dict.fromkeys(parents, 0), dict.fromkeys(parents, 0)
    source = torch.Generator().manual_seed(0)
    order = sorted(rest, key=lambda k: points.names[k])
    for _ in range(RESAMPLES if len(rest) > 1 else 0):
        drawn = [torch.empty(len(products), dtype=torch.float64).exponential_(generator=source) for _ in range(2)]
        weights = (drawn[0] * drawn[1][points.tensors]).numpy()
        left_out = torch.randperm(len(order), generator=source)[: len(order) // DROPPED].tolist()
        kept = [k for place, k in enumerate(order) if place not in left_out]
        found, _ = _find_parents(np.tensordot(weights, products, 1), kept, made, points.entries)
        for child, parent in parents.items():
            if child in kept and {*np.flatnonzero(made.sources[parent]).tolist()} <= {*kept}:
                seen[child] += 1
                votes[child] += found.get(child) == parent
    branches = [
        Branch(points.names[p], points.names[c], float(squares[p, c]), votes[c] / max(1, seen[c]))
        for c, p in parents.items()
    ]
    branches += [
        Branch(points.names[p], points.names[c], float(squares[p, c]), 1.0, is_copy=True)
        for c, p in enumerate(originals)
        if p != c
    ]
    for child, shares in made.parents.items():
        parent = max(shares, key=lambda k: shares[k])
        support = 1 / max(1, len(uncut.get(child, ())))
        branches.append(Branch(points.names[parent], points.names[child], float(squares[parent, child]), support))
    root = points.names[next(k for k in rest if k not in parents)]
    if not is_rooted:
        branches = _without_root(branches, root, {points.names[child] for child in parents})
        root = branches[-1].parent
    for place, one in enumerate(branches):
        own, size = numbers.get(one.parent), points.sizes[numbers[one.child]]
        # If only a copy of the parent has as many entries as the child, this copy becomes the parent.
        alike = [j for j, k in enumerate(originals) if k == own and points.sizes[j] == size]
        if alike and own not in alike and not one.is_copy:
            branches[place] = replace(one, parent=points.names[alike[0]])
    # The last branch leads from the root.
    return sorted(branches, key=lambda one: one.parent == root)


def _squares(products: np.ndarray) -> np.ndarray:
    """Return the squared distances of points, from their inner products."""
    norms = np.diag(products)
    found: np.ndarray = np.maximum(norms[:, None] + norms - 2 * products, 0.0)
    return found


def _originals(
    squares: np.ndarray, norms: np.ndarray, rounding: np.ndarray, mixed: dict[int, dict[int, float]]
) -> list[int]:
    """Return, for each network, the first network in the list that equals it up to rounding, which may be the network
    itself.
    """
    originals = list[int]()
    for k in range(len(squares)):
        noise = np.maximum(rounding[k] ** 2 + rounding[:k] ** 2, MOVED**2 * norms[k])
        same = [j for j in np.flatnonzero(squares[k, :k] <= noise).tolist() if originals[j] == j]
        same = [j for j in same if (k not in mixed[j] if j in mixed else k not in mixed)]
        originals.append(same[0] if same else k)
    return originals


class _Made:
    """The networks that were made of other networks without training: pruned networks and averages.

    Attributes:
        parents: For each network made without training, the weights of the networks of which it was made.
        cuts: For each pruned network, the network that was pruned.
        offsets: For each network that was pruned, the step to its pruned copy, as a weighted sum of networks.
        sources: For each network, the weights of the trained networks of which it was made, perhaps in several steps.
        origins: For each network made without training, the networks among its sources.
    """

    def __init__(self, parents: Mapping[int, Mapping[int, float]], originals: Sequence[int]) -> None:
        points = np.eye(len(originals))
        self.parents = parents
        self.cuts = {k: next(iter(own)) for k, own in parents.items() if len(own) == 1}
        self.offsets = [points[k] - points[parent] for k, parent in self.cuts.items()]
        steps = points[originals]
        for k, weights in parents.items():
            steps[k] = np.sum([weight * points[parent] for parent, weight in weights.items()], 0)
        self.sources: np.ndarray = np.linalg.matrix_power(steps, len(steps))
        self.origins = {k: {*np.flatnonzero(self.sources[k]).tolist()} for k in parents}

    def base(self, k: int) -> int:
        """Return the original of a pruned network, or the network with the largest weight in an average."""
        return int(self.sources[k].argmax())

    def as_a_walk(self, kept: list[int], above: Mapping[int, int]) -> np.ndarray:
        """Return the networks after shifts: each pruned or averaged network is shifted, with its descendants, to the
        network from which it was made.

        Each result is given as a weighted sum of networks.

        Args:
            kept: The networks of the tree.
            above: For each descendant of a made network, the nearest ancestor that is a made network.
        """
        own, base = np.eye(len(self.sources)), np.zeros_like(self.sources)
        for child, k in above.items():
            own[child, k] = -1
            base[child, self.base(k)] = 1
        moved = own
        for _ in {*above.values()}:
            moved = own + base @ moved
        found: np.ndarray = moved[kept]
        return found


def _find_parents(products: np.ndarray, kept: list[int], made: _Made, entries: int) -> tuple[dict[int, int], bool]:
    """Return the parent of each of some networks except the root, and whether the root is older than its neighbors.

    A network that was made without training (pruned or averaged) is not one training step away from its parents.
    Therefore a network made without training is shifted, with all its descendants, until it coincides with the network
    from which it was made. Shifts are applied as long as the training steps become more nearly independent.
    """
    squares = _squares(products)
    nearer = {(c, k) for k, parent in made.cuts.items() for c in kept if squares[c, k] < squares[c, parent]}
    above = dict[int, int]()
    best = _dependence(products, kept, above, made)
    while True:
        forward = {(made.base(k), child) for child, k in [*above.items(), *nearer]}
        parents, is_rooted = _orient(products, kept, above, made, forward, entries)
        trials = list[tuple[float, dict[int, int]]]()
        for child, parent in sorted(parents.items()):
            for k, own in made.origins.items():
                is_near = squares[child, k] < MIXED * squares[child, parent]
                is_possible = (child, k) in nearer if k in made.cuts else own <= {*kept}
                if parent in own and child not in own and is_near and is_possible:
                    branch = _below(child, parents, own)
                    new = {n: k for n in branch if n not in above or squares[n, k] < squares[n, above[n]]}
                    trials.append((_dependence(products, kept, above | new, made), above | new))
        score, trial = min(trials, key=lambda one: one[0], default=(best, above))
        if not score < best - 1e-9:  # also stops if the score is NaN
            break
        best, above = score, trial
    moved = {c: above[c] for c, p in parents.items() if c in above and above.get(p) != above[c]}
    return parents | moved, is_rooted


def _below(node: int, parents: Mapping[int, int], barred: Collection[int]) -> list[int]:
    """Return a node of a tree and its descendants, without the nodes in `barred` and their descendants."""
    found = [node]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one and child not in barred]
    return found


def _dependence(products: np.ndarray, kept: list[int], above: Mapping[int, int], made: _Made) -> float:
    """Return a measure of the dependence between the training steps of a tree. A common direction of all steps changes
    the measure little.

    The measure is computed from the inverse of the matrix of inner products of the steps. The measure is the logarithm
    of the product of the diagonal entries of the inverse matrix. The matrix has the same determinant for all trees, so
    the measure is smallest for independent steps. The steps from networks to their pruned copies are included.
    """
    walk = made.as_a_walk(kept, above)
    branches = span(_conductances(_squares(walk @ products @ walk.T)))
    steps = np.array([*(walk[b] - walk[a] for a, b in branches), *made.offsets]).reshape(-1, len(products))
    inside = steps @ products @ steps.T
    inside += JITTER * np.trace(inside) / max(1, len(inside)) * np.eye(len(inside))
    return float(np.log(np.diag(np.linalg.inv(inside))).sum())


def _orient(
    products: np.ndarray,
    kept: list[int],
    above: Mapping[int, int],
    made: _Made,
    forward: Collection[tuple[int, int]],
    entries: int,
) -> tuple[dict[int, int], bool]:
    """Return the parent of each network in a tree of training steps only, and whether the root is older than its
    neighbors.
    """
    moved = made.as_a_walk(kept, above)
    walk = moved @ products @ moved.T
    near, norms = _squares(walk), np.diag(walk)
    conductances = _conductances(near)
    places = {k: place for place, k in enumerate(kept)}
    known = {(places[a], places[b]) for a, b in forward if a in places}
    branches, root = _turn(span(conductances), conductances, _Time(walk, entries, known))
    parents, rest = dict[int, int](), [root]
    while rest:
        node = rest.pop()
        for pair in branches:
            if node in pair and (other := sum(pair) - node) != parents.get(node):
                parents[other] = node
                rest.append(other)
    first = [child for child, parent in parents.items() if parent == root]
    is_rooted = not first or any(
        norms[c] - norms[root] >= ORTHOGONAL * near[root, c] or (root, c) in known for c in first
    )
    return {kept[c]: kept[p] for c, p in parents.items()}, is_rooted


def _turn(
    branches: list[tuple[int, int]], conductances: np.ndarray, time: "_Time"
) -> tuple[list[tuple[int, int]], int]:
    """Return a tree, and its root. Branches are exchanged if the exchange makes norms grow along more branches and
    decreases conductances little.
    """
    best, root = time.find_root(branches)
    while True:
        better = None
        for near, far in np.argwhere(np.triu(conductances, 1) > 0).tolist():
            for cut in _path(branches, near, far):
                share = conductances[near, far] / conductances[cut]
                if share > NEARLY and (near, far) not in (cut, cut[::-1]):
                    other = _outward([one for one in branches if one != cut] + [(near, far)])
                    score, start = time.find_root(other)
                    gain = score - best + FIRM * float(np.log(share))
                    if gain > 1e-9 and (better is None or gain > better[0]):
                        better = gain, score, other, start
        if better is None:
            return branches, root
        _, best, branches, root = better


def _outward(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the branches of a tree, each directed away from point 0."""
    found, inside, rest = list[tuple[int, int]](), {0}, list(pairs)
    while rest:
        one = next(one for one in rest if inside & {*one})
        rest.remove(one)
        found.append(one if one[0] in inside else one[::-1])
        inside |= {*one}
    return found


def _path(branches: list[tuple[int, int]], a: int, b: int) -> list[tuple[int, int]]:
    """Return the branches between two points of a tree whose branches lead outward from point 0."""
    above = {far: near for near, far in branches}
    ways = list[set[tuple[int, int]]]()
    for node in (a, b):
        ways.append(set())
        while node in above:
            ways[-1].add((above[node], node))
            node = above[node]
    return sorted(ways[0] ^ ways[1])


@dataclass(frozen=True)
class _Time:
    """The data that determine which end of a branch is the older one.

    Attributes:
        products: The inner products of the networks.
        entries: The number of entries of a network.
        forward: Branches whose older end is known.
    """

    products: np.ndarray
    entries: int
    forward: Collection[tuple[int, int]]

    def find_root(self, branches: list[tuple[int, int]]) -> tuple[float, int]:
        """Return the root of a tree, and the number of branches with growing norms minus the number with shrinking
        norms.

        The root is the point from which norms grow and steps have a common direction. A small step changes the norm by
        chance, so a short branch has less weight.
        """
        inner, outer = np.array(branches, int).reshape(-1, 2).T
        both = np.eye(len(self.products))[outer] - np.eye(len(self.products))[inner]
        inside = both @ self.products @ both.T
        lengths = np.maximum(np.diag(inside), np.finfo(float).tiny)
        norms = np.diag(self.products)
        chance = 2 * np.sqrt(np.maximum(norms[inner], norms[outer]) / lengths / self.entries)
        growth = ((norms[outer] - norms[inner]) / lengths).clip(-1, 1) * np.minimum(1, 1 / (CHANCE * chance))
        cosines = inside / np.sqrt(np.outer(lengths, lengths))
        np.fill_diagonal(cosines, 0.0)
        signs = np.ones((len(self.products), len(branches)))
        for k, (near, far) in enumerate(branches):
            signs[far] = signs[near]
            signs[far, k] = -1
            if {(near, far), (far, near)} & {*self.forward}:
                growth[k] = len(branches) * (1 if (near, far) in self.forward else -1)
        scores = signs @ growth + (signs @ cosines * signs).sum(1) / 2
        root = int(scores.argmax())
        return float(signs[root] @ growth), root


def _conductances(squares: np.ndarray) -> np.ndarray:
    """Return the conductances of the electrical network whose effective resistances are the given squared distances."""
    count = len(squares)
    noisy = squares + JITTER * squares.mean() * (1 - np.eye(count))
    center = np.eye(count) - 1 / count
    found: np.ndarray = np.linalg.pinv(center @ noisy @ center / 2, rcond=1e-14, hermitian=True)
    np.fill_diagonal(found, 0.0)
    return found


def span(weights: np.ndarray) -> list[tuple[int, int]]:
    """Return the branches of the spanning tree with the largest weights, from the first point outward."""
    inside, branches = [0], list[tuple[int, int]]()
    while len(inside) < len(weights):
        outside = [k for k in range(len(weights)) if k not in inside]
        i, j = divmod(int(weights[np.ix_(inside, outside)].argmax()), len(outside))
        branches.append((inside[i], outside[j]))
        inside.append(outside[j])
    return branches


def _without_root(branches: list[Branch], root: str, trained: Collection[str]) -> list[Branch]:
    """Return a tree in which the root and its trained neighbors have a common parent that is not among the networks."""
    own = [one for one in branches if one.parent == root and one.child in trained]
    first = Branch("ancestor 1", root, 0.0, max(one.support or 0.0 for one in own))
    moved = [Branch("ancestor 1", one.child, one.length, one.support) for one in own]
    return [*(one for one in branches if one not in own), *moved, first]


def tree_lines(branches: list[Branch]) -> list[str]:
    """Return a tree as lines of text: each network or ancestor below its parent, with the length of its branch.

    The line of an uncertain branch also shows its support, if the support is known. Copies are marked.
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
            known = "" if branch.support is None else f": {branch.support:.0%}"
            doubt = "" if branch.is_certain else f", uncertain{known}"
            doubt = ", a copy, or the original" if branch.is_copy else doubt
            result.append(f"{indent}{'└' if is_last else '├'}─ {branch.child}  ({branch.length:.3g}{doubt})")
            result += lines(branch.child, indent + ("   " if is_last else "│  "))
        return result

    return [root, *lines(root, "")]
