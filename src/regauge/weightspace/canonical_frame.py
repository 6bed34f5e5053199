"""Canonical forms of scales, signs and half periods.

Networks are transformed to canonical forms before a net reads them. Changes that the net computes are transformed back
to the original networks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regauge.canonical.carry_out import carry_out
from regauge.canonical.places import GroupSite
from regauge.canonical.step_plan import LinearStep, Plan, RotationStep, ShiftStep, SignStep, Step, plan
from regauge.core.element import Element
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.weightspace.layout.compile import Layout


@dataclass(frozen=True, eq=False)
class CanonicalFrame:
    """A function that brings networks of one architecture to a canonical form of their scales, signs, shifts and
    matrices.

    Attributes:
        symmetry: The symmetry of the networks.
        plan: The steps that bring a network to its canonical form.
        parts: The canonicalized parts of the symmetry: some of "sign", "scale", "shift" and "linear".
        open: The canonicalized parts for which the weights of at least one group do not determine a unique form.
            Canonical forms of networks from one orbit can differ in the parts in `open`.
        is_weighed: Whether the canonical form of a unit stays the same if the unit is split into two copies that divide
            its outgoing weights.
    """

    symmetry: Symmetry
    plan: Plan
    parts: tuple[str, ...]
    open: frozenset[str]
    is_weighed: bool

    @classmethod
    def of(cls, layout: Layout, parts: tuple[str, ...], left: tuple[str, ...] = ()) -> "CanonicalFrame":
        """Return a canonical form for the given parts of the symmetry. Layers must respect all parts without a
        canonical form.
        """
        found = plan(layout.symmetry)
        touched = {*layout.contracted}
        needed = [step for step in found.steps if step.group not in touched]
        places = (place for step in needed for place in getattr(step, "places", ()))
        if any(other.group.name in touched for place in places for other in place.others):
            needed = list(found.steps)  # Their values depend on those of the matrices.
        kept = tuple(step for step in needed if _part(step) in parts)
        still_open = {part for group, part in found.open if group not in touched and part in parts}
        if "sign" in left and any(map(_sees_signs, kept)):
            parts = (*parts, "sign")  # These steps choose by values that depend on signs.
            kept = tuple(step for step in needed if _part(step) in parts)
        if "scale" in left and kept:
            parts = (*parts, "scale")  # These sums over units depend on scales.
            kept = tuple(step for step in needed if _part(step) in parts)
        return cls(layout.symmetry, replace(found, steps=kept), parts, frozenset(still_open), layout.is_weighed)

    def __call__(self, params: Mapping[str, Tensor]) -> Element | None:
        """Return the element that brings each network to its canonical form, or None if no part is canonicalized."""
        if not self.plan.steps:
            return None
        with torch.no_grad():
            return carry_out(self.plan, self.symmetry, params, self.parts, power=1 if self.is_weighed else 2)

    def undo(self, element: Element | None, change: Params) -> Params:
        """Convert a change of the canonical networks to the corresponding change of the original networks."""
        if element is None:
            return change
        return self.without_shifts.act(self.symmetry.inverse(element), change)

    @cached_property
    def without_shifts(self) -> Symmetry:
        """The symmetry that acts on changes of networks, without half-period shifts.

        A half-period shift adds a constant to parameters, which cancels in differences of networks.
        """
        moving = self.symmetry.on_changes
        return replace(moving, groups=tuple(group.without("shift") for group in moving.groups))


def _sees_signs(step: Step) -> bool:
    """Return whether a step of the canonical form sums entries that other groups can multiply by signs."""
    if isinstance(step, ShiftStep):
        places: tuple[GroupSite, ...] = (step.place,)
    elif isinstance(step, SignStep):
        places = step.places
    else:
        return False
    return any(any(other.signs) for place in places for other in place.others)


def _part(step: object) -> str:
    """Return the part of the symmetry that a step canonicalizes."""
    if isinstance(step, LinearStep | RotationStep) or (isinstance(step, SignStep) and not step.flips):
        return "linear"
    names = {"ScaleStep": "scale", "ShiftStep": "shift", "SignStep": "sign"}
    return names.get(type(step).__name__, "permutation")
