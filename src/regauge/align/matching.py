"""What every alignment method is and returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from regauge.core.element import Element
from regauge.core.symmetry import Symmetry


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


class Method(Protocol):
    """A way to align two networks: a small frozen dataclass of its settings."""

    def match(
        self,
        params_a: Mapping[str, Tensor],
        params_b: Mapping[str, Tensor],
        symmetry: Symmetry,
        generator: torch.Generator | None,
    ) -> Matching:
        """The element that brings `params_b` close to `params_a`; both are checked and the symmetry is bound."""
        ...
