"""What every alignment method is and returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from regauge.core.element import Element
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@dataclass(frozen=True)
class Matching:
    """What a method found.

    Attributes:
        element: Moves the second network close to the first.
        objective: What the method maximizes, at `element`.
        initial: The same at the identity; never larger.
        history: Objective at the start of the best climb and after each of its sweeps; it never falls.
        is_converged: Whether that climb ended because no single group could be improved.
        starts: Objective that each climb reached.
        moved: Tensors of the second network that are moved by `element` already, bit for bit as the action would.
    """

    element: Element
    objective: float
    initial: float
    history: tuple[float, ...]
    is_converged: bool
    starts: tuple[float, ...]
    moved: Mapping[str, Tensor]


@runtime_checkable
class Method(Protocol):
    """A way to align two networks: a small frozen dataclass of its settings."""

    def match(
        self,
        params_a: Mapping[str, Tensor],
        params_b: Mapping[str, Tensor],
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> Matching:
        """The element that brings `params_b` close to `params_a`; both are checked and the symmetry is bound."""
        ...


def require_task(task: Task | None, method: object) -> Task:
    """The task, for methods that cannot do without.

    Raises:
        ValueError: There is none.
    """
    if task is None:
        raise ValueError(
            f"{type(method).__name__} needs data: give align a `task=regauge.Task(module, batches, criterion)`, or "
            "choose a method that looks at weights only, such as WeightMatching"
        )
    return task


def require_generator(generator: torch.Generator | None, why: str) -> torch.Generator:
    """The generator, for methods that use chance.

    Raises:
        ValueError: There is none.
    """
    if generator is None:
        raise ValueError(f"{why}; give align a torch.Generator as `generator`")
    return generator
