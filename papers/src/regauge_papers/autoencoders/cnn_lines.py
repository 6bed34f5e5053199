"""Paper 002, figures 4, 5 and 9: lines between small CNNs: between unaligned weights, aligned weights, decoded weights
and latent vectors.

References:
    Paper 002, section 5 (CNN interpolation) and appendix D.3.
"""

import statistics
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

import regauge as rg
from regauge.alignment import align_pairs
from regauge.core.params import Params
from regauge.report.pictures import Chart, Series
from regauge_papers.autoencoders import cnns
from regauge_papers.autoencoders.lines import decoded_lines, straight_lines
from regauge_papers.experiment import Run, Scale
from regauge_papers.table import AREA, BARRIER, Quantity, Record, Row, Table, curve_of, halfway
from regauge_papers.ways import PUBLISHED_WEIGHTS, Way, permutations_only
from regauge_papers.zoo_populations import train_population

WAYS = (
    Way("naive"),
    Way("Git Re-Basin, permutations", PUBLISHED_WEIGHTS, permutations_only),
    Way("weight matching, the whole symmetry", rg.WeightMatching()),
)
"""The methods that align the second network of a pair without an autoencoder."""
QUANTITIES = (
    replace(BARRIER, digits=4),
    Quantity("of naive"),
    replace(AREA, digits=4),
    Quantity("end loss", of=lambda record: (record["line"][0]["loss"] + record["line"][-1]["loss"]) / 2),
    Quantity("accuracy, ends", of=lambda record: (record["line"][0]["accuracy"] + record["line"][-1]["accuracy"]) / 2),
    Quantity("accuracy, middle", of=halfway("accuracy")),
)
KINDS = ("copies", "the best", "any two")
DRAWN = 4
"""The number of pairs of each kind whose lines are plotted separately."""


@dataclass(frozen=True)
class Study:
    """Settings for lines between test networks of populations of small CNNs, with the autoencoders of table 2."""

    cnns: cnns.Study
    pairs: int  # of each kind
    line: int  # points on each line


def config(scale: Scale) -> Study:
    """Return the settings: 20 pairs of each kind, as in the paper."""
    known = cnns.config(scale)
    if scale == "smoke":
        return Study(replace(known, populations=known.populations[1:]), 2, 3)
    return Study(known, 20, 11 if scale == "cpu" else 21)


def measure(study: Study, run: Run) -> Table:
    """Measure the lines between pairs of each kind by each method."""
    rows, pictures = [], {}
    for name, settings in study.cnns.populations:
        networks = cnns.Networks.of(train_population(name, settings, run), settings, study.cnns.images, run)
        activation = settings.architecture.settings["activation"]
        drawn = partial(measure_kind, networks, study, run)
        records = run.records(f"lines {activation}", (study, settings), drawn, KINDS)
        for kind, record in zip(KINDS, records, strict=True):
            rows += rows_of(f"{activation}, {kind}", record)
        pictures[activation] = charts_of(records[KINDS.index("any two")])
    notes = (
        f"the populations, autoencoders and images for evaluation of `cnns`: {study.pairs} pairs of test networks of "
        f"each kind, {study.line} points on each line, from the less to the more accurate network",
        "copies: a network and a copy that a random element of its whole group moved; the best: disjoint pairs of the "
        "most accurate test networks, twice as many as are drawn; any two: of all test networks",
        "loss: cross entropy of the classes, in nats; of naive: the mean barrier as a share of that of the line "
        "between the networks as they are; end loss and accuracy, ends: means of both ends",
        "decoded: the line between the weights of the decoded networks, latent: the networks decoded from the line "
        "between the latent vectors, by the encoders that are named; their ends are decoded networks",
        "Git Re-Basin knows permutations alone here, as in the paper, which shows curves without numbers",
    )
    title, loss = "Lines between small CNNs", "cross entropy, nats"
    return Table(title, notes, QUANTITIES, tuple(rows), loss, pictures=pictures)


def measure_kind(networks: cnns.Networks, study: Study, run: Run, kind: str) -> Record:
    """Measure the lines between pairs of one kind by each method."""
    symmetry, module = networks.store.require_symmetry(), networks.store.architecture.module()
    task = rg.Task(module, [(networks.images, networks.labels)])
    first, second = pairs_of(kind, networks, study.pairs, run.generator("pairs", networks.settings, kind))
    found = {}
    for way in WAYS:
        moved = second
        if way.method is not None:
            moved = align_pairs(first, second, way.restrict(symmetry), method=way.method).params
        found[way.label] = straight_lines(first, moved, task, study.line)
    for coder in study.cnns.coders:
        found |= decoded_lines(coder.label, networks.trained(coder, run), first, second, task, study.line)
    return {label: [list(curve.table) for curve in curves] for label, curves in found.items()}


def pairs_of(kind: str, networks: cnns.Networks, count: int, chance: torch.Generator) -> tuple[Params, Params]:
    """Return pairs of test networks of a kind as two populations."""
    symmetry, numbers, measured = networks.store.require_symmetry(), networks.parts["test"], networks.measured
    order = torch.randperm(len(numbers), generator=chance).numpy()
    if kind == "copies":
        first = networks.store.read(numbers[order[:count]])
        return first, symmetry.act(symmetry.random(chance, batch=(count,)), first)
    if kind == "the best":
        best = np.argsort(-measured, kind="stable")[: 4 * count]
        order = order[np.isin(order, best)]
    pairs = order[: 2 * count].reshape(-1, 2)
    pairs = np.take_along_axis(pairs, measured[pairs].argsort(1, kind="stable"), 1)
    first, second = (networks.store.read(numbers[column]) for column in pairs.T)
    return first, second


def rows_of(kind: str, record: Record) -> list[Row]:
    """Return the table rows for the lines of one kind."""
    naive = statistics.fmean(curve_of({"line": line}).barrier for line in record["naive"])
    rows = []
    for label, lines in record.items():
        row = Row.of(f"{kind}: {label}", [[{"line": line} for line in lines]], QUANTITIES)
        share = statistics.fmean(row.values["barrier"][0]) / max(naive, 1e-12)
        rows.append(replace(row, values={**row.values, "of naive": [[share]]}))
    return rows


def charts_of(record: Record) -> tuple[Chart, ...]:
    """Return charts of the accuracies on the lines of single pairs."""
    shown = [label for label in record if "permutations" not in label]
    charts = []
    for k in range(min(DRAWN, len(record["naive"]))):
        series = tuple(
            Series(label, [row["t"] for row in record[label][k]], [row["accuracy"] for row in record[label][k]])
            for label in shown
        )
        charts.append(Chart(f"pair {k + 1}", "t", "accuracy", series))
    return tuple(charts)
