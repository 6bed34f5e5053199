"""The training of a net on networks: the net, its loss, its validation and its result."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
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
    """The training of a net on networks: the base class for matchers, predictors, autoencoders and flows.

    Each subclass of `Fitting` is a frozen dataclass, with a class method `prepare` that creates the net and reads the
    data.

    Attributes:
        division: The networks, and the seed of all random numbers.
        config: The settings.
        net: The trained net, on the device that the settings name.
        loader: The batches of an epoch.
        known: Further facts on which the training depends, such as hashes of the data, as JSON.
    """

    division: Division
    config: NetTrainingConfig
    net: nn.Module
    loader: Loader
    known: Mapping[str, Any]

    @abstractmethod
    def loss(self, batch: Batch, chance: torch.Generator) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def validate(self) -> Validation:
        """Return the validation of the net on the validation networks. The net is in evaluation mode."""

    @abstractmethod
    def conclude(self, trained: Trained, progress: Progress) -> Made:
        """Return the result of the training: the net with its best weights, and its scores on the test networks."""

    @property
    def inputs(self) -> dict[str, Any]:
        """All settings and data on which the training depends, as JSON."""
        return self.division.describe(self.config, **self.known)

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
        """Train the net, and return the result."""
        return self.conclude(self.train(arguments), arguments.get("progress", no_progress))
