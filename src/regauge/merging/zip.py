"""Greedy merging of units by their similarity, within and across networks, as ZipIt does."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def zip_units(similarity: Floats, owners: Integers, target: int, *, alpha: float, beta: float) -> Integers:
    """Merge units until `target` clusters are left, always the most similar two that may be merged.

    The similarity of a new cluster to any other is the smaller one of its parts'. It is multiplied by alpha, where it
    is positive, once the cluster has units of all networks or several of one: of two networks, always.
    At most the share beta of all merges may put two units of one network into one cluster; more only where nothing
    else is left to merge.

    Each merge costs time linear in the number of units, since the best partner of every cluster is kept: similarities
    never grow, so that only clusters whose partner was merged are searched again.

    Departures from the paper: negative similarities are not multiplied by alpha, which would raise them; and clusters
    of three networks or more are complete before alpha holds them back, so that copies of one network find together.

    Args:
        similarity: `[units, units]`, symmetric; the diagonal does not count.
        owners: The network of each unit, `[units]`.
        target: How many clusters are wanted.
        alpha: From 0 (merged units come last) to 1 (they are treated like all others).
        beta: From 0 (never within a network) to 1 (no limit).

    Returns:
        The cluster of each unit, `[units]`, below `target`. A cluster with units of the first network has the place
        of one of them, the first; the others take the places that are left, in order.

    References:
        Stoica et al. (2024), ZipIt! Merging models from different tasks without training, section 4 and appendix C.
    """
    state = _Clusters(similarity, owners, alpha)
    merges = len(owners) - target
    budget = int(np.floor(beta * merges + 1e-9))
    state.forbid_within(budget == 0)
    for _ in range(merges):
        i, j = state.best_pair()
        if i < 0:
            state.forbid_within(False)
            i, j = state.best_pair()
        budget -= state.merge(i, j)
        state.forbid_within(budget <= 0)
    return _places(state.labels, owners, target)


class _Clusters:
    """Similarities of clusters, and for each the best partner that it may be merged with."""

    def __init__(self, similarity: Floats, owners: Integers, alpha: float) -> None:
        self.labels = np.arange(len(owners))
        self._similarity = np.array(similarity, dtype=np.float64)
        self._members = owners[:, None] == np.arange(int(owners.max()) + 1)
        self._has_several = np.zeros(len(owners), dtype=bool)
        self._is_alive = np.ones(len(owners), dtype=bool)
        self._alpha = alpha
        self._is_strict: bool | None = None
        self._partner = np.zeros(len(owners), dtype=np.int64)
        self._value = np.full(len(owners), -np.inf)

    def forbid_within(self, is_strict: bool) -> None:
        """Whether clusters that share a network may no longer be merged."""
        if is_strict != self._is_strict:
            self._is_strict = is_strict
            self._search(np.flatnonzero(self._is_alive))

    def best_pair(self) -> tuple[int, int]:
        """The most similar two clusters, the smaller index first; -1 and -1 where none may be merged."""
        i = int(self._value.argmax())
        if self._value[i] == -np.inf:
            return -1, -1
        return min(i, int(self._partner[i])), max(i, int(self._partner[i]))

    def merge(self, i: int, j: int) -> bool:
        """Put j into i; whether that joined units of one network."""
        is_within = bool((self._members[i] & self._members[j]).any())
        joint = np.minimum(self._similarity[i], self._similarity[j])
        self._members[i] |= self._members[j]
        self._has_several[i] |= self._has_several[j] or is_within
        if self._has_several[i] or self._members[i].all():
            joint = np.where(joint > 0, self._alpha * joint, joint)
        self._similarity[i] = self._similarity[:, i] = joint
        self._is_alive[j] = False
        self._value[j] = -np.inf
        self.labels[self.labels == j] = i
        is_stale = self._is_alive & ((self._partner == i) | (self._partner == j))
        is_stale[i] = True
        self._search(np.flatnonzero(is_stale))
        return is_within

    def _search(self, rows: Integers) -> None:
        for row in rows:
            allowed = self._is_alive.copy()
            allowed[row] = False
            if self._is_strict:
                allowed &= ~self._members[:, self._members[row]].any(1)
            values = np.where(allowed, self._similarity[row], -np.inf)
            self._partner[row] = values.argmax()
            self._value[row] = values[self._partner[row]]


def _places(labels: Integers, owners: Integers, target: int) -> Integers:
    clusters, first = np.unique(labels, return_index=True)  # Units of the first network come first.
    taken = owners[first] == owners[0]
    places = np.empty(len(clusters), dtype=np.int64)
    places[taken] = first[taken]
    places[~taken] = np.setdiff1d(np.arange(target), first[taken])
    return places[np.searchsorted(clusters, labels)]
