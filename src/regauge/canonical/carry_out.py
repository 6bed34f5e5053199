"""The element that maps a network to its canonical form, computed in float64 by a plan."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from regauge.canonical.places import GroupSite
from regauge.canonical.step_plan import (
    LinearStep,
    OrderStep,
    Plan,
    RotationStep,
    ScaleStep,
    ShiftStep,
    SignStep,
    Step,
)
from regauge.core import element as _element
from regauge.core.element import ROTATION, Element, Value
from regauge.core.families import unit_values
from regauge.core.groups import Group, Placement, class_labels
from regauge.core.rotations import keeping_ones, without_reflection, zero_sum_basis
from regauge.core.symmetry import Symmetry

TIE, COARSEST = 64, 1e-3
"""Entries count as equal if their relative difference is at most `TIE` machine epsilons, and at most `COARSEST`."""
SINGULAR = 1e-10
"""The share of the largest eigenvalue below which differences of eigenvalues of a Gram matrix count as zero."""
ROUNDING = 1e-14
"""The share of the factors' norms below which singular values of a product count as zero."""


def carry_out(
    plan: Plan,
    symmetry: Symmetry,
    params: Mapping[str, Tensor],
    parts: Sequence[str],
    *,
    power: int = 2,
    streams: Collection[str] = (),
) -> Element:
    """Return the element that carries out the steps of a plan for the given parts, for a network or a population.

    The steps for scales make norms one. The norms are square roots of sums of squares or, with `power=1`, sums of
    absolute values. If a unit is split into copies that divide its outgoing weights, sums of absolute values stay the
    same. The argument `streams` names rotations of residual streams that gains prevent (`behind_gains`). Rotations of
    streams belong to the part "rotation", not to "linear".
    """
    reads = [_names_read(step) for step in plan.steps]
    work = _Work(symmetry, params, power, frozenset().union(*reads))
    for k, step in enumerate(plan.steps):
        work.needed = frozenset().union(*reads[k + 1 :])
        has_matrix = (ROTATION if step.group in streams else "linear") in parts
        match step:
            case ScaleStep() if "scale" in parts:
                work.take(step, work.scale(step))
            case LinearStep() if has_matrix:
                work.take(step, work.balance(step))
            case RotationStep() if has_matrix:
                work.take(step, work.rotate(step))
            case ShiftStep() if "shift" in parts:
                work.take(step, work.shift(step))
            case SignStep(flips=()) if has_matrix:
                work.take(step, work.reflect(step))
            case SignStep(flips=(_, *_)) if "sign" in parts:
                work.take(step, work.flip(step))
            case OrderStep() if "permutation" in parts:
                work.take(step, Value(perm=work.order(step)))
            case _:
                pass
    return work.element


def leading_axes(symmetry: Symmetry, params: Mapping[str, Tensor]) -> int:
    """Return the number of leading model axes of the parameters. A single network has no leading model axis."""
    first = next((name for name in symmetry.sites if name in params), None)
    return 0 if first is None else params[first].ndim - len(symmetry.shapes[first])


def is_regular(root: Float64[Tensor, "*lead k n"]) -> Bool[Tensor, "*lead"]:
    """Return whether the entries X on which a group acts have full rank, given the triangular matrix R of `X' =
    Q R`.
    """
    if root.shape[-2] < root.shape[-1]:
        return torch.zeros(root.shape[:-2], dtype=torch.bool)
    singular = torch.linalg.svdvals(root)
    found: Tensor = singular[..., -1] > SINGULAR * singular[..., 0]
    return found


def balance_by_rank(first: Float64[Tensor, "k n"], second: Float64[Tensor, "l n"]) -> Float64[Tensor, "n n"]:
    """Return the matrix A for which A X and A^-T Y have the same diagonal Gram matrix D in the first coordinates.

    Let `X' = Q R`, `Y' = P S` and `R S' = U D W'`, truncated to the rank of the product. The first rows of A are
    `D^-1/2 W' S`. The first rows of A's inverse transpose are `D^-1/2 U' R`. The remaining rows of A are orthogonal to
    the first rows of its inverse transpose. If X and Y span the same space, as after `without_null_spaces`, all
    coordinates beyond the rank are zero.

    Args:
        first: The triangular matrix R.
        second: The triangular matrix S.
    """
    u, d, wh = torch.linalg.svd(first @ second.mT, full_matrices=False)
    is_there = d > ROUNDING * torch.linalg.matrix_norm(first) * torch.linalg.matrix_norm(second)
    rank = min(_rank(first), _rank(second), int(is_there.sum()))
    sizes = d[:rank].sqrt().unsqueeze(-1)
    rows, others = wh[:rank] @ second / sizes, u.mT[:rank] @ first / sizes
    _, _, spanned = torch.linalg.svd(others, full_matrices=True)
    return torch.cat([rows, spanned[rank:]])


def whiten_by_rank(root: Float64[Tensor, "k n"], *, is_forward: bool) -> Float64[Tensor, "n n"]:
    """Return the matrix A that makes the Gram matrix of A X, or of A^-T X, the identity up to the rank."""
    _, singular, rows = torch.linalg.svd(root, full_matrices=True)
    sizes = singular[: _rank(root)].unsqueeze(-1)
    matrix: Tensor = rows.clone()
    matrix[: len(sizes)] *= 1 / sizes if is_forward else sizes
    return matrix


class _Work:
    """The current element, and the parameters that later steps read, transformed by the current element."""

    def __init__(self, symmetry: Symmetry, params: Mapping[str, Tensor], power: int, needed: frozenset[str]) -> None:
        self.symmetry, self.power, self.needed = symmetry, power, needed
        counted = [name for name in symmetry.sites if name not in symmetry.buffers]
        first = next(iter(symmetry.sites), None)
        self.lead = () if first is None else tuple(params[first].shape[: leading_axes(symmetry, params)])
        exact = {name: params[name].detach().to(device="cpu", dtype=torch.float64) for name in needed}
        self.tensors = symmetry.sums(exact)
        eps = max((torch.finfo(params[name].dtype).eps for name in counted), default=0.0)
        self.tolerance = min(TIE * eps, COARSEST)
        self.element = symmetry.identity(self.lead)

    def take(self, step: Step, value: Value) -> None:
        """Apply the value of one group to the network. Fields that the value lacks count as the identity."""
        name, is_order = step.group, isinstance(step, OrderStep)
        names = (name, *self.symmetry[name].within)
        fixed = tuple(self.symmetry[key] if is_order and key == name else self.symmetry[key].unordered for key in names)
        local = _moved_by(step, fixed, self.symmetry.shapes, self.needed)
        move = _element.identity(fixed, self.lead)
        move = move.replace(name, value.fill(move[name]))
        self.tensors |= local.act(move, {key: self.tensors[key] for key in local.sites})
        if is_order:
            blank = self.symmetry.identity(self.lead)
            self.element = self.symmetry.compose(blank.replace(name, move[name]), self.element)
        else:
            # Permutations are chosen after this kind of step, so that no group permutes values that others compare.
            so_far = Element({key: replace(self.element[key], perm=None) for key in names}, self.lead)
            product = _element.compose(fixed, move, so_far)[name]
            self.element = self.element.replace(name, replace(product, perm=self.element[name].perm))

    def values(self, place: GroupSite) -> Float[Tensor, "*lead size values"]:
        """Return, for each unit, the entries of one parameter that the group moves together with the unit.

        The leading axes are the model axes, followed by the bases of the group.
        """
        return unit_values(self.symmetry, place.name, place.site, self.tensors[place.name], len(self.lead))

    def _bases(self, group: Group) -> tuple[int, ...]:
        return tuple(self.symmetry[base].size for base in group.within)

    def scale(self, step: ScaleStep) -> Value:
        """Scale every unit such that its incoming weights have norm one. If the incoming weights of a unit are zero,
        the outgoing weights of the unit get norm one.

        A unit without any weights keeps its scale.
        """
        norm, spare, opposite = (self._norms(places) for places in (step.places, step.spare, step.opposite))
        norm = torch.where(norm > 0, norm, spare)
        factor = torch.where(norm > 0, 1 / norm, torch.where(opposite > 0, opposite, 1.0))
        return Value(scale=torch.stack([factor**power for power in step.direction], dim=-2))

    def _norms(self, places: Sequence[GroupSite]) -> Float[Tensor, "*lead"]:
        if not places:
            return torch.zeros(())
        values = torch.cat([self.values(place) for place in places], dim=-1)
        norms: Tensor = torch.linalg.vector_norm(values, self.power, dim=-1)
        return norms

    def balance(self, step: LinearStep) -> Value:
        """Compute the matrix `A = sqrt(D) U' R^-T`, which makes two Gram matrices equal to D, where `R S' = U D W'`.

        If the step has only one Gram matrix, it becomes the identity. A group may act on several copies of its units.
        In a copy whose rank is r, only r coordinates are balanced.
        """
        roots = [self._root(places) for places in (step.forward, step.inverse) if places]
        is_good = torch.stack([is_regular(root) for root in roots]).all(0)
        blank = torch.eye(roots[0].shape[-1], dtype=torch.float64)
        if any(root.shape[-2] < root.shape[-1] for root in roots):
            matrix = blank.expand(*is_good.shape, *blank.shape).clone()
        elif len(roots) == 2:
            first = torch.where(is_good[..., None, None], roots[0], blank)
            u, d, _ = torch.linalg.svd(first @ roots[1].mT)
            matrix = (u * d.sqrt().unsqueeze(-2)).mT @ torch.linalg.inv(first).mT
        else:
            first = torch.where(is_good[..., None, None], roots[0], blank)
            matrix = torch.linalg.inv(first).mT if step.forward else first
        for index in (~is_good).nonzero().tolist():
            own = [root[tuple(index)] for root in roots]
            is_pair, is_forward = len(own) == 2, bool(step.forward)
            matrix[tuple(index)] = balance_by_rank(*own) if is_pair else whiten_by_rank(*own, is_forward=is_forward)
        return Value(matrix=matrix)

    def _root(self, places: Sequence[GroupSite]) -> Float[Tensor, "*lead k n"]:
        """Return the triangular matrix R of `X' = Q R`, where X are the entries of some tensors along a group's axes.

        If there are too few entries, R has fewer rows than columns.
        """
        values = torch.cat([self.values(place) for place in places], dim=-1)
        root: Tensor = torch.linalg.qr(values.mT, mode="r").R
        return root

    def rotate(self, step: RotationStep) -> Value:
        """Return the eigenvectors of the Gram matrix as rows, in descending order of eigenvalues."""
        values = torch.cat([self.coordinates(p, w) for p, w in zip(step.places, step.weighed, strict=True)], dim=-1)
        squares, vectors = torch.linalg.eigh(values @ values.mT)
        # Directions in which all values are zero may be rotated into each other. All other eigenvalues must differ.
        smallest = SINGULAR * squares[..., -1:]
        is_distinct = ((squares.diff(dim=-1) > smallest) | (squares[..., 1:] <= smallest)).all(-1)
        found = vectors.flip(-1).mT
        if self.symmetry[step.group].keeps_ones:
            found = keeping_ones(found)
        if self.symmetry[step.group].is_proper:
            found = without_reflection(found.mT).mT
        blank = torch.eye(found.shape[-1], dtype=torch.float64)
        return Value(matrix=torch.where(is_distinct[..., None, None], found, blank))

    def coordinates(self, place: GroupSite, weighed: Sequence[GroupSite | int] = ()) -> Float[Tensor, "*lead n values"]:
        """Return the entries in coordinates that can be rotated, without the mean if rotations preserve the vector of
        ones.
        """
        tensor, lead = self.tensors[place.name], len(self.lead)
        for other in weighed:
            axis = other if isinstance(other, int) else other.site.placement.axis
            length = tensor.shape[lead + axis]
            numbers = torch.arange(length) if isinstance(other, int) else other.site.units
            weights = 1 + numbers.double() / length
            tensor = tensor * weights.reshape([-1 if k == axis else 1 for k in range(tensor.ndim - lead)])
        values = unit_values(self.symmetry, place.name, place.site, tensor, lead)
        return zero_sum_basis(values.shape[-2]) @ values if place.group.keeps_ones else values

    def reflect(self, step: SignStep) -> Value:
        """Return the diagonal matrix of signs that flips the selected coordinates."""
        signs = self.signs(step)
        if self.symmetry[step.group].is_proper:  # The other signs determine the last sign.
            signs = torch.cat([signs[..., :-1], signs[..., :-1].prod(-1, keepdim=True)], -1)
        matrix = torch.diag_embed(signs)
        return Value(matrix=keeping_ones(matrix) if self.symmetry[step.group].keeps_ones else matrix)

    def signs(self, step: SignStep) -> Float[Tensor, "*lead size"]:
        """Return, for each unit or rotated coordinate, the sign of the first odd power sum that is not zero."""
        signs = torch.zeros((), dtype=torch.float64)
        for place in step.places:
            values = self.coordinates(place)
            # Odd power sums change sign with the unit, and do not depend on the order of the values, which is chosen
            # later.
            for power in (1, 3):
                total, scale = values.pow(power).sum(-1), values.abs().pow(power).sum(-1)
                is_certain = total.abs() > self.tolerance * scale
                signs = torch.where((signs == 0) & is_certain, total.sign(), signs)
        signs += signs == 0
        return signs

    def flip(self, step: SignStep) -> Value:
        """Return signs that flip units in the selected sign families, and are plus one in all other families."""
        signs = self.signs(step).to(torch.int8)
        families = range(self.symmetry[step.group].signs)
        return Value(sign=torch.stack([signs if f in step.flips else torch.ones_like(signs) for f in families], dim=-2))

    def shift(self, step: ShiftStep) -> Value:
        """Return the numbers of half periods that bring the mean of the entries nearest to zero."""
        amount = step.place.site.placement.shift[step.family]
        # Both ends of the interval count as one point: the tolerance corrects a mean that rounding moved across an end.
        steps = -torch.ceil(self.values(step.place).mean(-1) / amount - 0.5 - self.tolerance).to(torch.int64)
        families = range(self.symmetry[step.group].shifts)
        return Value(shift=torch.stack([steps if f == step.family else steps * 0 for f in families], dim=-2))

    def order(self, step: OrderStep) -> Int[Tensor, "*lead size"]:
        """Return the ascending order of units, where units are only exchanged if structure tensors allow it."""
        group = self.symmetry[step.group]
        shape = (*self.lead, *self._bases(group), group.size)
        copies = torch.arange(torch.Size(shape[:-1]).numel()).repeat_interleave(group.size)
        given = copies * group.size + class_labels(group).repeat(len(copies) // group.size)
        classes = _Classes(given.numpy().copy(), group.size, self.tolerance)
        for column, scales in self._columns(step):
            if classes.is_distinct:
                break
            classes.refine(column, scales)
        order = torch.empty_like(copies)
        order[given.argsort(stable=True)] = torch.from_numpy(classes.order())
        return (order - copies * group.size).reshape(shape)

    def _columns(self, step: OrderStep) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield columns of numbers by which units are compared, each with the magnitudes to which its rounding errors
        are proportional.
        """
        # Sums of powers do not depend on the order of the values, which other groups may still choose; single entries
        # are compared only where all other axes are in order.
        for place in step.sums:
            values = self.values(place).flatten(0, -2)
            for power in (1, 2, 3):
                yield values.pow(power).sum(-1), values.abs().pow(power).sum(-1)
        for place in step.entries:
            values = self.values(place).flatten(0, -2)
            for column in values.unbind(-1):
                yield column, values.abs().amax(-1)


class _Classes:
    """An ordered partition of rows into classes of equal rows, which is refined column by column.

    Entries within a tolerance count as equal.
    """

    def __init__(self, classes: np.ndarray, size: int, tolerance: float) -> None:
        self._classes, self._size, self._tolerance = classes, size, tolerance

    @property
    def is_distinct(self) -> bool:
        """Whether all rows are in different classes."""
        return self._size == 1 or len(np.unique(self._classes)) == len(self._classes)

    def refine(self, values: Float[Tensor, " rows"], scales: Float[Tensor, " rows"]) -> None:
        """Refine the classes by entries whose rounding errors are proportional to `scales`."""
        column = values.numpy()
        order = np.lexsort((column, self._classes))
        sizes = scales.reshape(-1, self._size).amax(-1).repeat_interleave(self._size).numpy()
        # Neighboring values are compared: values in a chain of differences below the tolerance get the same class.
        # Therefore no two values that are equal up to rounding get different classes.
        is_new = np.diff(self._classes[order]) != 0
        is_new |= np.diff(column[order]) > self._tolerance * sizes[order][1:]
        self._classes[order] = np.concatenate([[0], np.cumsum(is_new)])

    def order(self) -> np.ndarray:
        """Return the rows ordered by class. Rows that are equal in all comparisons keep their original order."""
        return np.argsort(self._classes, kind="stable")


def _names_read(step: Step) -> frozenset[str]:
    """Return the names of the parameters that a step reads."""
    match step:
        case ScaleStep():
            places = (*step.places, *step.spare, *step.opposite)
        case LinearStep():
            places = (*step.forward, *step.inverse)
        case ShiftStep():
            places = (step.place,)
        case OrderStep():
            places = (*step.sums, *step.entries)
        case _:
            places = step.places
    return frozenset(place.name for place in places)


def _moved_by(
    step: Step, groups: tuple[Group, ...], shapes: Mapping[str, tuple[int, ...]], names: frozenset[str]
) -> Symmetry:
    """Return the part of a symmetry that a step needs: the tensors that the step changes, its group, and the groups
    within which its group is repeated.
    """

    def is_moved(place: Placement) -> bool:
        match step:
            case ScaleStep():
                return any(e * power for e, power in zip(place.scale, step.direction, strict=True))
            case SignStep(flips=(_, *_)):
                return bool(sum(place.sign[family] for family in step.flips) % 2)
        return True

    touched = {p.parameter for p in groups[0].placements if is_moved(p)} & names
    local = (replace(g, placements=tuple(p for p in g.placements if p.parameter in touched)) for g in groups)
    return Symmetry(tuple(local), {name: shapes[name] for name in touched})


def _rank(root: Float64[Tensor, "k n"]) -> int:
    singular = torch.linalg.svdvals(root)
    return int((singular > SINGULAR * singular[0]).sum())
