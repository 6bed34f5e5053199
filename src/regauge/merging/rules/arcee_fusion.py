"""Arcee fusion, in which a network takes over the most important changes of another network."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.merging.rule import Rule, Target, equal_shares

LEAST_PROBABILITY = 1e-8
"""A constant that is added to probabilities, to keep their ratio finite."""


@dataclass(frozen=True)
class ArceeFusion(Rule):
    """The first network, in which entries with important changes are replaced by the entries of the second network.

    The importance of an entry is its absolute change times the divergence of the vector that contains it. Vectors run
    along the last axis. The divergence is the Kullback-Leibler divergence between the softmax of the second network's
    vector and the softmax of the first network's vector. The second network's entry is used if the importance is at
    least the median plus 1.5 times the interquartile range over the tensor.

    References:
        mergekit's method of this name, by Arcee. In mergekit the quartiles of a tensor with more than a million entries
        are estimated from a million randomly sampled entries.
    """

    most, has_shares = 2, False

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return equal shares."""
        return equal_shares(self, weights, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Return False, because quartiles are computed over whole tensors."""
        return False

    def held(self, count: int) -> int:
        """Return the number of tensors held at once, including probabilities or the copies for quartiles."""
        return 10

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the first network's tensor with the important entries of the second network."""
        first, second = tensors
        importance = (second - first).abs_().mul_(find_divergence(second, first).to(first))
        flat = importance.flatten()
        # The entry of a sorted list at this share of its length, rounded down, as in mergekit.
        quarter, median, three = (
            float(flat.kthvalue(int(q * (flat.numel() - 1)) + 1).values) for q in (0.25, 0.5, 0.75)
        )
        return torch.where(importance >= median + 1.5 * (three - quarter), second, first)


def find_divergence(params: Tensor, base: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of `softmax(params)` from `softmax(base)`, along the last axis."""
    p = torch.softmax(params, -1, dtype=torch.float64).add_(LEAST_PROBABILITY)
    q = torch.softmax(base, -1, dtype=torch.float64).add_(LEAST_PROBABILITY)
    return q.div_(p).log_().mul_(p).sum(-1, keepdim=True).neg_()
