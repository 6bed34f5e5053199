"""LearnedRotation: descent over the rotations of all groups for small rounding errors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regauge.core.act import act
from regauge.core.element import Element, Value
from regauge.core.groups import Group
from regauge.core.rotations import zero_sum_basis
from regauge.core.symmetry import Symmetry
from regauge.gauging.method import GaugeMethod, GaugeProblem, fixed_reasons
from regauge.gauging.methods.rotations import Hadamard, Weights
from regauge.gauging.moves import Move
from regauge.gauging.result import Chosen
from regauge.gauging.rounding import FOUR_BITS, RoundToNearest, layer_rows


@dataclass(frozen=True)
class LearnedRotation(GaugeMethod):
    """Rotations of every orthogonal and linear group, found by descent.

    It begins at the identity or where Hadamard matrices lead, whichever is better. Rotations are `C(A) R_0` with
    Cayley's map `C(A) = (1 - A)^-1 (1 + A)` of a skew matrix A for each copy of a group. What descends is the expected
    rounding error, `sum over scales of range^2`, relative to the norm of each layer; the best rotation by the true
    error is kept. Unlike in the paper no data are used and the loss is that of the weights.

    The objective is the ratio of signal to rounding noise of the weights of all layers, in dB.

    Attributes:
        scheme: How weights are rounded.
        steps: Of Adam.
        lr: Its rate at the start; it falls to zero along a line.

    References:
        Liu et al. (2024), SpinQuant, section 3.2, for descent on rotations by Cayley's map.
    """

    scheme: RoundToNearest = FOUR_BITS
    steps: int = 100
    lr: float = 0.01

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0:
            raise ValueError(f"steps is {self.steps} and lr is {self.lr}, but both must be positive")

    def choose(self, problem: GaugeProblem) -> Chosen:
        """The best rotations met on the way."""
        found = problem.uncovered
        symmetry, before = found.symmetry, found.before
        fixed = fixed_reasons(problem.symmetry, found)
        initial = Weights(problem.params, problem.symmetry, self.scheme).decibels
        groups = [group for group in symmetry.groups if group.matrix != "none"]
        if not groups:
            return Chosen((), initial, initial, (initial,), "dB", fixed, ("there is nothing to rotate",))
        start = problem.params if before is None else before(problem.params)
        best, reached, history = symmetry.identity(), initial, [initial]
        flat = Hadamard(self.scheme).rotate(symmetry, problem.generator)
        starts = (symmetry.identity(), flat)
        element = max(starts, key=lambda one: Weights(_moved(start, symmetry, one), symmetry, self.scheme).decibels)
        skew = {group.name: _skew_start(group, symmetry).requires_grad_() for group in groups}
        optimizer = torch.optim.Adam(list(skew.values()), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, self.steps)
        loss = _Loss(start, symmetry, self.scheme)
        with torch.enable_grad():
            for _ in range(self.steps + 1):
                turned = _turn(element, symmetry, groups, skew)
                objective = Weights(_moved(start, symmetry, turned), symmetry, self.scheme).decibels
                if objective > reached:
                    best, reached = turned, objective
                history.append(reached)
                optimizer.zero_grad()
                loss(_turn(element, symmetry, groups, skew, is_tracked=True)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
        if reached == initial:
            notes = ("the network stays as it is: no rotation on the way makes rounding better",)
            return Chosen((), initial, initial, tuple(history), "dB", fixed, notes)
        moves = (*([] if before is None else [before]), Move(symmetry, best))
        return Chosen(moves, reached, initial, tuple(history), "dB", fixed)


class _Loss:
    """The expected rounding error of all layers, relative to the norm of each, as a function of the element."""

    def __init__(self, params: Mapping[str, Tensor], symmetry: Symmetry, scheme: RoundToNearest) -> None:
        self._symmetry, self._scheme = symmetry, scheme
        self._rows = {name: r for name, r in layer_rows(symmetry).items() if name in symmetry.sites and name in params}
        self._params = {name: params[name] for name in self._rows}
        self._weight = {
            name: tensor.numel() / max(float(tensor.square().sum()), 1e-30) for name, tensor in self._params.items()
        }
        self._whole = max(sum(tensor.numel() for tensor in self._params.values()), 1)

    def __call__(self, element: Element) -> Tensor:
        moved = _moved(self._params, self._symmetry, element)
        terms = [self._scheme.range_squares(moved[n], rows) * self._weight[n] for n, rows in self._rows.items()]
        return torch.stack(terms).sum() / self._whole


def _moved(params: Mapping[str, Tensor], symmetry: Symmetry, element: Element) -> dict[str, Tensor]:
    sites = {name: local for name, local in symmetry.sites.items() if name in params}
    return act(symmetry.groups, sites, element, params, {name: params[name].ndim for name in sites})


def _skew_start(group: Group, symmetry: Symmetry) -> Tensor:
    n = group.size - group.keeps_ones
    lead = tuple(symmetry[base].size for base in group.within)
    return torch.zeros(*lead, n, n, dtype=torch.float64)


def _turn(
    element: Element, symmetry: Symmetry, groups: list[Group], skew: Mapping[str, Tensor], *, is_tracked: bool = False
) -> Element:
    """The element turned on by Cayley's map."""
    values: dict[str, Value] = dict(element.items())
    for group in groups:
        raw = skew[group.name] if is_tracked else skew[group.name].detach()
        a = raw - raw.mT
        one = torch.eye(a.shape[-1], dtype=a.dtype)
        turn = torch.linalg.solve(one - a, one + a)
        if group.keeps_ones:
            basis = zero_sum_basis(group.size)
            turn = basis.mT @ turn @ basis + 1 / group.size
        known = values[group.name].matrix
        assert known is not None
        values[group.name] = replace(values[group.name], matrix=turn @ known)
    return Element(values)
