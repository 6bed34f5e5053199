"""The networks of paper 000: populations, divided by run, with the data on which they are evaluated."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge import flow
from regauge.core.params import Params
from regauge.core.task import Task
from regauge.data.images import ImageData, digits, fashion_mnist, mnist
from regauge.data.packaged import breast_cancer
from regauge.learn.populations import spread
from regauge.storage import Store
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import mlp_architecture
from regauge.zoo.training.examples import load_examples
from regauge_papers.experiment import Run, make_once
from regauge_papers.zoo_populations import train_population

BATCH = 500
IMAGES = 2000
"""The number of test images on which convolutional networks are evaluated, because convolutional networks are slower
than MLPs."""

Examples = tuple[Tensor, Tensor, Tensor, Tensor]
"""The inputs and classes for training, followed by the inputs and classes for testing."""


def _cancer() -> Examples:
    data = breast_cancer()
    return data.train_inputs, data.train_labels, data.test_inputs, data.test_labels


def _images(data: ImageData) -> Examples:
    return data.train_images, data.train_labels, data.test_images, data.test_labels


DATA: dict[str, Callable[[], Examples]] = {
    "breast-cancer": _cancer,
    "digits": lambda: _images(digits()),
    "mnist": lambda: _images(mnist().normalized(0.1307, 0.3081)),
    "mnist-16": lambda: _images(mnist().shrunk(16).normalized(0.1307, 0.3081)),
    "fashion-mnist": lambda: _images(fashion_mnist().normalized(0.2860, 0.3530)),
}
"""For each data set, a function that returns its examples in the form that the networks read."""


@dataclass(frozen=True, eq=False)
class Networks:
    """A trained population.

    Attributes:
        store: The store of the whole population.
        settings: The settings of the training.
        run: The run whose folder contains the population.
    """

    store: Store
    settings: PopulationConfig
    run: Run

    @classmethod
    def of(cls, name: str, settings: PopulationConfig, run: Run) -> "Networks":
        """Return the population, trained now or by an earlier run."""
        return cls(train_population(name, settings, run), settings, run)

    @property
    def data(self) -> str:
        """The name of the training data."""
        return self.settings.data

    @cached_property
    def parts(self) -> dict[str, NDArray[np.int64]]:
        """The indices of networks for training, validation and testing, divided by run."""
        return flow.divide(self.store, checkpoints="all")

    def read(self, part: str, most: int | None = None) -> Params:
        """Return the networks of a part, or at most `most` evenly spread networks."""
        return self.store.read(self.parts[part] if most is None else spread(self.parts[part], most))

    def task(
        self,
        part: Literal["learned", "train", "test"] = "test",
        data: str | None = None,
        widths: tuple[int, ...] = (),
    ) -> Task:
        """Return the task on some examples of data, for networks of the same or other widths.

        "learned" examples are the training examples without the tenth that is reserved for validation. Populations are
        trained on the "learned" examples.
        """
        found = DATA[data or self.data]()
        inputs, classes = found[2:] if part == "test" else found[:2]
        if part == "learned":
            count = len(load_examples(data or self.data).inputs)
            inputs, classes = inputs[:count], classes[:count]
        architecture = mlp_architecture(*widths) if widths else self.store.architecture
        module = architecture.module()
        if "channels" not in architecture.settings:
            inputs = inputs.flatten(1)
        elif part == "test":
            inputs, classes = inputs[:IMAGES], classes[:IMAGES]
        pairs = list(zip(torch.split(inputs, BATCH), torch.split(classes, BATCH), strict=True))
        return Task(module, pairs)

    def fit(self, label: str, settings: flow.FlowConfig) -> flow.Flow:
        """Return a flow that is fitted to the networks, now or by an earlier run."""
        place = self.run.place("flows", (self.settings, label, settings))
        state = place.with_suffix(".partial.safetensors")

        def write() -> None:
            generator, progress = self.run.generator("flow", label), self.run.progress
            made = flow.fit(
                self.store, config=settings, generator=generator, checkpoints="all", state=state, progress=progress
            )
            made.save(place)
            state.unlink(missing_ok=True)

        make_once(place, write)
        return flow.load_flow(place)


def unit_head(networks: Params, head: str, bias: str) -> Params:
    """Return networks whose last layer is divided by its norm, which changes the loss but not the classes."""
    norm = torch.linalg.vector_norm(networks[head].flatten(1), dim=1)
    return {**networks, head: networks[head] / norm.reshape(-1, 1, 1), bias: networks[bias] / norm.reshape(-1, 1)}


def fewer(settings: PopulationConfig, count: int, epochs: int) -> PopulationConfig:
    """Return a population of fewer networks with shorter training, of which only the final networks are stored."""
    return replace(settings, count=count, epochs=epochs, checkpoints=None)
