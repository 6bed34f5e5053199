"""An outlook on networks that are drawn from a distribution of aligned ones, before a flow is fitted."""

import warnings
from dataclasses import dataclass

import torch

from regauge.flow.manifold import Points

FEW = 5
"""Networks for each principal component that is looked at."""
LITTLE = 0.25
"""Below this share of what chance leaves, drawn networks are not expected to work."""
MOST_AXES = 2000
"""Networks from which principal components are computed at most."""


@dataclass(frozen=True)
class Outlook:
    """Measures of how much aligned networks of a population have in common.

    Attributes:
        networks: Networks for training.
        values: Values of a network.
        aligned: Root mean square distance of two aligned networks, as a share of that of two networks as they are.
        explained: The share of held-out networks, about the mean, that principal components of the networks for
            training explain: one component for five networks.
        by_chance: The share that as many random directions would explain.
    """

    networks: int
    values: int
    aligned: float
    explained: float
    by_chance: float

    @classmethod
    def of(cls, given: Points, aligned: Points, held_out: Points) -> "Outlook":
        """The outlook for networks for training, as they are and aligned, and for held-out ones, aligned."""
        few = aligned[torch.linspace(0, len(aligned) - 1, min(len(aligned), MOST_AXES)).long()].double()
        mean, unit = few.mean(0), few.std(0).clamp_min(torch.finfo(torch.float32).tiny)
        count = max(1, min(len(few) // FEW, few.shape[1]))
        _, _, axes = torch.linalg.svd((few - mean) / unit, full_matrices=False)
        kept = (held_out.double() - mean) / unit
        return cls(
            len(aligned),
            aligned.shape[1],
            float((aligned.double().var(0).sum() / given.double().var(0).sum()).sqrt()),
            float((kept @ axes[:count].T).square().sum() / kept.square().sum()),
            count / aligned.shape[1],
        )

    @property
    def common(self) -> float:
        """The share of what chance leaves that is explained."""
        return (self.explained - self.by_chance) / max(1 - self.by_chance, 1e-12)

    def warn(self) -> None:
        """Warn where drawn networks cannot be expected to work."""
        if self.by_chance < 1 and self.common < LITTLE:
            warnings.warn(
                f"aligned networks have little in common: principal components of {self.networks} networks of "
                f"{self.values:,} values explain {self.explained:.0%} of held-out ones, and as many random directions "
                f"{self.by_chance:.0%}. Networks that are drawn will work worse than trained ones; networks from one "
                "start, more of them, or a task that chooses or pulls (sample(task=...), Guidance) help",
                stacklevel=2,
            )
