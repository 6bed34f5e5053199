"""`align`: bring one network as close as its symmetry allows to another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from regauge.alignment.matching import Matching, Method
from regauge.alignment.methods.activation_matching import MixedMatching
from regauge.alignment.methods.stack_matching import Stack, StackMethod, move_stack, require_entries, require_stack
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.core.element import Element
from regauge.core.params import Params, require_finite, require_same_shapes
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

Moved = TypeVar("Moved")
StackType = TypeVar("StackType", bound=Stack)


@dataclass(frozen=True)
class AlignResult(Generic[Moved]):
    """The outcome of an alignment.

    Attributes:
        element: The element that moves the second network.
        params: The moved network, `act(element, params_b)`; it computes the same function. Of a stack, the moved
            stack, of the same type.
        objective: What the method maximizes, at `element`.
        initial: The same at the identity; never larger than `objective`.
        history: Objective at the start of the best climb and after each of its sweeps; it never falls.
        is_converged: Whether no single group could be improved any more.
        starts: Objective that each climb reached, in the order in which they were tried.
        is_judged: Whether a task could tell how good the result is; weights alone cannot.
    """

    element: Element
    params: Moved
    objective: float
    initial: float
    history: tuple[float, ...]
    is_converged: bool
    starts: tuple[float, ...]
    is_judged: bool

    @property
    def report(self) -> str:
        """How it went, and what to try for more."""
        steps = len(self.history) - 1
        tries = f", best of {len(self.starts)}" if len(self.starts) > 1 else ""
        gained = f"objective {self.initial:.6g} -> {self.objective:.6g} in {steps} steps{tries}"
        if not self.is_converged:
            return f"{gained}; it was still moving when it stopped: allow the method more sweeps or steps"
        if self.is_judged:
            return f"{gained}; a local optimum: restarts or another method may find a better one"
        return (
            f"{gained}; a local optimum of the method's own objective, which does not tell how high the barrier is: "
            "measure that with `regauge.line`, or give a task, by which methods and restarts are judged"
        )

    def __str__(self) -> str:
        return self.report


@overload
def align(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> AlignResult[Params]: ...


@overload
def align(
    params_a: StackType,
    params_b: StackType,
    symmetry: Symmetry,
    *,
    method: StackMethod,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> AlignResult[StackType]: ...


def align(
    params_a: Mapping[str, Tensor] | Stack,
    params_b: Mapping[str, Tensor] | Stack,
    symmetry: Symmetry,
    *,
    method: Method | StackMethod | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> AlignResult[Any]:
    """Move the second network along its orbit, as close to the first as the method gets.

    The result is never worse than the identity on the method's own objective, and `params` computes the same
    function as `params_b`.

    Args:
        params_a: The network that stays; for methods that take stacks (`GaussianMatching`, `StackMatching`) a
            tuple of dictionaries.
        params_b: The network that moves, unchanged itself. Buffers move with it.
        symmetry: Of the architecture of both.
        method: How; unless given `MixedMatching()` where there is a task, else `WeightMatching()`.
        task: Model, data and loss, for the methods that use them.
        generator: Where chance comes from, for methods that use it. The same generator state gives the same
            result.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        TypeError: The method takes a stack and got single networks, or the other way around.
        ValueError: The networks have different parameters, do not fit the symmetry, hold NaN or Inf, or are
            populations; or the method needs a task or a generator.
    """
    if method is None:
        method = WeightMatching() if task is None else MixedMatching()
    if isinstance(method, StackMethod):
        return _align_stacks(params_a, params_b, symmetry, method, task, generator)
    if not isinstance(params_a, Mapping) or not isinstance(params_b, Mapping):
        raise TypeError(
            f"{type(method).__name__} aligns one dictionary of parameters with another, not "
            f"{type(params_a).__name__} with {type(params_b).__name__}; for means and standard deviations use "
            "`regauge.GaussianMatching()`, for other tuples of dictionaries `regauge.StackMatching(roles)`"
        )
    symmetry = _checked(params_a, params_b, symmetry)
    found = method.match(params_a, params_b, symmetry, task=task, generator=generator)
    moved = {**symmetry.act(found.element, params_b, skip=found.moved), **found.moved}
    return _result(found, moved, task is not None)


def _align_stacks(
    stack_a: Mapping[str, Tensor] | Stack,
    stack_b: Mapping[str, Tensor] | Stack,
    symmetry: Symmetry,
    method: StackMethod,
    task: Task | None,
    generator: torch.Generator | None,
) -> AlignResult[Stack]:
    a, b = require_stack(stack_a, method), require_stack(stack_b, method)
    symmetry = _checked(a[0], b[0], symmetry)
    for stack, label in ((a, "the first network"), (b, "the second network")):
        require_entries(a, stack, label)
    found = method.match(a, b, symmetry, task=task, generator=generator)
    moved = move_stack(symmetry, method.roles, found.element, b, moved=found.moved)
    return _result(found, moved, task is not None)


def _checked(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], symmetry: Symmetry) -> Symmetry:
    """The symmetry with every size known; both networks are fit to be matched under it."""
    require_same_shapes(params_a, params_b)
    require_finite(params_a, "the first network")
    require_finite(params_b, "the second network")
    symmetry = symmetry.bind(params_b)
    for params in (params_a, params_b):
        symmetry.require_ones(params)
    for name in symmetry.sites:
        if params_b[name].ndim != len(symmetry.shapes[name]):
            raise ValueError(
                f"{name!r} has shape {tuple(params_b[name].shape)}, with a leading model axis: these are populations; "
                "align them with `regauge.align_pairs`, all pairs at once"
            )
    return symmetry


def _result(found: Matching, params: Moved, is_judged: bool) -> AlignResult[Moved]:
    return AlignResult(
        element=found.element,
        params=params,
        objective=found.objective,
        initial=found.initial,
        history=found.history,
        is_converged=found.is_converged,
        starts=found.starts,
        is_judged=is_judged,
    )
