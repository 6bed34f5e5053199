"""Tensors of checkpoints on disk: balanced, transformed by an element, and compared, in chunks if possible."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from regauge.alignment.engine.frames import is_stretched, move_by
from regauge.alignment.streamed.passes import Passes
from regauge.alignment.streamed.state import ClimbState
from regauge.checkpoints.checkpoint import Checkpoint, CheckpointView
from regauge.checkpoints.representative_checkpoint import MovedCheckpoint
from regauge.checkpoints.writing import Pieces
from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.assignment import assign
from regauge.core.closest import Character, Cost, ShiftCost, closest, diagonal
from regauge.core.element import Element, Value
from regauge.core.families import CHUNK, add_term, barycenter, dot, move_tensor, row_ranges
from regauge.core.groups import Group, forbid_between_classes
from regauge.core.interpolation import distance
from regauge.core.params import require_finite, work_dtype
from regauge.core.progress import Crew
from regauge.core.signs import SignCode
from regauge.core.symmetry import Symmetry


class Total:
    """The objective of aligning the units of one group, as a sum over parts of the network.

    A part is a working set, or a tensor outside of all working sets. Some sign families of the group act in only one
    part of the network. Once the shared signs of a pair of units are given, each part of the network chooses its own
    signs for the pair. One matrix for each pattern of shared signs is therefore enough. Let s be the shared signs of a
    unit, t the signs that only one part has, and C the inner products of this part. The matrix of the shared signs s is

        P_s[i, j] = sum over parts of max_t sum_chi chi(s, t) C_chi[i, j]

    The matrix `P_s` is exact, not an approximation. A transformer therefore does not need a separate matrix for each
    norm.

    Sign families that are neither in `shared` nor belong to a part stay unchanged.
    """

    def __init__(self, group: Group, shared: Sequence[int]) -> None:
        self.group, self._shared = group, tuple(shared)
        self._is_by_pattern = bool(group.signs) and not group.shifts
        self._matrices: dict[tuple[int, ...], Tensor] = {}  # keys: patterns of shared signs, or characters
        self._shifts: list[ShiftCost] = []

    def add(self, cost: Cost, own: Sequence[int]) -> None:
        """Add the costs of one part, in which the sign families `own` are chosen."""
        matrices = cost.matrices
        if self._is_by_pattern and matrices:
            matrices = {p: self._best(matrices, p, own) for p in product((0, 1), repeat=len(self._shared))}
        for key, matrix in matrices.items():
            if key in self._matrices:
                self._matrices[key] += matrix
            else:
                self._matrices[key] = matrix.clone() if len(matrices) > 1 else matrix
        self._shifts.extend(cost.shifts)

    def sum(self, crew: Crew) -> None:
        """Sum the matrices over all processes."""
        self._matrices = crew.sum(self._matrices)
        self._shifts = [one for own in crew.map(lambda _: self._shifts, range(crew.size)) for one in own]

    def closest(self) -> tuple[Value, float]:
        """Return the best value of the group (permutation, signs or rotation), relative to its current value, and how
        much it raises the objective.

        Signs that belong to one part stay one.
        """
        group, matrices = self.group, list(self._matrices.values())
        if not matrices:
            return _element.identity((group,))[group.name], 0.0
        if not self._is_by_pattern:
            cost = Cost(self._matrices, tuple(self._shifts))
            found = closest(group, cost)
            return found.value, float(found.objective - cost.at_identity())
        best = matrices[0]
        for matrix in matrices[1:]:
            best = torch.maximum(best, matrix)
        perm = None
        if group.is_permuted:
            perm = torch.from_numpy(assign(forbid_between_classes(group, best).numpy()))
        units = torch.arange(group.size)
        reached = torch.stack([m[units, 0 * units if perm is None else perm] for m in matrices])
        chosen = torch.tensor(list(self._matrices)).reshape(len(matrices), len(self._shared))[reached.argmax(0)]
        sign = torch.ones(group.signs, group.size, dtype=torch.int8)
        sign[list(self._shared)] = (1 - 2 * chosen.T).to(torch.int8)
        return Value(perm=perm, sign=sign), float(reached.amax(0).sum() - diagonal(matrices[0]).sum())

    def _best(self, matrices: Mapping[Character, Tensor], pattern: tuple[int, ...], own: Sequence[int]) -> Tensor:
        """Return the inner products of one part, given the shared signs and with the best signs of the part."""
        by_own: dict[Character, Tensor] = {}
        for key, matrix in matrices.items():
            is_flipped = sum(key[f] * bit for f, bit in zip(self._shared, pattern, strict=True)) % 2
            signed, rest = -matrix if is_flipped else matrix, tuple(key[f] for f in own)
            by_own[rest] = by_own[rest] + signed if rest in by_own else signed
        return SignCode.of(*by_own).best(list(by_own.values())) if own else by_own[()]


def part_cost(
    group: Group,
    sites: Mapping[str, Sequence[Site]],
    load: Callable[[str], tuple[Tensor, Tensor]],
    unknown: Collection[str] = (),
) -> Cost:
    """Return the cost of a group, summed over the tensors in `sites`.

    The function `load` returns a tensor of both networks, given its name.

    Tensors are averaged over all groups that are still unknown. If the group itself is unknown, tensors are averaged
    over its action on all other axes.
    """
    matrices: dict[Character, Tensor] = {}
    shifts: list[ShiftCost] = []
    for name, local in sites.items():
        own = [site for site in local if site.group.name == group.name]
        tensors = load(name) if own else ()
        for site in own:
            hidden = [
                other
                for other in local
                if other.group.name in unknown
                and (other.group.name != group.name or other.placement.axis != site.placement.axis)
            ]
            x, y = (barycenter(tensor, hidden) for tensor in tensors)
            if x is not None and y is not None:
                add_term(matrices, shifts, site, x, y)
    return Cost(matrices, tuple(shifts))


class Source:
    """The tensors of both networks of a streamed alignment, prepared for comparison.

    The second network is transformed by the element that was current when `refresh` was called.

    Attributes:
        terms: The terms of `scale` and `identity` for all tensors that were loaded since `refresh`.
    """

    def __init__(self, a: Checkpoint, b: Checkpoint, symmetry: Symmetry, state: ClimbState) -> None:
        self._a, self._b, self._symmetry, self._state = a, b, symmetry, state
        self.refresh()

    def refresh(self) -> None:
        """Apply the current element to the second network from now on, and reset all sums."""
        right, element = self._state.right, self._state.element
        self._total = element if right is None else self._symmetry.compose(element, right)
        self.terms: list[tuple[float, float]] = []

    @property
    def scale(self) -> float:
        """The sum of the products `|a| |b|` of both networks' norms, over all tensors that were loaded."""
        return sum(scale for scale, _ in self.terms)

    @property
    def identity(self) -> float:
        """The objective of the identity, summed over the tensors that the first sweep loaded."""
        return sum(identity for _, identity in self.terms)

    @property
    def place(self) -> tuple[Element, Element]:
        """Two elements: the element in the stored state, and the element that acts on the second network. The element
        that acts on the second network also balances it.
        """
        return self._state.element, self._total

    def go_to(self, place: tuple[Element, Element]) -> None:
        """Set the current elements to two elements that `place` returned earlier."""
        self._state.element, self._total = place

    def compose(self, values: Mapping[str, Value]) -> None:
        """Multiply the current element by values of some groups. The values of all other groups are not read."""
        element, total = self.place
        self.go_to((_move_on(self._symmetry, values, element), _move_on(self._symmetry, values, total)))

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is compared."""
        return work_dtype(*(one.stored[name].dtype for one in (self._a, self._b)))

    def pair(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the balanced tensors with a given name from both networks.

        The current element of the ascent has already acted on the second tensor.
        """
        y = move_tensor(self._symmetry, self._total, name, self._read(self._b, name, rows))
        return self._place(name, self._read(self._a, name, rows), self._state.left), y

    def load(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor, float]:
        """Return the tensors with the given name from both networks, and the squared norm of the second tensor before
        the element acts.

        Both tensors are balanced, and the current element has acted on the second tensor.

        Raises:
            ValueError: A tensor contains NaN or Inf. Only the first sweep checks for NaN and Inf.
        """
        state = self._state
        x, y = (self._read(one, name, rows) for one in (self._a, self._b))
        x, is_first, norm = self._place(name, x, state.left), state.initial is None and state.is_anchored, 0.0
        identity = 0.0
        if is_first or self._is_changing(name):
            balanced = self._place(name, y, state.right)
            norm = dot(balanced, balanced)
        if is_first:
            there = self._place(name, y, state.left)
            identity = dot(x, there) - (dot(there, there) - norm) / 2
        self.terms.append((float(torch.linalg.vector_norm(x)) * float(torch.linalg.vector_norm(y)), identity))
        return x, move_tensor(self._symmetry, self._total, name, y), norm

    def objective(self, name: str, x: Tensor, y: Tensor, norm: float) -> float:
        """Return the term of a loaded tensor in the objective, `<x, y> - (|y|^2 - norm) / 2`.

        Most elements leave the norm unchanged, so the second term is zero.
        """
        return dot(x, y) - ((dot(y, y) - norm) / 2 if self._is_changing(name) else 0.0)

    def nbytes(self, names: Sequence[str]) -> int:
        """Return the total bytes of some tensors in both files."""
        return sum(one.stored[name].nbytes for one in (self._a, self._b) for name in names)

    def _read(self, one: Checkpoint, name: str, rows: tuple[int, int] | None) -> Tensor:
        """Return a tensor of one network. Until the first sweep has ended, check that all entries are finite."""
        tensor = one.read(name, rows=rows, dtype=self.dtype_of(name))
        if self._state.initial is None:
            require_finite({name: tensor}, str(one.path), self._symmetry.structure)
        return tensor

    def _place(self, name: str, tensor: Tensor, scales: Element | None) -> Tensor:
        return tensor if scales is None else move_by(self._symmetry, scales, {name: tensor})[name]

    def _is_changing(self, name: str) -> bool:
        """Return whether the current element changes the norm of a tensor.

        Shifts change norms. If the ascent started from the identity, the element that balances the first network also
        changes norms.
        """
        is_shifted = any(any(site.placement.shift) for site in self._symmetry.sites[name])
        return is_shifted or (self._state.is_from_identity and is_stretched(self._symmetry, name))


def _move_on(symmetry: Symmetry, values: Mapping[str, Value], element: Element) -> Element:
    """Return the element that first acts like a given element, and then by the given values of some groups.

    No other group may be nested in the groups that have values.
    """
    names = {*values, *(base for name in values for base in symmetry[name].within)}
    groups = tuple(group for group in symmetry.groups if group.name in names)
    own = Element({group.name: element[group.name] for group in groups})
    moved = _element.compose(groups, Element(values).fill(_element.identity(groups)), own)
    for group in groups:
        element = element.replace(group.name, moved[group.name])
    return element


class Moved(CheckpointView):
    """A checkpoint whose tensors are transformed when they are read.

    A range of rows can be read if no group acts on axis 0.
    """

    def __init__(self, source: Checkpoint, move: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__(source, source.stored)
        self._move = move

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a transformed copy of one tensor, or of a range of its first axis if no group acts on this axis."""
        return self._move(name, self.source.read(name, rows=rows, dtype=dtype))


def move_pieces(checkpoint: Checkpoint, symmetry: Symmetry, element: Element) -> Pieces:
    """Yield the tensors of `symmetry.act(element, params)` one at a time, in the dtypes of the checkpoint."""
    moved = MovedCheckpoint(checkpoint, symmetry, element)

    def pieces(name: str) -> Iterator[Tensor]:
        for rows in row_ranges(symmetry, name, checkpoint.stored[name].shape):
            yield moved.read(name, rows=rows)

    return pieces


def measure_square(
    a: Checkpoint, b: Checkpoint, symmetry: Symmetry, names: Iterable[str], passes: Passes
) -> tuple[float, float]:
    """Return the squared distance between some tensors of two networks, and their squared norm in the first network."""

    def measure(name: str) -> list[tuple[float, float]]:
        dtype, found = work_dtype(*(one.stored[name].dtype for one in (a, b))), []
        for rows in row_ranges(symmetry, name):
            x, y = (one.read(name, rows=rows, dtype=dtype) for one in (a, b))
            gap = y - x
            found.append((dot(gap, gap), dot(x, x)))
        passes.advance(sum(one.stored[name].nbytes for one in (a, b)))
        return found

    square, norm = 0.0, 0.0
    for more, own in (pair for found in passes.crew.map(measure, names) for pair in found):
        square, norm = square + more, norm + own
    return square, norm


def measure_distances(
    reference: Checkpoint, checkpoint: Checkpoint, symmetry: Symmetry, element: Element
) -> tuple[float, float]:
    """Return the distances of a network to a reference before and after an element acts on it; see `distance`.

    Tensors are compared in the dtypes in which they are stored.
    """
    squares, aligned = [0.0, 0.0], MovedCheckpoint(checkpoint, symmetry, element)
    for name, blank in checkpoint.on_meta().items():
        if name in symmetry.buffers or not blank.is_floating_point():
            continue
        dtype = work_dtype(blank.dtype)
        for rows in row_ranges(symmetry, name, blank.shape, CHUNK // 4):
            x, y, moved = (one.read(name, rows=rows, dtype=dtype) for one in (reference, checkpoint, aligned))
            for k, other in enumerate((y, moved.to(blank.dtype))):
                squares[k] += distance({name: x}, {name: other}) ** 2
    return math.sqrt(squares[0]), math.sqrt(squares[1])
