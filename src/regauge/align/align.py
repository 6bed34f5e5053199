"""`align`: bring one network as close as its symmetry allows to another."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.align.matching import Method
from regauge.align.weight_matching import WeightMatching
from regauge.core.element import Element
from regauge.core.params import Params, require_finite, require_same_shapes
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@dataclass(frozen=True)
class AlignResult:
    """The outcome of an alignment.

    Attributes:
        element: The element that moves the second network.
        params: The moved network, `act(element, params_b)`; it computes the same function.
        objective: What the method maximizes, at `element`.
        initial: The same at the identity; never larger than `objective`.
        history: Objective at the start of the best climb and after each of its sweeps; it never falls.
        is_converged: Whether no single group could be improved any more.
        starts: Objective that each climb reached, in the order in which they were tried.
    """

    element: Element
    params: Params
    objective: float
    initial: float
    history: tuple[float, ...]
    is_converged: bool
    starts: tuple[float, ...]

    @property
    def report(self) -> str:
        """How it went, and what to try for more."""
        sweeps = len(self.history) - 1
        climbs = f", best of {len(self.starts)} climbs" if len(self.starts) > 1 else ""
        gained = f"objective {self.initial:.6g} -> {self.objective:.6g} in {sweeps} sweeps{climbs}"
        if not self.is_converged:
            return f"{gained}; stopped before convergence: raise max_sweeps"
        return (
            f"{gained}; a local optimum: no single group can be improved; restarts or another method may find a "
            "better one"
        )

    def __str__(self) -> str:
        return self.report


def align(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> AlignResult:
    """Move the second network along its orbit, as close to the first as the method gets.

    The result is never worse than the identity on the method's own objective, and `params` computes the same
    function as `params_b`.

    Args:
        params_a: The network that stays.
        params_b: The network that moves, unchanged itself. Buffers move with it.
        symmetry: Of the architecture of both.
        method: How; `WeightMatching()` unless given.
        task: Model, data and loss, for the methods that use them.
        generator: Where chance comes from, for methods that use it. The same generator state gives the same
            result.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: The networks have different parameters, do not fit the symmetry, hold NaN or Inf, or are
            populations; or the method needs a task or a generator.
    """
    require_same_shapes(params_a, params_b)
    require_finite(params_a, "the first network")
    require_finite(params_b, "the second network")
    symmetry = symmetry.bind(params_b)
    for name in symmetry.sites:
        if params_b[name].ndim != len(symmetry.shapes[name]):
            raise ValueError(
                f"{name!r} has shape {tuple(params_b[name].shape)}, with a leading model axis: these are populations; "
                "align them with `regauge.align_pairs`, all pairs at once"
            )
    method = WeightMatching() if method is None else method
    found = method.match(params_a, params_b, symmetry, task=task, generator=generator)
    return AlignResult(
        element=found.element,
        params={**symmetry.act(found.element, params_b, skip=found.moved), **found.moved},
        objective=found.objective,
        initial=found.initial,
        history=found.history,
        is_converged=found.is_converged,
        starts=found.starts,
    )
