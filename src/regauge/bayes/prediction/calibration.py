"""Calibration: whether classes are as often right as their probabilities say."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bin:
    """Examples whose most probable class has a probability in `(low, high]`.

    Attributes:
        low: Lower bound.
        high: Upper bound.
        count: Number of examples.
        confidence: The mean probability of their most probable class; NaN without examples.
        accuracy: The share of them that is right; NaN without examples.
    """

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """A reliability table.

    Attributes:
        table: One row per bin, by probability.

    References:
        Guo et al. (2017), On Calibration of Modern Neural Networks, section 2.
    """

    table: tuple[Bin, ...]

    @property
    def error(self) -> float:
        """The expected calibration error: the mean over examples of |accuracy - confidence| of their bin."""
        total = sum(row.count for row in self.table)
        return sum(row.count * abs(row.accuracy - row.confidence) for row in self.table if row.count) / total


def calibration(probabilities: Tensor, targets: Tensor, *, bins: int = 15) -> Calibration:
    """Compare the probability of the most probable class with how often it is right, in bins of equal width.

    Args:
        probabilities: `[examples, classes]`.
        targets: Classes, `[examples]`.
        bins: Number of bins between 0 and 1.

    Raises:
        ValueError: There are no bins.
    """
    if bins < 1:
        raise ValueError(f"bins={bins}; at least one is needed")
    confidences, found = probabilities.double().max(-1)
    is_right = (found == targets).double()
    places = ((confidences * bins).ceil().long() - 1).clamp(0, bins - 1)
    counts = torch.bincount(places, minlength=bins)
    confidence = torch.bincount(places, confidences, minlength=bins) / counts
    accuracy = torch.bincount(places, is_right, minlength=bins) / counts
    rows = zip(counts.tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
    return Calibration(tuple(Bin(k / bins, (k + 1) / bins, *row) for k, row in enumerate(rows)))
