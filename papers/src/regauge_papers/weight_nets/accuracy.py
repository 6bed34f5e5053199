"""Prediction of accuracies from weights by several readers, for zoo networks with varied settings."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from regauge.core.element import PARTS
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.learn.targets import Target
from regauge.report.pictures import Chart, Series
from regauge.zoo import PopulationConfig
from regauge_papers.experiment import Run
from regauge_papers.table import Quantity, Record, Row, Table
from regauge_papers.weight_nets.known import Known
from regauge_papers.weight_nets.readers import Reader, Together
from regauge_papers.zoo_populations import SHARES, split_runs, train_population

QUANTITIES = (
    Quantity("tau"),
    Quantity("tau, ends"),
    Quantity("R2"),
    Quantity("error", 4),
    Quantity("tau, moved"),
    Quantity("change", 4),
    Quantity("CPU s", 0),
)


@dataclass(frozen=True)
class Study:
    """Settings: populations of one architecture, and the readers that predict accuracies."""

    what: str  # the networks, in words
    populations: tuple[tuple[str, PopulationConfig], ...]  # by the names of their folders
    readers: tuple[Reader | Together, ...]
    splits: int  # of the runs, each at random
    paper: str = ""  # what others report, in a sentence


@dataclass(frozen=True, eq=False)
class Networks:
    """All finite networks of a study.

    Attributes:
        params: The parameters, `[networks, ...]`.
        accuracies: The accuracies on held-out images, `[networks]`.
        runs: The index of the training of each network, `[networks]`.
        is_end: Whether each network is the last network of its training, `[networks]`.
        symmetry: The symmetry of all networks.
    """

    params: Params
    accuracies: NDArray[np.float64]
    runs: NDArray[np.int64]
    is_end: NDArray[np.bool_]
    symmetry: Symmetry


def measure(study: Study, run: Run) -> Table:
    """Train the populations and every reader on every split, and evaluate each reader on unseen runs."""
    known = train_populations(study, run)
    single = [reader for reader in study.readers if not isinstance(reader, Together)]
    settings = (tuple(config for _, config in study.populations), SHARES)
    made = run.records("reading", settings, partial(predict, known, run), single, range(study.splits))
    records = dict(zip(single, made, strict=True))
    found = [
        [score(one) for one in records[reader]]
        if not isinstance(reader, Together)
        else [score(_mean(parts)) for parts in zip(*(records[one] for one in reader.readers), strict=True)]
        for reader in study.readers
    ]
    rows = [Row.of(reader.label, [scores], QUANTITIES) for reader, scores in zip(study.readers, found, strict=True)]
    ends = known.accuracies[known.is_end]
    low, middle, high = (float(q) for q in np.quantile(ends, (0.1, 0.5, 0.9)))
    tested = statistics.fmean(len(record["measured"]) for record in found[0])
    exact = [scores for reader, scores in zip(study.readers, found, strict=True) if reader.is_invariant]
    change = max(record["change"] for scores in exact for record in scores)
    notes = (
        f"{study.what}: {len(set(known.runs.tolist()))} runs, {len(ends)} of which came to their end, with "
        f"{len(known.accuracies)} networks at several ages; accuracy at the end (10%, 50% and 90% of the runs are "
        f"below) {low:.3f}, {middle:.3f}, {high:.3f}, on images kept from training",
        f"{study.splits} random splits by run, 70% for training, 10% for validation, 20% ({tested:.0f} networks) for "
        "testing; a ± b is the mean over splits and its standard error",
        "tau: Kendall's (b) between predicted and measured accuracy of the test networks; tau, ends: of those at the "
        "end of their runs alone; error: mean absolute error",
        "tau, moved: after a random element of the whole group moved every test network, which computes the same "
        "function then; change: the largest change of a prediction, in double precision; of readers that respect the "
        f"whole group it is below {10 ** math.ceil(math.log10(max(change, 1e-16))):.0e}",
        "CPU s: of training, in which every net has the same budget",
        *((study.paper,) if study.paper else ()),
    )
    pictures = {"scatter": tuple(_scatter(reader, scores) for reader, scores in zip(study.readers, found, strict=True))}
    return Table(f"Accuracy of {study.what}, from their weights", notes, QUANTITIES, tuple(rows), pictures=pictures)


def train_populations(study: Study, run: Run) -> Networks:
    """Train the missing networks of the populations in the folder of the run, and read all networks."""
    stores = [train_population(name, config, run) for name, config in study.populations]
    params, accuracies, runs, is_end = [], [], [], []
    for k, store in enumerate(stores):
        rows = store.rows
        usable = rows.where(is_diverged=False, is_finite=True)
        params.append(store.read(usable))
        accuracies.append(np.asarray(rows["validation_accuracy"][usable], np.float64))
        runs.append(np.asarray(rows["id"][usable], np.int64) * len(stores) + k)
        is_end.append(np.isin(usable, rows.final()) & (rows["step"][usable] == rows["step"][usable].max()))
    joined = {name: torch.cat([part[name] for part in params]) for name in params[0]}
    symmetry = stores[0].require_symmetry()
    return Networks(joined, np.concatenate(accuracies), np.concatenate(runs), np.concatenate(is_end), symmetry)


def predict(known: Networks, run: Run, reader: Reader, number: int) -> Record:
    """Train a reader on a split, and predict the accuracies of test networks, unchanged and transformed by random
    elements.
    """
    parts = split_runs(known.runs, run.generator("split", number))
    began = time.process_time()
    learned = Known(known.params, known.accuracies, known.symmetry, parts)
    fitted = reader.fit(learned, run.generator("reader", number))
    seconds = time.process_time() - began
    networks = {name: t.double() for name, t in learned.read(parts["test"]).items()}
    element = known.symmetry.random(run.generator("moves", number), PARTS, (len(parts["test"]),))
    return {
        "predicted": fitted(networks).tolist(),
        "moved": fitted(known.symmetry.act(element, networks)).tolist(),
        "measured": known.accuracies[parts["test"]].tolist(),
        "is end": known.is_end[parts["test"]].tolist(),
        "CPU s": seconds,
    }


def score(record: Record) -> Record:
    """Add the scores that the table shows to predictions."""
    predicted, moved, measured = (np.array(record[name]) for name in ("predicted", "moved", "measured"))
    is_end = np.array(record["is end"])
    target = Target.of("accuracy", measured, measured, "fractions")
    scores = target.score(predicted, measured)
    return {
        **record,
        "tau": scores["tau"],
        "tau, ends": target.score(predicted[is_end], measured[is_end])["tau"],
        "R2": scores["R2"],
        "error": scores["absolute error"],
        "tau, moved": target.score(moved, measured)["tau"],
        "change": float(abs(moved - predicted).max()),
    }


def _mean(records: Sequence[Record]) -> Record:
    """Return the averaged predictions of several readers for the same networks."""
    means = {name: np.mean([record[name] for record in records], 0).tolist() for name in ("predicted", "moved")}
    return {**records[0], **means, "CPU s": sum(record["CPU s"] for record in records)}


def _scatter(reader: Reader | Together, scores: Sequence[Record]) -> Chart:
    """Return a scatter plot of the test networks of the first split."""
    record = scores[0]
    ends = (min(record["measured"]), max(record["measured"]))
    points = Series("", record["measured"], np.clip(record["predicted"], *ends).tolist(), style="points")
    return Chart(
        f"{reader.label}: {record['tau']:.3f}", "measured accuracy", "predicted", (points, Series("", ends, ends))
    )
