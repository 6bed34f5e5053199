"""Fit one INR to one signal."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.inr.fields.signal_samples import Samples
from regauge.inr.fitting.gradient import Gradient
from regauge.inr.fitting.signal_losses import LossName, loss_of
from regauge.inr.rendering.field_values import evaluate
from regauge.inr.representation import Inr, blank
from regauge.training import Adam, Descent, Optimizer, minimize


@dataclass(frozen=True, kw_only=True)
class Fit(Descent):
    """Settings of a fit: Adam on random samples, drawn with replacement. The defaults are those of paper 003.

    Attributes:
        loss: Cross entropy of distances, squared error of images and the focal loss of occupancy unless given.

    Raises:
        ValueError: A number is not positive, or there is no such loss.

    References:
        Paper 003, section 3.2.
    """

    steps: int | None = 500
    batch: int | None = 10_000
    optimizer: Optimizer = field(default_factory=lambda: Adam(lr=1e-4))
    loss: LossName | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss is not None:
            loss_of(self.loss)

    def loss_for(self, inr: Inr) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of a network, from outputs and labels `[n, out]` to losses of that shape."""
        own: dict[str, LossName] = {"image": "mse", "occupancy": "focal"}
        return loss_of(self.loss or own.get(inr.signal, "bce"))


@dataclass(frozen=True)
class Fitted:
    """A fitted network.

    Attributes:
        params: Its parameters.
        losses: The mean loss of every step's samples before that step, `[steps]`.
    """

    params: Params
    losses: Tensor


def fit(
    inr: Inr,
    samples: Samples,
    config: Fit | None = None,
    *,
    start: Mapping[str, Tensor],
    generator: torch.Generator,
    progress: Progress = no_progress,
) -> Fitted:
    """Minimize the loss of a network on samples of a signal.

    Args:
        inr: Architecture of the network.
        samples: Samples of the signal.
        config: Steps, batches, optimizer and loss.
        start: Initial parameters, unchanged; the result has their dtype.
        generator: Draws the samples of each step.
        progress: Shows the steps.

    Raises:
        ValueError: The samples or the start do not fit the network, or a loss is NaN or Inf.
    """
    config = config or Fit()
    if (samples.points.shape[1], samples.labels.shape[1]) != (inr.in_features, inr.out_features):
        raise ValueError(
            f"the samples go from {samples.points.shape[1]} coordinates to {samples.labels.shape[1]} values, but the "
            f"network from {inr.in_features} to {inr.out_features}"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in blank(inr).items()}
    wrong = [name for name in {**shapes, **start} if name not in start or tuple(start[name].shape) != shapes.get(name)]
    if wrong:
        raise ValueError(
            f"the start is not of the network {'-'.join(map(str, inr.widths))}: {wrong[:4]} are missing, unknown or of "
            "another shape; begin at `inr.start(generator)` or at a network of the same architecture"
        )
    like = next(iter(start.values()))
    samples = samples.to(like.dtype)
    points, labels = samples.points, samples.labels

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while config.batch is None or config.batch >= len(samples):
            yield points, labels
        while True:
            index = torch.randint(len(samples), (config.batch,), generator=generator)
            yield points.index_select(0, index), labels.index_select(0, index)

    found = minimize(
        Gradient(inr, like, config.loss_for(inr)),
        start,
        batches(),
        config,
        examples=len(samples),
        progress=progress,
        label="fitting",
    )
    return Fitted(found.params, found.losses)


def mean_loss(inr: Inr, params: Mapping[str, Tensor], samples: Samples, config: Fit | None = None) -> float:
    """The loss of a network on samples; the least that any could have is `entropy_floor` of distances' labels."""
    losses = (config or Fit()).loss_for(inr)(
        evaluate(inr, params, samples.points), samples.labels.to(next(iter(params.values())))
    )
    return losses.double().mean().item()
