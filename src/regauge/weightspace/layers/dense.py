"""Linear maps and norms that all layers use."""

import math

import torch
from torch import Tensor, nn

from regauge.core import products


class Dense(nn.Module):
    """A linear map `x W' + b` with random weights.

    At initialization, the root mean square of the outputs is `gain` times the root mean square of the inputs.

    Args:
        inputs: Length of the inputs.
        outputs: Length of the outputs.
        is_biased: Whether there is a bias, initialized to zero.
        gain: The root mean square of the initial outputs divided by the root mean square of the inputs.
        generator: The random number generator for the weights.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        is_biased: bool = True,
        gain: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs, generator=generator) * (gain / math.sqrt(max(inputs, 1)))
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(outputs)) if is_biased else None

    def forward(self, x: Tensor) -> Tensor:
        return products.linear(x, self.weight, self.bias)


class Norm(nn.LayerNorm):
    """Layer normalization of each feature vector, independent of all other vectors."""

    def __init__(self, width: int) -> None:
        super().__init__(width)


class OddNorm(nn.RMSNorm):
    """Division of a vector by its root mean square, which preserves signs."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)


class ScaledNorm(nn.Module):
    """Division of a vector by its exact root mean square, which may be tiny. A vector of zeros stays zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, u: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny)
        made: Tensor = u / norm * (math.sqrt(u.shape[-1]) * self.weight)
        return made


class Invariants(nn.Module):
    """The product `(A u) * (B u)` of two linear maps, which does not depend on the sign of the vector u."""

    def __init__(self, width: int, outputs: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.left, self.right = (Dense(width, outputs, is_biased=False, generator=generator) for _ in range(2))

    def forward(self, u: Tensor) -> Tensor:
        made: Tensor = self.left(u) * self.right(u)
        return made
