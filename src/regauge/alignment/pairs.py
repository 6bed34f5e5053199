"""What a method that aligns many pairs at once is and returns, and the loop for those that cannot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from regauge.alignment.matching import Matching, Method
from regauge.core.element import Element, stack
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@dataclass(frozen=True)
class PairsMatching:
    """What a method found for each of many pairs; one pair at a time it is a `Matching`.

    Attributes:
        element: A batch of elements; each moves its second network close to its first one.
        objective: What the method maximizes, at `element`, float64 `[pairs]`.
        initial: The same at the identity; nowhere larger, float64 `[pairs]`.
        history: Objective at the start of each pair's best climb and after each step, float64 `[steps + 1, pairs]`;
            it never falls. Pairs that ended earlier repeat their last value.
        is_converged: Whether that climb ended because no single group could be improved, bool `[pairs]`.
        moved: Stacked tensors of the second networks that are moved by `element` already, bit for bit as the
            action would.
    """

    element: Element
    objective: Tensor
    initial: Tensor
    history: Tensor
    is_converged: Tensor
    moved: Mapping[str, Tensor]


@runtime_checkable
class PairsMethod(Protocol):
    """A method that aligns many pairs at once, faster than one after the other."""

    def match_pairs(
        self,
        params_a: Mapping[str, Tensor],
        params_b: Mapping[str, Tensor],
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> PairsMatching:
        """Like `Method.match`, with one leading axis of pairs on every tensor of both dictionaries.

        Tensors of the first one may be expanded (stride zero along the pairs) where all pairs share a reference.
        """
        ...


def match_each(
    method: Method,
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    task: Task | None,
    generator: torch.Generator | None,
) -> PairsMatching:
    """The pairs one after the other, for methods that know single pairs only."""
    count = len(next(iter(params_b.values())))
    found = [
        method.match(
            {name: tensor[k] for name, tensor in params_a.items()},
            {name: tensor[k] for name, tensor in params_b.items()},
            symmetry,
            task=task,
            generator=generator,
        )
        for k in range(count)
    ]
    return stacked(found)


def stacked(found: Sequence[Matching]) -> PairsMatching:
    """Results of single pairs as one result of many."""
    steps = max(len(one.history) for one in found)
    rows = [[*one.history, *[one.history[-1]] * (steps - len(one.history))] for one in found]
    names = [name for name in found[0].moved if all(name in one.moved for one in found)]
    return PairsMatching(
        element=stack([one.element for one in found]),
        objective=torch.tensor([one.objective for one in found], dtype=torch.float64),
        initial=torch.tensor([one.initial for one in found], dtype=torch.float64),
        history=torch.tensor(rows, dtype=torch.float64).T.contiguous(),
        is_converged=torch.tensor([one.is_converged for one in found]),
        moved={name: torch.stack([one.moved[name] for one in found]) for name in names},
    )
