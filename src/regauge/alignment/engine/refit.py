"""Fitting of scales and matrices to the first network after units are matched, for networks that are nearly copies.

If each network is balanced separately, the single entry of a gain has as much influence as all entries of a filter. If
a gain is small compared with its noise, balancing determines the scale of its unit inaccurately. Balancing is also
inaccurate if a product of matrices has small singular values. Once units are matched, scales and matrices can be fitted
to the first network instead. After the fit, signs are optimized once more.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.alignment.engine.climbs import climb
from regauge.alignment.engine.frames import Frame, notes_on, stretching
from regauge.alignment.engine.paired_networks import act_on, at, dots
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.act import ReadValues, act
from regauge.core.balance import JOINED, Buffers, count_frozen_gains
from regauge.core.element import Element, Value
from regauge.core.families import Tensors, compared, connected, unit_values
from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry

NEAR = 0.05
"""Two networks count as nearly equal if their squared distance is below this fraction of their squared norm."""
EXACT = {4: 1e-13, 8: 1e-26}
"""The fraction of the squared norm below which networks count as equal up to rounding, and nothing is fitted.

The keys are the bytes per entry."""
SWEEPS = 100
"""The largest number of rounds of the fit over all groups."""
SETTLED = 1e-5
"""The fit ends if a round lowers the squared distance by less than this fraction."""
REMEMBERED = 5
"""The number of earlier rounds from which the next round is extrapolated."""
LONGEST_STEP = 1.0
"""The norm of the longest fitting step, in the logarithms of a unit's factors or in the entries of a matrix."""
FLAT = 1e-11
"""The fraction of the largest curvature below which a direction counts as flat and stays unchanged."""

HALVINGS = 40
"""The number of times that the search interval for the damping of a long step is halved."""

PerPair = Float64[Tensor, " pair"]


def refit_near_copies(problem: Problem, found: Results, frame: Frame) -> Results:
    """Fit second networks that nearly equal their first networks by scales and matrices; keep fits that lower the
    distance.
    """
    if frame.sides is None or not frame.a:
        return found
    symmetry = problem.symmetry
    sums = symmetry.sums(problem.a), symmetry.sums(found.params)
    element, is_closer = refit(symmetry.on_sums, frame.buffers, *sums)
    if not bool(is_closer.any()):
        return found
    element = symmetry.compose(element, found.element)
    notes = notes_on({name: flags & ~is_closer for name, flags in frame.rigid.items()})
    other = replace(found, element=element, params=problem.move(element))
    return replace(found.but(is_closer, other), notes=notes)


def refit(symmetry: Symmetry, buffers: Buffers, params_a: Tensors, params_b: Tensors) -> tuple[Element, Tensor]:
    """Return elements that bring second networks closer to nearly equal first networks, and a mask of the pairs that
    came closer.

    All tensors have shape `[pair, ...]`. For all pairs outside the mask, the element is the identity.
    """
    symmetry = count_frozen_gains(symmetry, buffers)
    a, b = compared([params_a, params_b], symmetry)
    pairs = len(next(iter(params_b.values())))
    blank, is_closer = symmetry.identity((pairs,)), torch.zeros(pairs, dtype=torch.bool)
    groups = fitted_groups(symmetry, buffers)
    if not a or not groups:
        return blank, is_closer
    before, norm = squared_distances(a, b), torch.stack([dots(t, t) for t in a.values()]).sum(0)
    is_double = all(t.dtype == torch.float64 for tensors in (a, b) for t in tensors.values())
    rows = is_near_copy(before, norm, is_double=is_double).nonzero().flatten()
    if not len(rows):
        return blank, is_closer
    a, b = ({name: at(t, rows) for name, t in tensors.items()} for tensors in (a, b))
    total, now, given = symmetry.identity((len(rows),)), before[rows], b
    steps: list[Callable[[Tensors], tuple[Element, Tensor]]] = [
        lambda b: _fit_parts(symmetry, groups, a, b),
        lambda b: _match(symmetry, a, b),
        lambda b: _fit_parts(symmetry, groups, a, b),
    ]
    for step in steps:
        element, after = step(b)
        better, is_much = after < now, now - after > SETTLED * now
        total = symmetry.compose(element, total).where(better, total)
        now = torch.where(better, after, now)
        if not bool(is_much.any()):
            break  # Further steps would gain almost nothing.
        b = _move(symmetry, total, given)
    is_closer[rows] = now < before[rows]
    return blank.zip(total, lambda here, there: here.index_copy(0, rows, there.to(here.dtype))), is_closer


def is_near_copy(square: Tensor, norm: Tensor, *, is_double: bool = False) -> Tensor:
    """Return whether a squared distance is small relative to the squared norm, but not zero."""
    return (square < NEAR * norm) & (square > EXACT[8 if is_double else 4] * norm)


def _match(symmetry: Symmetry, a: Tensors, b: Tensors) -> tuple[Element, Tensor]:
    """Optimize permutations, signs and rotations once more.

    Return the optimized element and the remaining squared distances.
    """
    element = climb(symmetry, a, b).element
    return element, squared_distances(a, _move(symmetry, element, b))


def _fit_parts(symmetry: Symmetry, groups: Collection[Group], a: Tensors, b: Tensors) -> tuple[Element, PerPair]:
    """Fit the independent sets of tensors one after the other, as for networks on disk.

    Therefore the extrapolation of one set does not depend on other sets.
    """
    total, left = symmetry.identity((len(next(iter(a.values()))),)), squared_distances(a, b)
    for part in fitted_parts(symmetry, groups, a):
        x, y = ({name: tensors[name] for name in a if name in part} for tensors in (a, b))
        own = [group for group in groups if any(place.parameter in part for place in group.placements)]
        found, after = fit_continuous(symmetry, own, x, y)
        total = join(total, {group.name: found[group.name] for group in own})
        left = left - squared_distances(x, y) + after
    return total, left


def _move(symmetry: Symmetry, element: Element, tensors: Tensors) -> dict[str, Tensor]:
    return act_on(symmetry.groups, {name: symmetry.sites[name] for name in tensors}, element, tensors)


class GroupFit:
    """A Gauss-Newton step of one group's scales or matrices, computed from sums over the group's tensors.

    The step X of the second networks y towards the first networks x minimizes `sum |x - y - X y|^2` over all axes of
    tensors on which the group acts. For scales, the step X multiplies each unit by factors: the exponents of its
    families times steps t. The steps t of a unit solve its normal equations. A matrix changes `y` to `(1 + X) y` where
    it acts, and to `(1 - X') y` where its inverse acts. Hence X solves `X F + G X = sum (x - y) y' - sum y (x - y)'`,
    with Gram matrices F and G of the entries on which the matrix and its inverse act. If a group acts on several axes
    of one tensor, the curvature along each axis is multiplied by a factor. The sum of the multiplied curvatures is
    never below the true curvature.

    Attributes:
        sites: The axes of compared tensors on which the group acts.
    """

    def __init__(self, symmetry: Symmetry, group: Group) -> None:
        self.group, self._symmetry = group, symmetry
        self._sums: dict[str, Tensor] = {}
        is_linear = group.matrix == "linear"
        own = {name: [s for s in local if s.group.name == group.name] for name, local in symmetry.sites.items()}
        moved = {n: [s for s in local if is_linear or any(s.placement.scale)] for n, local in own.items()}
        self.sites = {name: local for name, local in moved.items() if local and name not in symmetry.buffers}

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        """Add the terms of one tensor of both networks, `[pair, *shape]`."""
        sites, is_linear = self.sites[name], self.group.matrix == "linear"
        shared = len({site.placement.axis for site in sites})
        for site in sites:
            values = unit_values(self._symmetry, name, site, y, 1).double()
            gap = unit_values(self._symmetry, name, site, x, 1).double() - values
            if is_linear and site.placement.is_inverse:
                self._count("inverse", shared * (values @ values.mT))
                self._count("right", -values @ gap.mT)
            elif is_linear:
                self._count("forward", shared * (values @ values.mT))
                self._count("right", gap @ values.mT)
            else:
                exponents = torch.tensor(site.placement.scale, dtype=torch.float64)
                self._count(
                    "curvature", shared * values.square().sum(-1).cpu()[..., None, None] * exponents.outer(exponents)
                )
                self._count("right", (values * gap).sum(-1).cpu().unsqueeze(-1) * exponents)

    def _count(self, key: str, term: Tensor) -> None:
        self._sums[key] = self._sums[key] + term.cpu() if key in self._sums else term.cpu()

    def step(self) -> tuple[Value, PerPair]:
        """Return the step, and the predicted decrease of the squared distance (to first order). Reset all sums."""
        sums, self._sums = self._sums, {}
        right = sums["right"]
        if self.group.matrix == "linear":
            none = torch.zeros_like(right)
            # exp(X) is 1 + X to first order, always invertible, and its inverse transpose is exp(-X').
            step = _sylvester(sums.get("forward", none), sums.get("inverse", none), right)
            return Value(matrix=torch.linalg.matrix_exp(step)), (step * right).flatten(1).sum(1)
        values, vectors = torch.linalg.eigh(sums["curvature"])
        step = (vectors @ _solve(values, (vectors.mT @ right.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)).squeeze(-1)
        return Value(scale=step.movedim(-1, -2).exp()), (step * right).flatten(1).sum(1)


def fit_continuous(symmetry: Symmetry, groups: Collection[Group], a: Tensors, b: Tensors) -> tuple[Element, PerPair]:
    """Fit scales and matrices that bring B as close as possible to A in each pair, and return the fit.

    All computations are in double precision. Small tensors are updated step by step. Large tensors are transformed from
    their given entries each time, which needs no memory for copies.

    Args:
        symmetry: The symmetry. All sizes of its groups must be known.
        groups: The groups whose scales or matrices are fitted; see `fitted_groups`.
        a: The compared tensors of the first networks, `[pair, ...]`.
        b: The compared tensors of the second networks.

    Returns:
        The fitted element, and the remaining squared distances.

    References:
        Nocedal and Wright (2006), Numerical Optimization, section 10.3, for Gauss-Newton steps; Bartels and Stewart
        (1972), Solution of the matrix equation AX + XB = C.
    """
    pairs = len(next(iter(a.values())))
    blank = symmetry.identity((pairs,))
    every = (GroupFit(symmetry, group) for group in groups)
    fits = [(fit, names) for fit in every if (names := [name for name in a if name in fit.sites])]
    total = ReadValues(stretching(symmetry, blank))
    is_small = sum(tensor.numel() for tensor in b.values()) <= JOINED

    def moved(name: str) -> Tensor:
        sites, ndims = {name: symmetry.sites[name]}, {name: b[name].ndim - 1}
        return act(symmetry.groups, sites, total.element, {name: b[name].double()}, ndims, total)[name]

    def step(names: Sequence[str], group: Group, value: Value) -> dict[str, Tensor]:
        sites = {n: [site for site in symmetry.sites[n] if site.group.name == group.name] for n in names}
        own, ndims = {n: here[n] for n in names}, {n: b[n].ndim - 1 for n in names}
        return act((group,), sites, Element({group.name: value}, (pairs,)), own, ndims)

    here = {name: b[name].double() for name in b} if is_small else {}
    left, best = squared_distances(a, b), total.element
    rounds, is_plain = Extrapolation([fit.group.name for fit, _ in fits]), True
    for _ in range(SWEEPS):
        lowered, start = torch.zeros(pairs, dtype=torch.float64), total.element
        for fit, names in fits:
            for name in names:
                fit.add(name, a[name], here[name] if is_small else moved(name))
            value, gain = fit.step()
            known, lowered = total.element[fit.group.name], lowered + gain
            both = known.zip(value, torch.mul if known.matrix is None else lambda before, after: after @ before)
            total = total.replaced(fit.group.name, both)
            here |= step(names, fit.group, value) if is_small else {}
        gaps = [squared_distances({n: a[n]}, {n: here[n] if is_small else moved(n)}) for n in a]
        after = torch.stack(gaps).sum(0)
        better = after < left
        best, left = total.element.where(better, best), torch.minimum(after, left)
        if bool(((lowered <= SETTLED * left) | (~better & is_plain)).all()):
            break
        is_plain = not bool(better.all())
        if is_plain:
            rounds = Extrapolation([fit.group.name for fit, _ in fits])
        total = ReadValues(best if is_plain else rounds.extrapolate(start, total.element))
        here |= {name: moved(name) for name in here}
    return best.fill(blank), left


class Extrapolation:
    """Anderson acceleration: a linear extrapolation of the latest rounds of steps to their limit.

    Each round changes the logarithms of scales and the entries of matrices. The extrapolation chooses the linear
    combination of the latest rounds with the smallest change.

    Args:
        groups: The names of the groups that the rounds change.

    References:
        Walker and Ni (2011), Anderson acceleration for fixed-point iterations, equation 2.3.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = groups
        self._ends: list[Tensor] = []
        self._changes: list[Tensor] = []

    def extrapolate(self, start: Element, end: Element) -> Element:
        """Return the element from which the next round continues.

        After the first round, the result of that round is returned.
        """
        last = self._flat(end)
        self._ends = [*self._ends[-REMEMBERED:], last]
        self._changes = [*self._changes[-REMEMBERED:], last - self._flat(start)]
        if len(self._ends) == 1:
            return end
        ends, changes = torch.stack(self._ends, -1), torch.stack(self._changes, -1)
        shares = torch.linalg.lstsq(changes.diff(dim=-1), changes[..., -1:]).solution
        found = (ends[..., -1:] - ends.diff(dim=-1) @ shares).squeeze(-1)
        sizes = [self._part(end[name]).shape[1] for name in self._groups]
        for name, part in zip(self._groups, found.split(sizes, 1), strict=True):
            scale, matrix = end[name].scale, end[name].matrix
            value = Value(matrix=part.reshape_as(matrix)) if matrix is not None else Value()
            value = value if scale is None else Value(scale=part.reshape_as(scale).exp())
            end = end.replace(name, value)
        return end

    def _flat(self, element: Element) -> Tensor:
        return torch.cat([self._part(element[name]) for name in self._groups], 1)

    def _part(self, value: Value) -> Tensor:
        tensor = value.matrix if value.scale is None else value.scale.log()
        assert tensor is not None
        return tensor.flatten(1)


def fitted_groups(symmetry: Symmetry, buffers: Buffers) -> list[Group]:
    """Return the groups whose scales or matrices are fitted.

    Scales that change running statistics are included only if balancing may change running statistics.
    """
    is_kept = {g.name: buffers == "keep" and _moves_statistics(symmetry, g) for g in symmetry.groups}
    return [g for g in symmetry.groups if g.matrix == "linear" or (g.scales and not is_kept[g.name])]


def fitted_parts(symmetry: Symmetry, groups: Collection[Group], names: Collection[str]) -> list[frozenset[str]]:
    """Return the tensors that `fit_continuous` uses, as sets that can be fitted independently."""
    moved: dict[tuple[str, int], set[str]] = {}
    for group in groups:
        for place in (place for place in group.placements if place.parameter in names):
            families = [k for k, exponent in enumerate(place.scale) if exponent]
            for family in [-1] if group.matrix == "linear" else families:
                moved.setdefault((group.name, family), set()).add(place.parameter)
    return connected(moved.values())


def join(known: Element, found: Mapping[str, Value]) -> Element:
    """Return the element that combines two fits of different scales and matrices."""
    for name, value in found.items():
        here = known[name]
        scale = None if here.scale is None or value.scale is None else here.scale * value.scale
        matrix = here.matrix if value.matrix is None else value.matrix
        known = known.replace(name, replace(here, scale=scale, matrix=matrix))
    return known


def squared_distances(a: Tensors, b: Tensors) -> PerPair:
    """Return the squared distance between the two networks of each pair."""
    gaps = (a[name] - b[name] for name in a)
    return torch.stack([dots(gap, gap) for gap in gaps]).sum(0)


def _sylvester(
    forward: Float64[Tensor, "*lead n n"], inverse: Float64[Tensor, "*lead n n"], right: Float64[Tensor, "*lead n n"]
) -> Float64[Tensor, "*lead n n"]:
    """Return the smallest solution X of `X F + G X = R`, or the least-squares solution, for semidefinite F and G."""
    # In the eigenvectors of F and G the equation is diagonal: (g_i + f_j) X_ij = R_ij.
    f, columns = torch.linalg.eigh(forward)
    g, rows = torch.linalg.eigh(inverse)
    sums = g.clamp_min(0).unsqueeze(-1) + f.clamp_min(0).unsqueeze(-2)
    inner = _solve(sums.flatten(-2), (rows.mT @ right @ columns).flatten(-2)).reshape(sums.shape)
    found: Tensor = rows @ inner @ columns.mT
    return found


def _solve(curvature: Float64[Tensor, "*lead k"], right: Float64[Tensor, "*lead k"]) -> Float64[Tensor, "*lead k"]:
    """Return `right / (curvature + d)` with the smallest d >= 0 for which the result is short enough, and zero in flat
    directions.

    Poorly determined directions therefore do not slow down the steps in well-determined directions.
    """
    is_flat = curvature <= FLAT * curvature.amax(-1, keepdim=True)
    right, curvature = torch.where(is_flat, 0.0, right), torch.where(is_flat, 1.0, curvature)
    if bool(((right / curvature).square().sum(-1) <= LONGEST_STEP**2).all()):
        return right / curvature
    low, high = torch.zeros_like(right[..., :1]), right.norm(dim=-1, keepdim=True) / LONGEST_STEP
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_long = (right / (curvature + middle)).square().sum(-1, keepdim=True) > LONGEST_STEP**2
        low, high = torch.where(is_long, middle, low), torch.where(is_long, high, middle)
    is_short = (right / curvature).square().sum(-1, keepdim=True) <= LONGEST_STEP**2
    return right / (curvature + torch.where(is_short, 0.0, high))


def _moves_statistics(symmetry: Symmetry, group: Group) -> bool:
    return any(place.parameter in symmetry.buffers and any(place.scale) for place in group.placements)
