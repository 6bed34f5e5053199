"""A training on networks: what is trained, how it is judged, and what comes of it."""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from regauge.core.progress import Progress, no_progress
from regauge.learn.course import Trained, Validation
from regauge.learn.division import Division, FitArguments
from regauge.learn.training import train
from regauge.storage.loader import Batch, Loader
from regauge.training.training_configs import NetTrainingConfig

Made = TypeVar("Made", covariant=True)


class Fitting(ABC, Generic[Made]):
    """Everything about the training of a net on networks, of one kind: a matcher, a predictor, an autoencoder, a flow.

    Subclasses are frozen dataclasses with a class method `prepare`, which makes the net and everything around it.

    Attributes:
        division: The networks, and the seed of all chance.
        config: The settings.
        net: The net that is trained, on the device of the settings.
        loader: The batches of an epoch.
    """

    division: Division
    config: NetTrainingConfig
    net: nn.Module
    loader: Loader

    @abstractmethod
    def loss(self, batch: Batch, chance: torch.Generator) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def validate(self) -> Validation:
        """Judge the net, which is in evaluation mode, on the networks for validation."""

    @abstractmethod
    def conclude(self, trained: Trained, progress: Progress) -> Made:
        """Make the result of the net with its best weights, tested once on the networks for testing."""

    @property
    def inputs(self) -> dict[str, Any]:
        """Everything that the training depends on, as JSON."""
        return self.division.describe(self.config)

    def train(self, arguments: FitArguments) -> Trained:
        """Train the net."""
        return train(
            *(self.net, self.loader, self.loss, self.validate, self.config),
            seed=self.division.seed,
            state=arguments.get("state"),
            inputs=self.inputs,
            progress=arguments.get("progress", no_progress),
            on_step=arguments.get("on_step"),
        )

    def fit(self, arguments: FitArguments) -> Made:
        """Train the net, and make the result."""
        return self.conclude(self.train(arguments), arguments.get("progress", no_progress))
