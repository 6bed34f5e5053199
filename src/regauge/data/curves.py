"""One-dimensional regression: families of sine waves."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Waves:
    """Functions `x -> sin(a x)` on [-pi, pi], sampled on two disjoint grids.

    Attributes:
        frequencies: The frequencies a, uniformly random in [0.5, 10], `[waves]`.
        inputs: Equally spaced points, including both endpoints, `[points, 1]`.
        targets: Function values at the inputs, `[waves, points, 1]`.
        test_inputs: The midpoints between the inputs, `[points - 1, 1]`.
        test_targets: Function values at the test inputs, `[waves, points - 1, 1]`.

    References:
        Navon et al. (2023), the sine waves of section 7; Navon et al. (2024), section 6.1.
    """

    frequencies: Tensor
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def waves(count: int, points: int, *, generator: torch.Generator) -> Waves:
    """Sample waves with random frequencies.

    Raises:
        ValueError: There are fewer than two points.
    """
    if points < 2:
        raise ValueError(f"a wave is sampled at both ends of [-pi, pi] at least, but points={points}")
    frequencies = 0.5 + 9.5 * torch.rand(count, generator=generator)
    inputs = torch.linspace(-math.pi, math.pi, points).unsqueeze(1)
    test_inputs = (inputs[1:] + inputs[:-1]) / 2
    factors = frequencies[:, None, None]
    return Waves(frequencies, inputs, torch.sin(factors * inputs), test_inputs, torch.sin(factors * test_inputs))
