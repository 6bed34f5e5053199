"""Pairs of networks, prepared for comparison: each network is replaced by the smallest network on its orbit.

The smallest network on an orbit is the network with the smallest norm. If a filter before batch normalization is
scaled, the gain (gamma) of the normalization can compensate for the scale. If a filter and its gain are scaled, the
stored running mean is scaled too, but not the running variance. After this scaling, the stored statistics no longer
match the activations. The function stays the same as long as the stored statistics are used. But if statistics are
recomputed, part of the scaling is undone. Therefore the second network keeps its statistics, unless it is a transformed
copy of the first network. In a transformed copy, the statistics were transformed too. Copies are recognized by running
variances that equal the running variances of the first network. In an independently trained network, the running
variances differ, because they depend on the scales of its filters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from regauge.alignment.engine.climbs import Climbs
from regauge.alignment.engine.paired_networks import act_on, at, dots, norms
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core import act as _act
from regauge.core.balance import Buffers, balance_alike, has_balance
from regauge.core.element import Element, Value, select_parts
from regauge.core.families import Tensors, compared
from regauge.core.params import Params, select
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

Scales = Literal["balance", "recompute", "keep"]
"""The treatment of positive scales and matrices: whether networks are balanced before they are compared.

With "balance", scales that change running statistics are balanced only in transformed copies; see `match_frames`.
"""
EQUAL_TENSORS = 1e-5
"""A distance between tensors below this fraction of a tensor's norm counts as zero.

Rounding in float32 causes distances of this size."""
MOVED = 0.25
"""A second network counts as a transformed copy if transforming its statistics reduces their difference from the first
network's statistics below this fraction.
"""


def balances_of(symmetry: Symmetry, scales: Scales, task: Task | None) -> tuple[Buffers, ...]:
    """Return the kinds of balancing to try: first without changing buffers, and then with changed buffers. Balancing
    with changed buffers is right for transformed copies.

    If a task recomputes statistics, balancing never changes running statistics.
    """
    if scales == "keep" or not has_balance(symmetry):
        return ()
    is_prepared = task is not None and task.prepare is not None
    return ("keep", "move") if scales == "balance" and not is_prepared and symmetry.moves_statistics else ("keep",)


@dataclass(frozen=True)
class Frame:
    """The compared tensors of pairs of networks, balanced or as given, and the conversion back to the given networks.

    The first network of a pair is not changed. The second network of a pair gets the scales and invertible matrices of
    the first network. After both networks are balanced, only a rotation remains to be chosen for each invertible
    matrix, and rotations keep every norm. Linear paths stay linear, because scales and matrices act linearly. Up to
    scales and matrices, `(1 - t) a + t act(element, b)` equals the point t on the linear path between the balanced
    networks.

    Attributes:
        symmetry: The symmetry of all networks. All sizes of its groups are known.
        a: The first networks, `[pair, ...]`.
        b: The second networks.
        given: The second networks before balancing.
        sides: The elements that balance the first and the second networks, or None if networks are compared as given.
        buffers: Whether balancing changes running statistics.
        rigid: For each group of invertible matrices, the pairs in which the group may only rotate. A group is
            restricted to rotations if a Gram matrix of one network is singular up to rounding.
    """

    symmetry: Symmetry
    a: Tensors
    b: Tensors
    given: Tensors
    sides: tuple[Element, Element] | None
    buffers: Buffers = "keep"
    rigid: Mapping[str, Bool[Tensor, " pair"]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        params_a: Mapping[str, Tensor],
        params_b: Mapping[str, Tensor],
        symmetry: Symmetry,
        scales: Scales,
        buffers: Buffers = "keep",
    ) -> "Frame":
        """Return the frame for comparing networks `[pair, ...]` with the given treatment of scales and buffers."""
        params_a, params_b, symmetry = symmetry.sums(params_a), symmetry.sums(params_b), symmetry.on_sums
        a, b = compared([params_a, params_b], symmetry)
        if scales == "keep" or not has_balance(symmetry):
            return cls(symmetry, a, b, b, None)
        found = balance_alike([params_a, params_b], symmetry, buffers=buffers)
        left, right = (side.element for side in found)
        moved = move_by(symmetry, left, a), move_by(symmetry, right, b)
        return cls(symmetry, *moved, b, (left, right), buffers, found[0].rigid)

    def under(self, symmetry: Symmetry) -> "Frame":
        """Return the same balanced pairs of networks for another symmetry with the same scales and matrices."""
        a, b, given = ({n: t[n] for n in t if n in symmetry.sites} for t in (self.a, self.b, self.given))
        sides = self.sides
        if sides is not None:
            blank = symmetry.identity(sides[0].batch)
            sides = stretching(self.symmetry, sides[0]).fill(blank), stretching(self.symmetry, sides[1]).fill(blank)
        return replace(self, symmetry=symmetry, a=a, b=b, given=given, sides=sides)

    def second(self, element: Element, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield balanced tensors of the second networks after an element for the given networks has acted."""
        if self.sides is not None:
            left, right = self.sides
            back = self.symmetry.compose(element, self.symmetry.inverse(right))
            element = self.symmetry.compose(left, back)
        for name in names:
            yield from act_on(self.symmetry.groups, {name: self.symmetry.sites[name]}, element, self.b).items()

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about groups that may only rotate."""
        return notes_on(self.rigid)

    def original(self) -> Tensors:
        """Return the second networks, transformed by the element that balances the first networks.

        The result corresponds to the identity between the given networks.
        """
        return self.b if self.sides is None else move_by(self.symmetry, self.sides[0], self.given)

    def identity_objective(self) -> Float64[Tensor, " pair"]:
        """Return the objective of the identity: `<a, x> - (|x|^2 - |b|^2) / 2` at x = `original()`."""
        if self.sides is None:
            return self.objective(self.b)
        total = torch.zeros(self.sides[0].batch, dtype=torch.float64)
        read = _act.ReadValues(stretching(self.symmetry, self.sides[0]))
        for name, tensor in self.given.items():
            x = _moved(self.symmetry, read, {name: tensor})[name]
            total += dots(self.a[name], x)
            if is_stretched(self.symmetry, name):
                total -= (dots(x, x) - dots(self.b[name], self.b[name])) / 2
        return total

    def objective(self, b: Tensors) -> Float64[Tensor, " pair"]:
        """Return the inner product of each first network with the corresponding network in `b`."""
        return torch.stack([dots(self.a[name], b[name]) for name in self.a]).sum(0)

    def rows(self, rows: Tensor) -> "Frame":
        """Return the compared tensors and their conversion for only the selected pairs."""
        a, b, given = ({n: at(t, rows) for n, t in tensors.items()} for tensors in (self.a, self.b, self.given))
        sides = None if self.sides is None else (self.sides[0].rows(rows), self.sides[1].rows(rows))
        rigid = {name: flags[rows] for name, flags in self.rigid.items()}
        return Frame(self.symmetry, a, b, given, sides, self.buffers, rigid)

    def turnable(self, params_a: Params, params_b: Params) -> tuple[Params, Params]:
        """Return both networks of a single pair, balanced by invertible matrices, but with their original scales."""
        if self.sides is None or not _linear(self.symmetry):
            return params_a, params_b
        sides = (select_parts(side.item(0), self.symmetry.groups, ("linear",)) for side in self.sides)
        a, b = (self.symmetry.act(side, params) for side, params in zip(sides, (params_a, params_b), strict=True))
        return a, b

    def lead_back(self, climbs: Climbs, *, is_from_original: bool = False) -> Climbs:
        """Convert results of coordinate ascents, which began at `b` or at `original()`, from the balanced networks to
        the given networks.
        """
        if self.sides is None:
            return climbs
        left, right = self.sides
        element = self.symmetry.compose(climbs.element, left if is_from_original else right)
        return replace(climbs, element=self.symmetry.compose(self.symmetry.inverse(left), element), moved={})


@dataclass(frozen=True)
class FramedProblem(Problem):
    """Pairs of networks that are already balanced.

    Attributes:
        frame: The balanced networks, for which running statistics were kept.
    """

    frame: Frame | None = None

    def __getitem__(self, rows: slice | Tensor) -> "FramedProblem":
        """Return the problem with only the selected pairs."""
        chosen = torch.arange(self.pairs)[rows]
        frame = None if self.frame is None else self.frame.rows(chosen)
        return replace(self, a=select(self.a, rows), b=select(self.b, rows), frame=frame)


def are_isometric(symmetry: Symmetry, a: Tensors, b: Tensors) -> Bool[Tensor, " pair"]:
    """Return whether the invariants of balanced networks are equal. If an invariant differs, the networks differ by
    more than permutations, signs and rotations.
    """
    result = torch.ones(len(next(iter(b.values()))), dtype=torch.bool)
    for name in sorted(symmetry.sites.keys() & a.keys(), key=lambda name: a[name].numel()):
        is_rotated = any(site.group.matrix != "none" for site in symmetry.sites[name])
        powers = (2,) if is_rotated else (2, 4)
        for power, one, other in zip(powers, _power_sums(a[name]), _power_sums(b[name]), strict=False):
            result &= (one - other).abs() <= power * EQUAL_TENSORS * one
        if not bool(result.any()):
            break  # Most unrelated pairs differ in their smallest tensor.
    return result


def _power_sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the second and of the fourth powers of all entries, for each pair of networks."""
    # Torch squares squares several times as fast as it computes fourth powers.
    squares = tensor.double().reshape(len(tensor), -1).square()
    return squares.sum(1).cpu(), squares.square_().sum(1).cpu()


def notes_on(rigid: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return a message about each group whose matrices balancing left unchanged in some pairs."""
    result = []
    for name, flags in rigid.items():
        where = f" in {int(flags.sum())} of {len(flags)} pairs" if len(flags) > 1 else ""
        if bool(flags.any()):
            result.append(
                f"group {name!r} was only rotated{where}: in one of the networks, its values do not have full rank up "
                "to rounding, so its matrix is not unique"
            )
    return tuple(result)


def is_stretched(symmetry: Symmetry, name: str) -> bool:
    """Return whether scales, shifts or invertible matrices change the norm of a tensor."""
    sites = symmetry.sites[name]
    return any(s.group.matrix == "linear" or any((*s.placement.scale, *s.placement.shift)) for s in sites)


def move_by(symmetry: Symmetry, balance: Element, tensors: Tensors) -> dict[str, Tensor]:
    """Apply the positive factors and invertible matrices of a balancing element to tensors."""
    return _moved(symmetry, _act.ReadValues(stretching(symmetry, balance)), tensors)


def _moved(symmetry: Symmetry, read: _act.ReadValues, tensors: Tensors) -> dict[str, Tensor]:
    sites, ndims = {n: symmetry.sites[n] for n in tensors}, {n: len(symmetry.shapes[n]) for n in tensors}
    return _act.act(symmetry.groups, sites, read.element, tensors, ndims, read)


def stretching(symmetry: Symmetry, element: Element) -> Element:
    """Return the element that consists of the positive factors and invertible matrices of the given element."""
    linear = _linear(symmetry)
    values = {n: Value(scale=v.scale, matrix=v.matrix if n in linear else None) for n, v in element.items()}
    return Element(values, element.batch)


def _linear(symmetry: Symmetry) -> frozenset[str]:
    return frozenset(group.name for group in symmetry.groups if group.matrix == "linear")


def match_frames(problem: Problem, scales: Scales, match: Callable[[Frame], Results]) -> Results:
    """Match pairs of networks in balanced form, without changing running statistics.

    Pairs that may be transformed copies are also matched after balancing that changes running statistics.

    Args:
        problem: The pairs of networks.
        scales: The treatment of scales, as in `WeightMatching`.
        match: A function that matches the pairs of a frame.
    """
    symmetry = problem.symmetry
    known = problem.frame if isinstance(problem, FramedProblem) and scales != "keep" else None
    found = match(known or Frame.of(problem.a, problem.b, symmetry, scales))
    if "move" not in balances_of(symmetry, scales, problem.task):
        return found
    may_be_copies = have_equal_variances(symmetry, problem.a, problem.b)
    if bool(may_be_copies.any()):
        may_be_copies &= ~are_equal(problem.a, found.params)
    if not bool(may_be_copies.any()):
        return found
    other = match(Frame.of(problem.a, problem.b, symmetry, scales, "move"))
    is_copy = may_be_copies & are_moved_copies(symmetry, problem.a, found.params, other.params)
    return replace(found.but(is_copy, other), notes=other.notes if bool(is_copy.all()) else found.notes)


def are_moved_copies(
    symmetry: Symmetry, a: Mapping[str, Tensor], kept: Mapping[str, Tensor], moved: Mapping[str, Tensor]
) -> Bool[Tensor, " pair"]:
    """Return whether each second network is a copy of the first network whose statistics were also transformed.

    Args:
        symmetry: The symmetry of all networks.
        a: The first networks, `[pair, ...]`.
        kept: The second networks, aligned without changing their statistics.
        moved: The second networks, aligned with their statistics changed to those of the first networks.
    """
    before, after = (statistics_gap(symmetry, a, other) for other in (kept, moved))
    return (after < MOVED * before) | are_equal(a, moved)


def have_equal_variances(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Bool[Tensor, " pair"]:
    """Return whether running variances of both networks of each pair are nearly equal, up to a permutation."""
    moved = {p.parameter for group in symmetry.groups for p in group.placements if any((*p.scale, *p.sign))}
    kept = [name for name in symmetry.buffers if name in symmetry.sites and name not in moved]
    ordered = [{name: one[name].flatten(1).sort(1).values for name in kept} for one in (a, b)]
    return _measure_gap(*ordered) < MOVED


def statistics_gap(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Float64[Tensor, " pair"]:
    """Return the distance between the running statistics of both networks of each pair, relative to the norm of the
    first network's statistics.
    """
    names = [name for name in symmetry.buffers if name in symmetry.sites]
    return _measure_gap(*({name: one[name] for name in names} for one in (a, b)))


def _measure_gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Float64[Tensor, " pair"]:
    """Return the root mean square distance of tensors `[pair, ...]`, each relative to the first network's norm."""
    shares = [torch.zeros(1, dtype=torch.float64)] * (not a)
    for name, tensor in a.items():
        x, y = (one.detach().cpu().double().flatten(1) for one in (tensor, b[name]))
        square = x.square().sum(1)
        shares.append((x - y).square().sum(1) / torch.where(square == 0, 1.0, square))
    return torch.stack(shares).mean(0).sqrt()


def are_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Bool[Tensor, " pair"]:
    """Return whether networks `[pair, ...]` are equal within rounding, including running statistics."""
    pairs = len(next(iter(b.values())))
    result = torch.ones(pairs, dtype=torch.bool)
    for name, x in a.items():
        if x.is_floating_point():
            wide = torch.promote_types(x.dtype, torch.float32)
            first, second = x.detach().to(wide), b[name].detach().to(x.device, wide)
            result &= norms(first - second) <= share_of_rounding((x.dtype, b[name].dtype)) * norms(first)
            if not bool(result.any()):
                break
    return result


def share_of_rounding(dtypes: Iterable[torch.dtype]) -> float:
    """Return the fraction of a tensor's norm that rounding may change, for the coarsest of several dtypes."""
    return max(EQUAL_TENSORS, *(2 * torch.finfo(dtype).eps for dtype in dtypes))
