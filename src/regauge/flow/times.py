"""Distributions of the random times in a flow's training."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class UniformTime:
    """Uniformly random times between 0 and 1, spread evenly over a batch."""

    def draw(self, count: int, generator: torch.Generator) -> Float[Tensor, " models"]:
        """Sample times."""
        places = torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)
        return places / count


@dataclass(frozen=True)
class BetaTime:
    """Times that follow a Beta distribution.

    Attributes:
        a: The first parameter of the Beta distribution. Larger values favor late times.
        b: The second parameter of the Beta distribution. Larger values favor early times.

    References:
        Erdogan (2025), section 6.3, with a = 1 and b = 2.
    """

    a: float = 1.0
    b: float = 2.0

    def draw(self, count: int, generator: torch.Generator) -> Float[Tensor, " models"]:
        """Sample times."""
        shapes = torch.tensor([self.a, self.b]).expand(count, 2)
        gamma = torch._standard_gamma(shapes, generator=generator)
        return gamma[:, 0] / gamma.sum(1)


TIMES: dict[str, type[Any]] = {"uniform": UniformTime, "beta": BetaTime}
"""Distributions of times by name."""
Times = UniformTime | BetaTime
