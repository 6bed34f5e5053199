"""Populations of a zoo, which are trained in the folder of a run and split by training."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from regauge.core.progress import Progress
from regauge.learn.populations import Parts
from regauge.storage import Store
from regauge.zoo import PopulationConfig, plan_training
from regauge.zoo.jobs.driver import missing_jobs, perform
from regauge_papers.experiment import Run, make_once

SHARES = {"train": 0.7, "validation": 0.1, "test": 0.2}
"""The share of the runs in each part of a split."""


def train_population(name: str, config: PopulationConfig, run: Run) -> Store:
    """Return a population, trained now or by an earlier run. Each shard is a step of the run."""
    config = replace(config, seed=config.seed + 1000 * run.seed)
    store, jobs = plan_training(config, run.folder / "populations" / f"{name}-{config.count}-{config.seed}")

    def train(unit: Progress, key: int) -> None:
        own = replace(jobs, advance=unit("networks", len(jobs.ids(key))))
        make_once(store.path_of(jobs.name(key)), partial(perform, own, key))

    run.grid("networks", train, missing_jobs(jobs))
    store.refresh()
    return store


def split_runs(runs: NDArray[np.int64], generator: torch.Generator) -> Parts:
    """Return the indices of the networks of each part. All networks of a run are in the same part."""
    distinct = np.unique(runs)
    order = distinct[torch.randperm(len(distinct), generator=generator).numpy()]
    cuts = np.cumsum([round(share * len(distinct)) for share in SHARES.values()])[:-1]
    return {name: np.flatnonzero(np.isin(runs, part)) for name, part in zip(SHARES, np.split(order, cuts), strict=True)}
