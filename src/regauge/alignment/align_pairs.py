"""`align_pairs`: bring each of many networks as close as its symmetry allows to its partner."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.alignment.matching import Method
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.pairs import PairsMethod, match_each
from regauge.core.element import Element
from regauge.core.params import Params, require_finite, require_same_shapes
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@dataclass(frozen=True)
class AlignPairsResult:
    """The outcome of aligning many pairs.

    Attributes:
        element: A batch of elements; each moves its second network.
        params: The moved population, `act(element, params_b)`.
        objective: What the method maximizes, at `element`, float64 `[pairs]`.
        initial: The same at the identity; nowhere larger than `objective`.
        history: Objective at the start of each pair's best climb and after each step, float64 `[steps + 1, pairs]`;
            it never falls. Pairs that ended earlier repeat their last value.
        is_converged: Whether no single group of a pair could be improved any more, bool `[pairs]`.
    """

    element: Element
    params: Params
    objective: Tensor
    initial: Tensor
    history: Tensor
    is_converged: Tensor

    @property
    def report(self) -> str:
        """How it went, and what to try for more."""
        pairs, converged = len(self.objective), int(self.is_converged.sum())
        gained = (
            f"{pairs} pairs: mean objective {float(self.initial.mean()):.6g} -> {float(self.objective.mean()):.6g} "
            f"in at most {len(self.history) - 1} steps"
        )
        if converged < pairs:
            return f"{gained}; {pairs - converged} were still moving when they stopped: allow more sweeps or steps"
        return f"{gained}; local optima: restarts or another method may find better ones"

    def __str__(self) -> str:
        return self.report


def align_pairs(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> AlignPairsResult:
    """Move every network of a population along its orbit, as close to its partner as the method gets.

    Pair k is network k of the first population and network k of the second; a single first network is the
    partner of all. For every pair the outcome is as from `align`: never worse than the identity on the method's
    own objective, computing the same function. Methods with a batched form (`PairsMethod`, such as
    `WeightMatching`) take all pairs at once, which for small networks is many times faster than a loop; others
    are run pair by pair.

    Args:
        params_a: The networks that stay, with one leading model axis on every tensor, or a single one without.
        params_b: The networks that move, with one leading model axis on every tensor, unchanged themselves.
            Buffers move with them.
        symmetry: Of the architecture of all.
        method: How; `WeightMatching()` unless given.
        task: Model, data and loss, for the methods that use them.
        generator: Where chance comes from, for methods that use it.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: The networks have different parameters, do not fit the symmetry or one another in number, or
            hold NaN or Inf; or the method needs a task or a generator.
    """
    symmetry = symmetry.bind(params_b)
    count = _number_of_networks(params_b, symmetry)
    is_reference = _is_reference(params_a, params_b, symmetry, count)
    if is_reference:
        require_finite(params_a, "the first network")
        params_a = {name: tensor.expand(count, *tensor.shape) for name, tensor in params_a.items()}
    else:
        _require_finite_networks(params_a, "first")
    _require_finite_networks(params_b, "second")
    for params in (params_a, params_b):
        symmetry.require_ones(params)
    method = WeightMatching() if method is None else method
    if isinstance(method, PairsMethod):
        found = method.match_pairs(params_a, params_b, symmetry, task=task, generator=generator)
    else:
        found = match_each(method, params_a, params_b, symmetry, task=task, generator=generator)
    return AlignPairsResult(
        element=found.element,
        params={**symmetry.act(found.element, params_b, skip=found.moved), **found.moved},
        objective=found.objective,
        initial=found.initial,
        history=found.history,
        is_converged=found.is_converged,
    )


def _number_of_networks(params_b: Mapping[str, Tensor], symmetry: Symmetry) -> int:
    """The length of the leading model axis that every tensor of the second population must have."""
    for name in symmetry.sites:
        if params_b[name].ndim != len(symmetry.shapes[name]) + 1:
            raise ValueError(
                f"{name!r} of the second networks has shape {tuple(params_b[name].shape)}, without one leading model "
                "axis; stack the networks along a new first axis, or align a single pair with `regauge.align`"
            )
    counts = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in params_b.items()}
    name, count = next(iter(counts.items()), ("", 0))
    for other, n in counts.items():
        if n != count or n == 0:
            raise ValueError(
                f"{other!r} has {n} networks along its leading model axis and {name!r} has {count}; every tensor of a "
                "population (buffers too) needs one entry for each of its networks, and there must be at least one"
            )
    if not counts:
        raise ValueError("the second networks have no parameters, so there is nothing to align")
    return count


def _is_reference(
    params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], symmetry: Symmetry, count: int
) -> bool:
    """Whether the first networks are a single one; its parameters must be those of the second ones."""
    first = next((name for name in (*symmetry.sites, *params_b) if name in params_a), None)
    is_reference = first is not None and params_a[first].ndim == params_b[first].ndim - 1
    if is_reference:
        require_same_shapes(params_a, {name: tensor[0] for name, tensor in params_b.items()})
        return True
    if first is not None and params_a[first].ndim and params_a[first].shape[0] != count:
        raise ValueError(
            f"there are {params_a[first].shape[0]} first networks and {count} second ones (along the leading axis of "
            f"{first!r}); give as many of both, or a single first network without a model axis"
        )
    require_same_shapes(params_a, params_b)
    return False


def _require_finite_networks(params: Mapping[str, Tensor], which: str) -> None:
    """Refuse NaN and Inf, and say in which network they are."""
    for name, tensor in params.items():
        if not tensor.is_floating_point() or math.isfinite(tensor.sum()):
            continue
        for k in (~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist():
            require_finite({name: tensor[k]}, f"network {k} of the {which} population")
