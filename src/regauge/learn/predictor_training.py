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
    """Train a net to predict a number or a class of networks, and keep the weights with the best validation.

    Networks that are not finite or have no target are left out. The test networks are read only once, at the end.

    Args:
        population: Parameters with a leading model axis, or a store, which is streamed; or several populations and
            stores, of one or several architectures. Indices count the networks of all of them one after the other.
        targets: A value for each network, or the name of a column of the stores.
        symmetry: The symmetry of the networks, or of each store and population; by default the symmetries of the
            stores.
        config: Settings; `seconds` limits the training alone, by the clock unless `is_cpu_time`.
        module: The module that runs the networks, for each layout; by default the module of the store. It is needed if
            networks are rendered or probed, or if their inputs are moved.
        inputs: Inputs at which networks are rendered, and the initial probes: a tensor, a tuple of positional or a
            mapping of keyword arguments of the module.
        generator: The random generator, from which one seed is drawn; by default a generator with seed 0.
        arguments: `indices`, `split`, `split_by`, `checkpoints`, `state` and `progress`; see
            `regauge.learn.division.FitArguments`.

    Raises:
        IndexError: An index is out of range.
        KeyError: There is no such column.
        ValueError: There is nothing to predict, or a part of the split has no networks. Or an argument that the
            settings need is missing. Or the training diverged.
    """
    config, collection = config or PredictorConfig(), Collection(population, symmetry)
    name, values, usable = values_of(collection, targets, **arguments)
    division = Division.of(collection, generator, usable, **arguments)
    used, train = np.concatenate(list(division.parts.values())), division.parts["train"]
    target = Target.of(name, values[used], values[train], config.kind)
    return PredictorFitting.prepare(division, config, target, values, module, inputs).fit(arguments)
