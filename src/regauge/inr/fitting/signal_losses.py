"""Losses of a signal: what a network's outputs cost at points whose labels are known."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

LossName = Literal["bce", "mse", "focal"]


@dataclass(frozen=True)
class Focal:
    """Cross entropy that counts what is already right less: `-w (1 - p)^gamma log p`, with p of the true class.

    The weight w is alpha where the label is one and 1 - alpha where it is zero; labels are zero or one. With gamma = 0
    and alpha = 1/2 it is half the cross entropy.

    Attributes:
        alpha: Weight of what is occupied.
        gamma: Exponent; larger values discount right answers more.

    References:
        Lin et al. (2017), equation 5; De Luigi et al. (2023), whose program gives empty cells the weight 0.1.
    """

    alpha: float = 0.9
    gamma: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1 or not self.gamma >= 0:
            raise ValueError(f"a focal loss needs alpha between 0 and 1 and gamma >= 0, not {self}")

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        entropies = binary_cross_entropy_with_logits(outputs, labels, reduction="none")
        weights = self.alpha * labels + (1 - self.alpha) * (1 - labels)
        wrong = torch.sigmoid(outputs * (1 - 2 * labels))
        return weights * wrong**self.gamma * entropies


def bce(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of labels in [0, 1] and logits, at every point."""
    return binary_cross_entropy_with_logits(outputs, labels, reduction="none")


def mse(outputs: Tensor, labels: Tensor) -> Tensor:
    """Squared errors, at every point."""
    return mse_loss(outputs, labels, reduction="none")


def loss_of(name: LossName) -> Callable[[Tensor, Tensor], Tensor]:
    """From outputs and labels `[n, out]` to losses of that shape.

    Raises:
        ValueError: There is no such loss.
    """
    if name not in LOSSES:
        raise ValueError(f"there is no loss {name!r}; choose from {', '.join(LOSSES)}")
    return LOSSES[name]


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"bce": bce, "mse": mse, "focal": Focal()}
