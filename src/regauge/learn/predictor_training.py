"""Training of predictors: one function from networks and targets to a predictor."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge.core.arguments import check_arguments
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.learn.populations import arrays_of, digest, kept_unless, split_networks, values_of
from regauge.learn.predictor import Predictor
from regauge.learn.predictor_config import PredictorConfig
from regauge.learn.predictor_fitting import Fitting
from regauge.learn.targets import Target
from regauge.learn.training import Trained, train
from regauge.learn.training_state import read_inputs
from regauge.storage.collection import Collection, Kept, Networks


@check_arguments
def fit_predictor(
    population: Networks | Sequence[Networks] | Collection,
    targets: str | Sequence[Any] | NDArray[Any] | Tensor,
    symmetry: Symmetry | Sequence[Symmetry | None] | None = None,
    config: PredictorConfig | None = None,
    *,
    generator: torch.Generator,
    indices: Sequence[int] | NDArray[Any] | None = None,
    split: Mapping[str, Sequence[int] | NDArray[Any]] | None = None,
    split_by: str | None = None,
    checkpoints: Kept = "last",
    module: nn.Module | Sequence[nn.Module] | None = None,
    inputs: Any = None,
    state: Path | None = None,
    progress: Progress = no_progress,
) -> Predictor:
    """Train a net to predict a number or a class of networks; the weights with the best validation are kept.

    Networks that are not finite or have no target are left out. The networks for testing are read once, at the end.

    Args:
        population: Parameters with a leading model axis, or a store, which is streamed; or several, of one or several
            architectures, whose networks are numbered one after the other.
        targets: A value for each network, or the name of a column of the stores.
        symmetry: The symmetry of the networks, or of each store and population; those of the stores unless given.
        config: Settings; `seconds` limits the training alone.
        generator: The source of all chance, from which one number is drawn.
        indices: Numbers of the networks to use, or a mask.
        split: Numbers of the networks for "train", "validation" and "test". Unless given, a store is divided by run,
            with its own test networks where it has a column "split" with some; of a population fixed random networks
            are taken: 80%, 10% and 10%.
        split_by: Column by which stores are divided instead of by run, such as one that names the image of which there
            are several networks: those with one value are in one part.
        checkpoints: Of each run of a store "last", its last checkpoint, or "all"; where neither `indices` nor `split`
            names networks.
        module: Runs the networks, where they are rendered, probed or their inputs moved, for each layout; that of the
            store unless given.
        inputs: What networks are rendered at, and what probes begin as: a tensor, a tuple of positional or a mapping
            of keyword arguments of the module.
        state: File in which the training is kept while it runs, and from which the same call continues.

    Raises:
        IndexError: There is no network of some number.
        KeyError: There is no such column.
        ValueError: There is nothing to predict, a part of the split has no networks, something is missing that the
            settings need, or the training diverged.
    """
    config = config or PredictorConfig()
    collection = Collection(population, symmetry)
    name, values, usable = values_of(collection, targets, indices, kept_unless(split, checkpoints))
    parts = split_networks(collection, usable, split, split_by)
    used = np.concatenate(list(parts.values()))
    target = Target.of(name, values[used], values[parts["train"]], config.kind)
    seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    fitting = Fitting.prepare(collection, target, values, parts, config, seed, module, inputs)
    known = {
        "settings": repr(config),
        "target": target.to_json(),
        "values": digest(values[used], used),
        "networks": collection.key,
        "seed": seed,
        "inputs": None if inputs is None else digest(*arrays_of(inputs)),
    }
    trained = _train_stages(fitting, state, known, progress)
    return fitting.conclude(trained, generator.initial_seed(), progress)


TINY = 1e-3
"""Seconds for what reads weights, where what reads probes took all."""


def _train_stages(fitting: Fitting, state: Path | None, known: Mapping[str, Any], progress: Progress) -> Trained:
    """Train one part of the net after the other; of an interrupted training, the parts that are left."""
    config, before = fitting.config, []
    if state is not None and state.exists() and len(fitting.stages) > 1:
        before = read_inputs(state).get("before", [])
    stages = list(enumerate(fitting.stages))[len(before) :]
    for number, stage in stages:
        is_last, spent = number == len(fitting.stages) - 1, sum(part["history"][-1]["seconds"] for part in before)
        left = config.seconds and (max(config.seconds - spent, TINY) if is_last else config.seconds / 2)
        inputs = known if stage == "whole" else {**known, "before": before}
        part = replace(fitting, stage=stage)
        with part.freeze():
            trained = train(
                fitting.net,
                fitting.loader,
                part.loss,
                part.validate,
                replace(config, seconds=left),
                seed=fitting.seed + number,
                state=state,
                continues=number == stages[0][0],
                inputs=inputs,
                progress=progress,
            )
        if not is_last:
            before = [*before, {"history": [dict(row) for row in trained.history], "best": trained.best}]
    earlier = [row for part in before for row in part["history"]]
    return trained.after(earlier)
