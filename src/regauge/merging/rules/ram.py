"""RAM: what one network alone has learned is added whole, what several have learned is averaged among them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.merging.rule import Target, VectorRule, equal_shares
from regauge.merging.settings import Number, require_numbers


@dataclass(frozen=True)
class Ram(VectorRule):
    """The base plus, entry by entry, the mean of the task vectors of those networks that change it.

    A network changes an entry where its task vector is larger than `least_change`. Entries that it alone changes are
    multiplied by `1 + gain * min(rho, most_overlap)`, where rho is how many entries of the tensor it changes with
    others, divided by how many it changes alone.

    Attributes:
        least_change: Smaller entries of task vectors are left out.
        gain: The growth of entries that one network changes alone; zero for RAM, above it for RAM+.
        most_overlap: The largest ratio rho that counts.

    References:
        Reinforced Agent Merging (2026), arXiv 2601.13572; ratios are those of tensors, as in mergekit's `ramplus_tl`.
    """

    least_change: Number = 1e-5
    gain: Number = 0.0
    most_overlap: Number = 0.2

    def __post_init__(self) -> None:
        for name in ("least_change", "gain", "most_overlap"):
            require_numbers(name, getattr(self, name), lambda x: 0 <= x < math.inf, "finite and not negative")

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Equal shares."""
        return equal_shares(self, weights, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Ratios are taken over whole tensors."""
        return self.gain == 0

    def held(self, count: int) -> int:
        """Return tensors held at once: all task vectors, counts, the sum, and what is added to it."""
        return count + 5

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the sum of the means."""
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
