"""Arcee fusion: a network takes the most important entries of another one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.merging.rule import Rule, Target, equal_shares

LEAST_PROBABILITY = 1e-8
"""Added to probabilities, so that their ratio is finite."""


@dataclass(frozen=True)
class ArceeFusion(Rule):
    """The first network, with those entries of the second one whose change is important.

    The importance of an entry is how far it changes, times the divergence of its vector along the last axis: the
    Kullback-Leibler divergence of the softmax of the second network's vector from that of the first one's. Entries are
    taken whose importance is at least the median plus 1.5 times the range between the quartiles, of whole tensors.

    References:
        mergekit's method of this name, by Arcee; there quartiles of tensors with more than a million entries are
        those of a million of them, drawn at random.
    """

    most, has_shares = 2, False

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Equal shares."""
        return equal_shares(self, weights, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Quartiles are taken over whole tensors."""
        return False

    def held(self, count: int) -> int:
        """Held at once: both tensors, their difference, its importance; probabilities, or copies for the quartiles."""
        return 10

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the first network with the entries that are taken."""
        first, second = tensors
        importance = (second - first).abs_().mul_(find_divergence(second, first).to(first))
        flat = importance.flatten()
        # The entry of a sorted list at this share of its length, rounded down, as in mergekit.
        quarter, median, three = (
            float(flat.kthvalue(int(q * (flat.numel() - 1)) + 1).values) for q in (0.25, 0.5, 0.75)
        )
        return torch.where(importance >= median + 1.5 * (three - quarter), second, first)


def find_divergence(params: Tensor, base: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of the softmax of one vector along the last axis from another's, in
    float64."""
    p = torch.softmax(params, -1, dtype=torch.float64).add_(LEAST_PROBABILITY)
    q = torch.softmax(base, -1, dtype=torch.float64).add_(LEAST_PROBABILITY)
    return q.div_(p).log_().mul_(p).sum(-1, keepdim=True).neg_()
