"""Bounds on the memory that each part of a streamed alignment needs, computed from shapes."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from regauge.alignment.engine.nested_blocks import is_compressed
from regauge.alignment.streamed.balancing import summed_axes
from regauge.core.assignment import assigning_bytes
from regauge.core.chart import charted
from regauge.core.closest import character
from regauge.core.families import CHUNK, Family, row_ranges
from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry

SLACK = 1.1
"""A factor for memory that the allocator reserves without using it. Large blocks are returned to the system."""
BASE = 96 << 20
"""Bytes for buffers (including those of matrix products in every thread), indices, and the graph of the symmetry."""

ASSIGNING = 3.5
"""The number of further matrices of the same size that an assignment of a cost matrix needs."""
ROTATING = 10.0
"""The number of copies of a matrix that its singular value decomposition needs."""
MOVED = 5
"""The number of float64 copies of a tensor that balancing its matrices needs."""
FITTED = 4
"""The number of float64 copies of one tensor that a fit of scales needs, in addition to one copy of all tensors."""
GRAMS = 5
"""The number of copies of a matrix of inner products that computing its root needs."""
PAIRED = 4.25
"""The number of copies of a nested group's blocks, for all pairs of blocks, that its exact step needs."""
CHARTED, SCALED = 4, 2.5
"""The numbers of copies of a tensor, in the next wider dtype, that are needed to remove translations, or only gains."""
TRANSLATED = 5
"""The number of float64 copies of a tensor that are needed to apply translations and rotations."""
ROTATED = 2.5, 1
"""The numbers of copies, in the next wider dtype and in float64, of a tensor that is rotated but not translated."""
ROTATIONS = 6
"""The number of elements with matrices that an ascent keeps in memory."""
WRITTEN = 4
"""The number of elements with matrices in memory while one of them acts on tensors."""
TURNED = 4
"""The number of additional matrices that are needed to compute the initial rotation of a group that acts on several
working sets."""

Part = tuple[Sequence[str], Sequence[Family], bool]
"""A working set (tensors that are aligned together): its tensors, its families of groups, and whether its tensors are
read one after another."""


class Sizes:
    """The sizes of compared tensors in the precision of the computation.

    Args:
        symmetry: The symmetry under which the tensors are matched.
        stored: The bytes per entry of each tensor in the files.
        chart: The symmetry by which translations and gains are removed before networks are compared.
    """

    def __init__(self, symmetry: Symmetry, stored: Mapping[str, int], chart: Symmetry | None = None) -> None:
        self.symmetry = symmetry
        self._itemsizes, self._chart = {name: max(4, size) for name, size in stored.items()}, chart
        self._wider = {name: min(8, 2 * size) for name, size in stored.items()}
        self._charted = frozenset[str]() if chart is None else charted(chart)
        families = () if chart is None else chart.translations
        self._added = {name for family in families for name in family.parameters}

    def has(self, name: str) -> bool:
        """Return whether the alignment compares a tensor, so its memory is counted."""
        return name in self._itemsizes

    def numel(self, name: str) -> int:
        """Return the number of entries of a tensor."""
        return math.prod(self.symmetry.shapes[name])

    def nbytes(self, names: Iterable[str]) -> int:
        """Return the total bytes of some tensors of one network."""
        return sum(self.numel(name) * self._itemsizes[name] for name in names if self.has(name))

    def is_pieced(self, name: str) -> bool:
        """Return whether a tensor is read in chunks."""
        return len(row_ranges(self.symmetry, name)) > 1

    def total_peak(
        self,
        sets: Sequence[Part],
        loose: Sequence[str],
        shared: Mapping[str, int],
        balanced: Iterable[Collection[str]],
        fitted: Iterable[Collection[str]],
    ) -> tuple[int, int | None]:
        """Return the memory bound of a whole plan, and the index of the working set that needs the most memory. The
        index is None if there are no working sets.

        Args:
            sets: The working sets.
            loose: The tensors outside the working sets.
            shared: For each group that acts on several working sets, the number of sign families that are chosen
                together with its permutation.
            balanced: The sets of tensors whose scales are balanced together.
            fitted: The sets of tensors whose scales are fitted together.
        """
        spread = [self.spread_peak(self.symmetry[name], count) for name, count in shared.items()]
        roots = [group for group in self.symmetry.groups if group.matrix != "none" and not group.within]
        turned = [_matrix(self.symmetry[name]) for name in shared if self.symmetry[name].matrix == "orthogonal"]
        kept = sum(sums for sums, _ in spread) + ROTATIONS * sum(map(_matrix, roots))
        peaks = [self.set_peak(*part) for part in sets]
        others = [*(self.loose_peak(name) for name in loose), *(solving for _, solving in spread)]
        if turned:
            names = [name for names, *_ in sets for name in names]
            piece = max(map(self._piece, names), default=0)
            others.append(TURNED * sum(turned) + max(5 * piece, 3 * piece + self._reading(names)))
        balancing = [*(self.balance_peak(part) for part in balanced), *(self.fit_peak(part) for part in fitted)]
        highest = max([*(kept + peak for peak in (*peaks, *others)), *balancing, self.chart_peak()], default=0)
        return int(SLACK * highest) + BASE, max(range(len(peaks)), key=peaks.__getitem__, default=None)

    def set_peak(self, names: Collection[str], families: Sequence[Family], is_blocked: bool = False) -> int:
        """Return the bytes in use while a working set is in memory: both networks, transformed tensors, costs, and
        sums.
        """
        if is_blocked:
            return self._blocked_peak(names, families)
        own, largest = self.nbytes(names), max((self.nbytes([name]) for name in names), default=0)
        costs = sum(_characters(f.root) * _matrix(f.root) for f in families if not f.is_nested)
        solving = max((self._solving(f) for f in families), default=0)
        climbing = 3 * own + costs + max(3 * largest, solving)
        inside = {group.name for family in families for group in family.members}
        return max(climbing, 2 * own + self._summing(names, inside), 2 * own + self._reading(names))

    def _blocked_peak(self, names: Collection[str], families: Sequence[Family]) -> int:
        """Return the bytes in use while a working set is read tensor by tensor: two tensors, and one or two cost
        matrices.
        """
        largest, profits = max(map(self._piece, names)), 0
        for root in (family.root for family in families):
            own = [p for p in root.placements if self.has(p.parameter)]
            itemsize = max(self._itemsizes[p.parameter] for p in own)
            count = min(2, len({character(p) for p in own if any(character(p))}) or 1)
            profits = max(profits, (count * itemsize + assigning_bytes(itemsize)) * root.size**2)
        inside = {group.name for family in families for group in family.members}
        reading = self._reading(names)
        climbing = profits + max(4 * largest + min(CHUNK, profits), 2 * largest + reading)
        return max(climbing, 5 * largest + max(self._summing(names, inside), reading))

    def spread_peak(self, group: Group, shared: int) -> tuple[int, int]:
        """Return the bytes of the summed costs of a group that acts on several working sets, and the bytes for choosing
        its value.
        """
        sums = (2**shared if group.signs and not group.shifts else _characters(group)) * _matrix(group)
        return sums, int((ROTATING if group.matrix != "none" else ASSIGNING) * _matrix(group))

    def loose_peak(self, name: str) -> int:
        """Return the bytes in use while a tensor that belongs to no working set is read."""
        return 6 * self._piece(name) + self._summing([name]) + self._reading([name])

    def balance_peak(self, part: Collection[str]) -> int:
        """Return the bytes in use while some tensors are balanced: squares in float64, and a second copy of one tensor.

        Tensors on which matrices act are also stored in float64. One tensor on which matrices act is also held in
        transformed, scaled and unfolded form.
        """
        mixed = [n for n in part if self._is_mixed(n)]
        squares = [8 * self._kept(n) for n in part]
        reading = max(2 * self._piece(n) + self._products(n) for n in part)
        moving = sum(12 * self._kept(n) for n in mixed) + MOVED * max((8 * self._kept(n) for n in mixed), default=0)
        return sum(squares) + 2 * max(squares) + reading + self._reading(part) + moving

    def fit_peak(self, part: Collection[str]) -> int:
        """Return the bytes in use while scales and matrices are fitted: both networks' tensors, and a transformed
        copy.
        """
        kept, widest, reading = 0, 0, 0
        for name in part:
            if summed_axes(self.symmetry, name):  # two values per sum, or twice as many rows as columns
                own = 16 * self._kept(name)
                sums = GRAMS * 2 * own if self._is_mixed(name) else 0
                reading = max(reading, 2 * self._piece(name) + self._products(name) + sums)
                kept, widest = kept + own, max(widest, own)
            else:
                kept, widest = kept + self.nbytes([name]), max(widest, 8 * self.numel(name))
        return 2 * kept + max(FITTED * widest, reading) + self._reading(part)

    def chart_peak(self) -> int:
        """Return the bytes in use while coordinates are computed from whole tensors, and while elements act on
        tensors.
        """
        families = () if self._chart is None else self._chart.translations
        whole = {name for one in families for name in (one.entries.parameter, *one.coefficients)}
        return max(8 * TRANSLATED * max(map(self.numel, whole), default=0), self.moving_peak(1))

    def moving_peak(self, networks: int) -> int:
        """Return the bytes in use while translations and rotations act on one tensor of `networks` networks."""
        if self._chart is None:
            return 0
        turned = {place.parameter for name in self._chart.rotatable for place in self._chart[name].placements}
        matrices = WRITTEN * sum(_matrix(self._chart[name]) for name in self._chart.rotatable)
        wider, double = ROTATED
        each = (
            self._at_once(n) * (8 * TRANSLATED if n in self._added else wider * self._wider.get(n, 8) + 8 * double)
            for n in turned | self._charted
        )
        return int(max(each, default=0)) + networks * matrices

    def _reading(self, names: Iterable[str]) -> int:
        """Return the bytes in use while one of the given tensors is read and converted to coordinates."""
        copies = {n: CHARTED if n in self._added else SCALED for n in names if n in self._charted}
        return int(max((k * self._wider.get(n, 8) * self._at_once(n) for n, k in copies.items()), default=0))

    def _products(self, name: str) -> int:
        """Return the bytes of those products of a tensor that are computed and summed at once."""
        return min(2 * CHUNK, 24 * self.numel(name)) if summed_axes(self.symmetry, name) else 0

    def _piece(self, name: str) -> int:
        """Return the bytes of the chunk of a tensor that is read at once, in the precision of the computation."""
        return min(CHUNK, self.nbytes([name])) if self.is_pieced(name) else self.nbytes([name])

    def _at_once(self, name: str) -> int:
        """Return the number of entries of a tensor that are read at once."""
        return min(self.numel(name), CHUNK // 4) if self.is_pieced(name) else self.numel(name)

    def _kept(self, name: str) -> int:
        """Return the number of sums that balancing keeps for a tensor."""
        axes, shape = summed_axes(self.symmetry, name), self.symmetry.shapes[name]
        values = math.prod(length for axis, length in enumerate(shape) if axis not in axes)
        return values * (values if axes and self._is_mixed(name) else 1)

    def _is_mixed(self, name: str) -> bool:
        return any(site.group.matrix == "linear" for site in self.symmetry.sites[name])

    def _summing(self, names: Collection[str], inside: Collection[str] = ()) -> int:
        """Return the bytes in use while the costs of a group that is not in `inside` are summed over some tensors."""
        groups = {site.group.name: site.group for name in names for site in self.symmetry.sites[name]}
        counts = {
            name: len({character(p) for p in group.placements if p.parameter in names})
            for name, group in groups.items()
            if name not in inside
        }
        return max(((count + 4) * _matrix(groups[name]) for name, count in counts.items()), default=0)

    def _solving(self, family: Family) -> int:
        """Return the bytes that an exact step of a family of groups needs."""
        root = family.root
        if not family.is_nested:
            return self.spread_peak(root, 0)[1]
        pairs = root.size * (root.size if root.is_permuted else 1)
        blocks = 2 * self.nbytes(family.sites)
        entries = 0
        for name in family.sites:
            lengths = {s.placement.axis: s.positions.numel() for s in family.sites[name] if s.group.name == root.name}
            for length in lengths.values():
                rows = length // root.size
                rest = self.numel(name) // self.symmetry.shapes[name][next(iter(lengths))]
                one = rows * (rows if is_compressed(pairs, rows, rest) else rest)
                entries += 4 * pairs * one
        inner = sum(pairs * _characters(g) * _matrix(g) for g in family.members[1:])
        return int(blocks + PAIRED * entries) + 6 * inner


def _matrix(group: Group) -> int:
    """Return the bytes of a group's float64 matrix of inner products."""
    return 8 * group.size * (group.size if group.is_permuted or group.matrix != "none" else 1)


def _characters(group: Group) -> int:
    return len({character(place) for place in group.placements})
