"""Functional loss barriers between posteriors, with and without alignment: figures 4, 5, 7 to 9 and 11 of paper 004."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev

import regauge as rg
from regauge.alignment import Method
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.prediction.posterior_line import posterior_line
from regauge.bayes.prediction.predict import predict
from regauge.bayes.transport.wasserstein import distance
from regauge.bayes.variational.diagnostics import diagnose
from regauge.connect import Curve
from regauge.core.task import Batch
from regauge.papers.bayesian.inference import Family, batches, posteriors
from regauge.papers.experiment import Run
from regauge.papers.line_quantities import curve_of
from regauge.papers.pictures import Chart, Picture, Series
from regauge.papers.table import Quantity, Record, Row, Table, mean_curve
from regauge.papers.ways import permutations_only

SPLITS = {"train": False, "test": True}
QUANTITIES = (
    Quantity("barrier, train"),
    Quantity("barrier, test"),
    Quantity("removed, test"),
    Quantity("Monte Carlo error"),
    Quantity("loss of the ends, test"),
    Quantity("accuracy of the ends"),
    Quantity("accuracy halfway"),
    Quantity("KL per example", 2),
    Quantity("sigma / prior sigma"),
    Quantity("active units", 2),
)


@dataclass(frozen=True)
class Arm:
    """A way to align the second posterior of a pair.

    Attributes:
        label: Its name in the table.
        method: The method of alignment; None leaves the posterior as it was inferred.
        restrict: Takes the symmetry to the part of it that is used.
    """

    label: str
    method: Method | None
    restrict: Callable[[rg.Symmetry], rg.Symmetry] | None = None


NAIVE = Arm("as inferred", None)
ALIGNED = Arm("aligned", rg.GaussianMatching())
PERMUTED = Arm("aligned by permutations", rg.GaussianMatching(), permutations_only)
SIGNED = Arm("aligned by permutations and signs", rg.GaussianMatching())
BALANCED = Arm("aligned by permutations, signs and scales", rg.GaussianMatching(method=rg.WeightMatching()))


@dataclass(frozen=True)
class Case:
    """Pairs of posteriors of one kind.

    Attributes:
        label: Its name in the table and of its chart.
        family: The posteriors.
        pairs: Number of pairs; no posterior is in two of them.
        position: Its position on the axis of a chart over cases.
        series: The curve of that chart that it belongs to.
    """

    label: str
    family: Family
    pairs: int
    position: float | None = None
    series: str = ""


@dataclass(frozen=True)
class Barriers:
    """One comparison.

    Attributes:
        title: Title of the table.
        cases: The rows, each with every arm.
        arms: Ways to align; the first leaves the posteriors as they are.
        points: Points of each line, both ends included.
        samples: Samples of each posterior.
        train: Number of training images that are evaluated.
        test: Number of test images.
        axis: Label of the cases' positions, for a chart over them.
        claim: The paper's claim and our finding, for the reader of the table.
        notes: Departures of the scale.
    """

    title: str
    cases: tuple[Case, ...]
    arms: tuple[Arm, ...]
    points: int
    samples: int
    train: int
    test: int
    axis: str = ""
    claim: str = ""
    notes: tuple[str, ...] = ()


def measure(config: Barriers, run: Run) -> Table:
    """Infer the posteriors, align each pair in every way, and evaluate the geodesics."""
    inferred = [posteriors(case.family, 2 * case.pairs, run) for case in config.cases]
    cells = [(k, arm, pair) for k, case in enumerate(config.cases) for arm in config.arms for pair in range(case.pairs)]
    steps = [partial(_line, config, config.cases[k], pair, arm, inferred[k], run) for k, arm, pair in cells]
    lines = iter(run.each("evaluating geodesics", steps))
    rows, curves = [], {}
    for case, found in zip(config.cases, inferred, strict=True):
        states = [_state(case.family, index, posterior, run) for index, posterior in enumerate(found)]
        records = [[next(lines) for _ in range(case.pairs)] for _ in config.arms]
        for arm, own in zip(config.arms, records, strict=True):
            rows.append(_row(case, arm, own, records[0], states))
            curves[case.label, arm.label] = mean_curve([record["test"] for record in own])
    notes = (
        *([config.claim] if config.claim else []),
        "loss: negative log predictive likelihood per example, in nats (the paper's L is the positive log likelihood, "
        "summed, so that its equation 10 as printed is never the barrier); geodesics of the 2-Wasserstein distance, on "
        "which standard deviations are interpolated",
        f"{config.points} points, {config.samples} samples of each posterior with common random numbers, the first "
        f"{config.train:,} training and {config.test:,} test images; ± is the standard error over pairs, and 'Monte "
        "Carlo error' that of one barrier",
        *(_describe(case) for case in config.cases),
        *config.notes,
    )
    return Table(config.title, notes, QUANTITIES, tuple(rows), pictures=_pictures(config, curves, rows))


def _describe(case: Case) -> str:
    family = case.family
    return f"{case.label}: {family.name}, {case.pairs} pair(s), {family.examples:,} training images, {family.settings}"


def _line(config: Barriers, case: Case, pair: int, arm: Arm, found: Sequence[GaussianPosterior], run: Run) -> Record:
    """One pair, aligned in one way, with the losses along its geodesic."""
    family = case.family

    def make() -> Record:
        module = family.module()
        symmetry = rg.discover(module, (family.images().test_images[:4],))
        symmetry = symmetry if arm.restrict is None else arm.restrict(symmetry)
        a, b = found[2 * pair : 2 * pair + 2]
        noise = b.draw(config.samples, run.generator("noise", family, pair)) if b.std else {}
        seconds = 0.0
        if arm.method is not None:
            generator = run.generator("alignment", family, pair)
            began = time.thread_time()
            element = rg.align(a, b, symmetry, method=arm.method, generator=generator).element
            seconds = time.thread_time() - began
            noise = b.push_noise(symmetry, element, noise) if noise else {}
            b = b.push(symmetry, element)
        record: Record = {"seconds": seconds, "distance": distance(a, b).total}
        for split, is_test in SPLITS.items():
            data = batches(family, config.test if is_test else config.train, is_test=is_test)
            if a.std:
                curve: Curve = posterior_line(module, a, b, data, noise=noise, points=config.points)
                record[f"{split} error"] = curve.error  # type: ignore[attr-defined]
            else:

                def metrics(params: rg.Params, data: Sequence[Batch] = data) -> Mapping[str, float]:
                    return predict(module, params, data).metrics

                curve = rg.line(a.mean, b.mean, metrics, points=config.points)
            record[split] = list(curve.table)
        return record

    sizes = (config.points, config.samples, config.train, config.test)
    restricted = arm.restrict.__name__ if arm.restrict is not None else ""
    return run.record((family, arm.method, restricted, *sizes), str(pair), make)


def _state(family: Family, index: int, posterior: GaussianPosterior, run: Run) -> Record:
    """Diagnose how much of a posterior is pruned."""
    if not posterior.std:
        return {}

    def make() -> Record:
        symmetry = rg.discover(family.module(), (family.images().test_images[:4],))
        state = diagnose(posterior, family.prior_std, family.examples, symmetry)
        return {
            "KL per example": state.kl_per_example,
            "sigma / prior sigma": state.std_ratio,
            "active units": state.active_share,
        }

    return run.record((family, "diagnostics"), str(index), make)


def _row(case: Case, arm: Arm, records: Sequence[Record], naive: Sequence[Record], states: Sequence[Record]) -> Row:
    curves = {split: [curve_of(record, split) for record in records] for split in SPLITS}
    test = [curve.barrier for curve in curves["test"]]
    before = [curve_of(record, "test").barrier for record in naive]
    ends = [end for curve in curves["test"] for end in (curve.table[0], curve.table[-1])]
    values = {
        "barrier, train": [[curve.barrier for curve in curves["train"]]],
        "barrier, test": [test],
        "accuracy halfway": [[curve.table[len(curve.table) // 2]["accuracy"] for curve in curves["test"]]],
    }
    if "test error" in records[0]:
        values["Monte Carlo error"] = [[record["test error"] for record in records]]
    if arm.method is not None and min(before) > 0:
        values["removed, test"] = [[1 - after / first for after, first in zip(test, before, strict=True)]]
    if arm.method is None:
        values["loss of the ends, test"] = [[end["loss"] for end in ends]]
        values["accuracy of the ends"] = [[end["accuracy"] for end in ends]]
        for name in states[0]:
            values[name] = [[state[name] for state in states]]
    return Row(f"{case.label}, {arm.label}", values)


def _pictures(
    config: Barriers, curves: Mapping[tuple[str, str], Sequence[Mapping[str, float]]], rows: Sequence[Row]
) -> dict[str, Picture]:
    """Losses along the geodesics and, where the cases have positions, barriers over them."""
    if not config.axis:
        return {"lines": tuple(_line_chart(config, case, curves) for case in config.cases)}
    count = len(config.arms)
    charts = []
    for split in SPLITS:
        series = []
        for name in dict.fromkeys(case.series for case in config.cases):
            for j, arm in enumerate(config.arms):
                of = [(k, case) for k, case in enumerate(config.cases) if case.series == name]
                found = [rows[count * k + j].values[f"barrier, {split}"][0] for k, _ in of]
                x = [case.position for _, case in of if case.position is not None]
                middle = [fmean(values) for values in found]
                error = [stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0 for values in found]
                series.append(
                    Series(
                        f"{name}{', ' if name else ''}{arm.label}",
                        x,
                        middle,
                        [m - e for m, e in zip(middle, error, strict=True)],
                        [m + e for m, e in zip(middle, error, strict=True)],
                        "dashed" if arm.method is None else "line",
                    )
                )
        charts.append(Chart(f"Barrier, {split} images", config.axis, "nats per example", tuple(series), True))
    return {"barriers": tuple(charts)}


def _line_chart(config: Barriers, case: Case, curves: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> Chart:
    series = tuple(
        Series(
            arm.label,
            [row["t"] for row in curves[case.label, arm.label]],
            [row["loss"] for row in curves[case.label, arm.label]],
            style="dashed" if arm.method is None else "line",
        )
        for arm in config.arms
    )
    return Chart(case.label, "t", "test loss (nats)", series)
