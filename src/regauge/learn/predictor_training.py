"""Training of predictors: one function from networks and targets to a predictor."""

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge.core.arguments import check_arguments
from regauge.core.symmetry import Symmetry
from regauge.learn.division import Division, FitArguments
from regauge.learn.learn_configs import PredictorConfig
from regauge.learn.populations import values_of
from regauge.learn.predictor import Predictor
from regauge.learn.predictor_fitting import PredictorFitting
from regauge.learn.targets import Target
from regauge.storage.collection import Collection, Networks


@check_arguments
def fit_predictor(
    population: Networks | Sequence[Networks] | Collection,
    targets: str | Sequence[Any] | NDArray[Any] | Tensor,
    symmetry: Symmetry | Sequence[Symmetry | None] | None = None,
    config: PredictorConfig | None = None,
    *,
    module: nn.Module | Sequence[nn.Module] | None = None,
    inputs: Any = None,
    generator: torch.Generator | None = None,
    **arguments: Unpack[FitArguments],
) -> Predictor:
    """Train a net to predict a number or a class of networks; the weights with the best validation are kept.

    Networks that are not finite or have no target are left out. The networks for testing are read once, at the end.

    Args:
        population: Parameters with a leading model axis, or a store, which is streamed; or several, of one or several
            architectures, whose networks are numbered one after the other.
        targets: A value for each network, or the name of a column of the stores.
        symmetry: The symmetry of the networks, or of each store and population; those of the stores by default.
        config: Settings; `seconds` limits the training alone, by the clock unless `is_cpu_time`.
        module: Runs the networks, where they are rendered, probed or their inputs moved, for each layout; that of the
            store by default.
        inputs: Inputs at which networks are rendered, and the start of the probes: a tensor, a tuple of positional or a
            mapping of keyword arguments of the module.
        generator: The source of all chance, from which one number is drawn; one with seed 0 by default.
        arguments: `indices`, `split`, `split_by`, `checkpoints`, `state` and `progress`; see
            `regauge.learn.division.FitArguments`.

    Raises:
        IndexError: There is no network of some number.
        KeyError: There is no such column.
        ValueError: There is nothing to predict, a part of the split has no networks, something is missing that the
            settings need, or the training diverged.
    """
    config, collection = config or PredictorConfig(), Collection(population, symmetry)
    name, values, usable = values_of(collection, targets, **arguments)
    division = Division.of(collection, generator, usable, **arguments)
    used, train = np.concatenate(list(division.parts.values())), division.parts["train"]
    target = Target.of(name, values[used], values[train], config.kind)
    return PredictorFitting.prepare(division, config, target, values, module, inputs).fit(arguments)
