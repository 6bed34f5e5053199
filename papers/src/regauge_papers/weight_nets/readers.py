"""Readers that predict fractions, such as accuracies, from weights: nets and baselines."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from regauge import learn
from regauge import weightspace as ws
from regauge.core.params import Params
from regauge.learn.layer_statistics import boosted_trees, invariant_statistics, layer_statistics
from regauge.learn.targets import Target
from regauge.weightspace.layers.plan import Layer
from regauge_papers.weight_nets.known import Known

PENALTIES = np.logspace(-2, 5, 15)
"""The penalties among which ridge regression chooses."""
Predict = Callable[[Params], NDArray[np.float64]]


class Reader(Protocol):
    """The base class of readers."""

    @property
    def label(self) -> str:
        """The label of the row in the table."""

    @property
    def is_invariant(self) -> bool:
        """Whether predictions are invariant under the whole group."""

    def fit(self, known: Known, generator: torch.Generator) -> Predict:
        """Train on networks, and return a function that predicts other networks."""


@dataclass(frozen=True)
class Net:
    """A reader that is a net over networks."""

    label: str
    config: learn.PredictorConfig

    @property
    def is_invariant(self) -> bool:
        """Whether the net respects all parts of the symmetry."""
        return self.config.parts is None

    def fit(self, known: Known, generator: torch.Generator) -> Predict:
        """Train the net."""
        found = learn.fit_predictor(
            known.networks, known.values, known.symmetry, self.config, generator=generator, split=known.parts
        )
        found.net.double()  # so that what moves predictions is told from rounding
        return found.predict


@dataclass(frozen=True)
class Trees:
    """Gradient boosting on statistics of layers of the given or of canonical networks."""

    label: str = "statistics of layers, boosted trees"
    is_invariant: bool = False

    def fit(self, known: Known, generator: torch.Generator) -> Predict:
        """Fit the trees."""
        describe = invariant_statistics(known.symmetry) if self.is_invariant else layer_statistics
        values = known.values[known.fit]
        target = Target.of("value", values, values, "fractions")
        trees = boosted_trees(describe(known.read(known.fit)), values, target, seed=int(generator.initial_seed()))
        return lambda params: trees(describe(params))


@dataclass(frozen=True)
class Ridge:
    """Ridge regression on standardized statistics of layers; leave-one-out validation chooses the penalty."""

    label: str = "statistics of layers, ridge regression"
    is_invariant: bool = False

    def fit(self, known: Known, generator: torch.Generator) -> Predict:
        """Fit the regression."""
        from sklearn.linear_model import RidgeCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        made: Any = make_pipeline(StandardScaler(), RidgeCV(PENALTIES))
        made.fit(layer_statistics(known.read(known.fit)), known.values[known.fit])
        return lambda params: np.asarray(made.predict(layer_statistics(params)), np.float64)


@dataclass(frozen=True)
class Mean:
    """A reader that predicts the mean of the training networks."""

    label: str = "the mean, for all"
    is_invariant: bool = True

    def fit(self, known: Known, generator: torch.Generator) -> Predict:
        """Compute the mean."""
        mean = float(known.values[known.fit].mean())
        return lambda params: np.full(len(next(iter(params.values()))), mean)


@dataclass(frozen=True)
class Together:
    """A reader that averages the predictions of other readers."""

    label: str
    readers: tuple[Reader, ...]

    @property
    def is_invariant(self) -> bool:
        """Whether all readers are invariant."""
        return all(reader.is_invariant for reader in self.readers)


STATISTICS: tuple[Reader, ...] = (Trees("statistics of canonical layers, boosted trees", True), Trees(), Ridge())
"""The baselines: readers that use simple statistics of the weights."""


def net_config(layer: Layer, seconds: float, width: int) -> learn.PredictorConfig:
    """Return training settings for some hundreds of networks with weights of very different sizes, for given CPU
    seconds.
    """
    return learn.PredictorConfig(
        layer=layer,
        width=width,
        depth=2,
        values=ws.Logarithms(),
        reads_moments=True,
        kind="fractions",
        seconds=seconds,
        is_cpu_time=True,
        epochs=300,
        batch=64,
        lr=5e-3,
        linear=False,
        statistics=False,
    )
