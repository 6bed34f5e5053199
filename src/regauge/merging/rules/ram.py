"""RAM: a change that only one network makes is kept in full. Changes that several networks make are averaged."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.merging.rule import Target, VectorRule, equal_shares
from regauge.merging.settings import Number, require_numbers


@dataclass(frozen=True)
class Ram(VectorRule):
    """The base plus, for each entry, the mean task vector over the networks that change this entry.

    A network changes an entry if the magnitude of this entry in its task vector exceeds `least_change`. If only one
    network changes an entry, the task vector's entry is multiplied by `1 + gain * min(rho, most_overlap)`. For each
    tensor and network, the ratio rho is the number of changed entries that other networks also change, divided by the
    number of entries that only this network changes.

    Attributes:
        least_change: A threshold. Entries of task vectors whose magnitude does not exceed the threshold are left out.
        gain: The strength with which entries that only one network changes are enlarged; zero for RAM, positive for
            RAM+.
        most_overlap: An upper limit on the ratio rho.

    References:
        Reinforced Agent Merging (2026), arXiv 2601.13572; ratios are computed per tensor, as in mergekit's
        `ramplus_tl`.
    """

    least_change: Number = 1e-5
    gain: Number = 0.0
    most_overlap: Number = 0.2

    def __post_init__(self) -> None:
        for name in ("least_change", "gain", "most_overlap"):
            require_numbers(name, getattr(self, name), lambda x: 0 <= x < math.inf, "finite and not negative")

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return equal shares."""
        return equal_shares(self, weights, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Return True if `gain` is zero, because the ratios for a gain are computed over whole tensors."""
        return self.gain == 0

    def held(self, count: int) -> int:
        """Return the number of tensors held at once: all task vectors, counts, the sum, and temporary tensors."""
        return count + 5

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return, for each entry, the mean of the task vectors that change the entry."""
        vectors, least = list(tensors), target.number(self.least_change)
        for vector in vectors:
            vector.masked_fill_(vector.abs() <= least, 0.0)
        counts = torch.zeros_like(vectors[0])
        for vector in vectors:
            counts += vector != 0
        total = torch.zeros_like(vectors[0])
        for vector in vectors:
            is_alone, changed = (vector != 0) & (counts == 1), int((vector != 0).sum())
            unique = int(is_alone.sum())
            overlap = min((changed - unique) / max(unique, 1), target.number(self.most_overlap))
            vector[is_alone] *= 1 + target.number(self.gain) * overlap
            total += vector
        return total.div_(counts.clamp_(min=1))
