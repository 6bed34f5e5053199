"""Coordinate ascent over families that share tensors, for many small problems at once.

All tensors have one leading axis of independent problems; each problem accepts a step only where it gains.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regauge.align.places import Family, Tensors, barycentre
from regauge.core import act as _act
from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.element import Element, Value

ROUNDS = 20
"""Most rounds of coordinate ascent."""
GAIN = 1e-9
"""A step must gain more than this share of the objective's scale, or rounding could keep it going."""

Solve = Callable[[Family, Tensors, Tensors], tuple[Element, Tensor]]
"""The best element of one family for each problem, and what it gains over the identity."""


class Problems:
    """Problems of one structure.

    Args:
        families: They share tensors, so that the best of one depends on the others.
        a: First networks, `[problem, ...]`.
        b: Second networks.
        solve: Solves one family exactly while the others stay.
    """

    def __init__(self, families: Sequence[Family], a: Tensors, b: Tensors, solve: Solve) -> None:
        self._families, self._a, self._start, self._solve = families, a, b, solve
        groups = {group.name: group for family in families for group in family.fixed}
        groups |= {group.name: group for family in families for group in family.members}
        self._groups = tuple(groups.values())
        norms = [a[key].flatten(1).norm(dim=1) * b[key].flatten(1).norm(dim=1) for key in a]
        self._least = GAIN * torch.stack(norms).double().sum(0).cpu()

    def solved(self) -> tuple[Element, Tensor]:
        """One element for each problem, and what it gains over the identity; it loses nowhere.

        It ascends from the identity and from the barycentre and keeps the better end of each problem.
        """
        blank = _element.identity(self._groups, (len(self._least),))
        ends = [self._ascend(blank, dict(self._start)), self._ascend(*self._barycentre(blank, dict(self._start)))]
        start = self._objectives(self._start)
        gains = [self._objectives(b) - start for _, b in ends]
        is_better = gains[1] > gains[0]
        return _choose(is_better, ends[1][0], ends[0][0]), torch.maximum(*gains)

    def _ascend(self, element: Element, b: dict[str, Tensor]) -> tuple[Element, dict[str, Tensor]]:
        reached = self._objectives(b)
        for _ in range(ROUNDS):
            is_moving = False
            for family in self._families:
                left, right = ({key: t[key] for key in family.sites} for t in (self._a, b))
                step, gain = self._solve(family, left, right)
                if not bool((gain > self._least).any()):
                    continue
                candidate, moved = self._stepped(family, step, element, b)
                objective = self._objectives(moved)
                is_better = objective > reached + self._least
                if bool(is_better.any()):
                    is_moving = True
                    element = _choose(is_better, candidate, element)
                    reached = torch.where(is_better, objective, reached)
                    b = {key: select(is_better, moved[key], b[key]) for key in b}
            if not is_moving:
                break
        return element, b

    def _barycentre(self, element: Element, b: dict[str, Tensor]) -> tuple[Element, dict[str, Tensor]]:
        """Every family chosen once, the best anchored first, with unknown ones averaged."""
        unknown = list(self._families)
        for family in sorted(self._families, key=lambda f: -self._anchored(f, unknown)):
            unknown = [other for other in unknown if other is not family]
            left, right = self._averaged(family, unknown, b)
            if left:
                partial = replace(family, sites={name: family.sites[name] for name in left})
                step, _ = self._solve(partial, left, right)
                element, b = self._stepped(family, step, element, b)
        return element, b

    def _stepped(
        self, family: Family, step: Element, element: Element, b: dict[str, Tensor]
    ) -> tuple[Element, dict[str, Tensor]]:
        """A family's step composed with what is known, and the tensors moved by it."""
        names = {group.name for group in family.members}
        whole = _element.identity(self._groups, step.batch)
        for name in names:
            whole = whole.replace(name, step[name])
        sites = {key: [s for s in local if s.group.name in names] for key, local in family.sites.items()}
        ndims = {key: b[key].ndim - 1 for key in sites}
        return _element.compose(self._groups, whole, element), _act.act(self._groups, sites, whole, b, ndims)

    def _objectives(self, b: Tensors) -> Tensor:
        """`<a, b> - (|b|^2 - |start|^2) / 2` of every problem; only shifts change the second part."""
        total = torch.zeros(len(self._least), dtype=torch.float64)
        for key in self._a:
            x, y, z = (t[key].flatten(1).double() for t in (self._a, b, self._start))
            total += (x * y - (y * y - z * z) / 2).sum(-1).cpu()
        return total

    def _averaged(
        self, family: Family, unknown: Sequence[Family], b: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        left, right = {}, {}
        for key in family.sites:
            sites: list[Site] = []
            for other in unknown:
                names = {group.name for group in other.members}
                if other is not family:
                    sites += [site for site in other.sites.get(key, ()) if site.group.name in names]
            x, y = barycentre(self._a[key], sites, 1), barycentre(b[key], sites, 1)
            if x is not None and y is not None:
                left[key], right[key] = x, y
        return left, right

    def _anchored(self, family: Family, unknown: Sequence[Family]) -> float:
        """The share of a family's tensors that its unknown neighbors cannot change."""
        left, right = self._averaged(family, unknown, self._start)
        known = sum(float(left[key].norm() * right[key].norm()) for key in left)
        return known / (sum(float(self._a[key].norm() * self._start[key].norm()) for key in family.sites) or 1.0)


def where(mask: Tensor, yes: Value, no: Value) -> Value:
    """One value where the mask is true, another elsewhere; the mask covers the leading axes."""
    fields = {}
    for key in ("perm", "scale", "sign", "shift", "matrix"):
        x, y = getattr(yes, key), getattr(no, key)
        if x is not None:
            fields[key] = select(mask, x, y)
    return Value(**fields)


def select(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`torch.where` with a mask of the leading axes."""
    return torch.where(mask.reshape(*mask.shape, *([1] * (yes.ndim - mask.ndim))).to(yes.device), yes, no)


def _choose(mask: Tensor, yes: Element, no: Element) -> Element:
    return Element({name: where(mask, yes[name], no[name]) for name in yes}, yes.batch)
