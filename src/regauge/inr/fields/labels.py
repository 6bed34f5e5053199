"""Labels: distances as probabilities, so that a network's output is the logit of one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from regauge.inr.representation import Inr


@dataclass(frozen=True)
class DistanceLabels:
    """Distances up to a limit, and labels in [0, 1].

    Without signs the label is `1 - min(d, limit) / limit`: one on the surface and zero far away. With signs (negative
    inside) it is `(clip(d, -limit, limit) + limit) / (2 limit)`: one half on the surface, zero inside.

        >>> labels = DistanceLabels(0.1, is_signed=False)
        >>> labels.of(torch.tensor([0.0, 0.05, 0.3]))
        tensor([1.0000, 0.5000, 0.0000])

    Attributes:
        limit: Distances are clipped there.
        is_signed: Whether distances have signs.

    References:
        De Luigi et al. (2023), appendix A.
    """

    limit: float
    is_signed: bool

    def __post_init__(self) -> None:
        if not 0 < self.limit < math.inf:
            raise ValueError(f"the limit of distances must be positive and finite, not {self.limit}")

    def of(self, distances: Tensor) -> Tensor:
        """The labels of distances."""
        if self.is_signed:
            return (distances.clamp(-self.limit, self.limit) + self.limit) / (2 * self.limit)
        return 1 - distances.clamp(max=self.limit) / self.limit

    def distances(self, labels: Tensor) -> Tensor:
        """The distances of labels, those beyond the limit clipped to it."""
        return (2 * labels - 1) * self.limit if self.is_signed else (1 - labels) * self.limit

    def from_logits(self, logits: Tensor) -> Tensor:
        """The distances that a network's outputs stand for; differentiable, and exact in both tails."""
        if self.is_signed:
            return torch.tanh(logits / 2) * self.limit
        return torch.sigmoid(-logits) * self.limit


def labels_of(inr: Inr) -> DistanceLabels:
    """The labels that a network learns.

    Raises:
        ValueError: It represents no distance.
    """
    if inr.limit is None:
        raise ValueError(f"an INR of {inr.signal!r} has no distances; this needs one of 'unsigned' or 'signed'")
    return DistanceLabels(inr.limit, is_signed=inr.signal == "signed")


def entropy_floor(labels: Tensor) -> float:
    """The least cross entropy that any network can have on these labels, in nats: their mean binary entropy.

    Labels strictly between zero and one leave a loss that says nothing about the network; report what is above.
    """
    exact = labels.double()
    return binary_cross_entropy(exact, exact).item()
