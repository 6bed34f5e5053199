"""Likelihoods: probabilities of targets given the outputs of a network."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Likelihood(Protocol):
    """The distribution of a target given the output of a network. Users can write their own likelihoods.

    Outputs may have leading axes that targets lack, such as the sample axis. The methods of a likelihood keep the
    leading axes. Each entry on the first axis of the targets is one example. Results and sums over examples are
    float64.
    """

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log density or log probability of every example, in nats, `[..., batch]`."""

    def statistics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return statistics of every example, `[..., batch, *]`; their averages over samples describe the prediction.

        For classes, `Predictive` reads "probabilities" and "entropy". For numbers, `Predictive` reads "mean" and
        "square" (the second moment of the target). The targets only determine which axes belong to one example.
        """


@dataclass(frozen=True)
class Categorical:
    """The likelihood of class labels: outputs are logits `[..., batch, classes]`, targets are integers `[batch]`."""

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log softmax at the targets.

        Raises:
            ValueError: A target is not a valid class index for the logits.
        """
        if targets.is_floating_point() or outputs.shape[:-1][-targets.ndim :] != targets.shape:
            raise ValueError(
                f"targets have dtype {targets.dtype} and shape {tuple(targets.shape)}, outputs have shape "
                f"{tuple(outputs.shape)}; a categorical likelihood needs integer classes and one more axis of logits"
            )
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[-1]:
            raise ValueError(
                f"targets are between {int(targets.min())} and {int(targets.max())}, but there are logits of "
                f"{outputs.shape[-1]} classes, counted from 0; check the labels or the network's last layer"
            )
        log_probabilities = torch.log_softmax(outputs.double(), -1)
        places = targets.long().expand(outputs.shape[:-1]).unsqueeze(-1)
        return log_probabilities.gather(-1, places).squeeze(-1)

    def statistics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return "probabilities" `[..., batch, classes]` and their "entropy" `[..., batch]`, in nats."""
        log_probabilities = torch.log_softmax(outputs.double(), -1)
        probabilities = log_probabilities.exp()
        return {"probabilities": probabilities, "entropy": -(probabilities * log_probabilities).sum(-1)}


@dataclass(frozen=True)
class Normal:
    """The likelihood of numbers with independent noise of known size.

    Outputs are the means, in the shape of the targets.

    Attributes:
        std: The standard deviation of the noise, in the units of the targets.

    Raises:
        ValueError: The standard deviation is not positive.
    """

    std: float

    def __post_init__(self) -> None:
        if not 0 < self.std < math.inf:
            raise ValueError(f"the noise has standard deviation {self.std}; it must be positive and finite")

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return log densities, summed over all axes of an example.

        Raises:
            ValueError: Outputs and targets have different shapes.
        """
        if outputs.shape[outputs.ndim - targets.ndim :] != targets.shape:
            raise ValueError(
                f"outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}; apart from an axis of "
                "samples they must agree, so reshape the targets (`targets[:, None]` for one output)"
            )
        residuals = (outputs.double() - targets.double()) / self.std
        density = -0.5 * residuals.square() - math.log(self.std) - 0.5 * math.log(2 * math.pi)
        return density.flatten(density.ndim - targets.ndim + 1).sum(-1) if targets.ndim > 1 else density

    def statistics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return "mean" and "square" of the target, in the shape of the outputs."""
        mean = outputs.double()
        return {"mean": mean, "square": mean.square() + self.std**2}
