"""Functional loss barriers between posteriors before and after alignment, for most figures of paper 004."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

import regauge as rg
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.prediction.posterior_landscape import posterior_line
from regauge.bayes.prediction.predict import predict
from regauge.bayes.transport.wasserstein import distance
from regauge.bayes.variational.diagnostics import compare_with_prior
from regauge.core.task import Batch
from regauge.report.pictures import Chart, Picture, Series, Style
from regauge_papers.bayesian.inference import Family, batches, move, posteriors
from regauge_papers.experiment import Run
from regauge_papers.table import Line, Quantity, Record, Row, Table, curve_of, loss_series, mean_curve, summarize
from regauge_papers.ways import Way, permutations_only

SPLITS = ("train", "test")
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


NAIVE = Way("as inferred")
ALIGNED = Way("aligned", rg.GaussianMatching())
PERMUTED = Way("aligned by permutations", rg.GaussianMatching(), permutations_only)
SIGNED = Way("aligned by permutations and signs", rg.GaussianMatching())
BALANCED = Way("aligned by permutations, signs and scales", rg.GaussianMatching(method=rg.WeightMatching()))


@dataclass(frozen=True)
class Case:
    """A set of pairs of posteriors of one kind. Each posterior is in one pair."""

    label: str  # in the table, and of its chart
    family: Family
    pairs: int
    position: float | None = None  # on the axis of a chart over cases
    series: str = ""  # the curve of that chart

    def describe(self, run: Run) -> str:
        """Return a description of the posteriors of a run."""
        name, examples, settings = self.family.name, self.family.examples, self.family.shown_settings
        changes = "" if self.family.augmentation is None else f", {self.family.augmentation} at random"
        changes += f", in {run.half_precision}" if self.family.is_bfloat16 else ""
        return f"{self.label}: {name}, {self.pairs} pair(s), {examples:,} training images{changes}, {settings}"


@dataclass(frozen=True)
class Barriers:
    """Settings of one comparison."""

    title: str
    cases: tuple[Case, ...]  # the rows, each aligned in every way
    ways: tuple[Way, ...]  # the first leaves the posteriors as they are
    points: int  # of each line, both ends included
    samples: int  # of each posterior
    images: int  # training images, and test images, that are evaluated
    axis: str = ""  # label of the cases' positions, for a chart over them
    claim: str = ""  # the paper's claim and our finding


def measure(config: Barriers, run: Run) -> Table:
    """Infer the posteriors, align each pair by each method, and evaluate the geodesics."""
    for case in config.cases:
        case.family.images()  # Raises for missing data before hours of inference.
    inferred: dict[Family, list[GaussianPosterior]] = {}
    for case in config.cases:
        found = posteriors(case.family, 2 * case.pairs, run)
        inferred[case.family] = max(found, inferred.get(case.family, []), key=len)
    cells = [(case.family, way, pair) for case in config.cases for way in config.ways for pair in range(case.pairs)]
    sizes = (config.points, config.samples, config.images)
    lines = iter(run.records("evaluating geodesics", sizes, partial(_measure_line, config, inferred, run), cells))
    rows, curves = [], {}
    for case in config.cases:
        found = inferred[case.family][: 2 * case.pairs]
        states = [_diagnose(case.family, index, posterior, run) for index, posterior in enumerate(found)]
        records = [[next(lines) for _ in range(case.pairs)] for _ in config.ways]
        for way, own in zip(config.ways, records, strict=True):
            rows.append(_row(case, way, own, records[0], states))
            curves[case.label, way.label] = mean_curve([record["test"] for record in own])
    notes = (
        *([config.claim] if config.claim else []),
        "loss: negative log predictive likelihood per example, in nats (the paper's L is the positive log likelihood, "
        "summed, so that its equation 10 as printed is never the barrier); geodesics of the 2-Wasserstein distance, on "
        "which standard deviations are interpolated",
        f"{config.points} points, {config.samples} samples of each posterior with common random numbers, the first "
        f"{config.images:,} training and {config.images:,} test images; ± is the standard error over pairs, and 'Monte "
        "Carlo error' that of one barrier",
        *(case.describe(run) for case in config.cases),
    )
    return Table(config.title, notes, QUANTITIES, tuple(rows), pictures=_pictures(config, curves, rows))


def _measure_line(
    config: Barriers,
    inferred: Mapping[Family, Sequence[GaussianPosterior]],
    run: Run,
    cell: tuple[Family, Way, int],
) -> Record:
    """Align one pair by one method, and measure the losses along its geodesic."""
    family, way, pair = cell
    module, symmetry = run.bring(family.module()), way.restrict(family.symmetry())
    a, b = inferred[family][2 * pair : 2 * pair + 2]
    noise = b.draw(config.samples, run.generator("noise", family, pair)) if b.std else {}
    b, noise, seconds = move(way.method, a, b, noise, symmetry, run.generator("alignment", family, pair))
    record: Record = {"seconds": seconds, "distance": distance(a, b).total}
    for split in SPLITS:
        data = run.bring(batches(family, config.images, is_test=split == "test"))
        if a.std:
            curve = posterior_line(a, b, module, data, noise=noise, points=config.points)
            record[f"{split} error"] = curve.error
            record[split] = list(curve.table)
        else:
            judge = partial(_predict, module, data)
            record[split] = list(rg.line(a.mean, b.mean, judge, points=config.points).table)
    return record


def _predict(module: nn.Module, data: Sequence[Batch], params: rg.Params) -> Mapping[str, float]:
    return predict(params, module, data).metrics


def _diagnose(family: Family, index: int, posterior: GaussianPosterior, run: Run) -> Record:
    """Measure the share of a posterior that equals the prior (over-pruning)."""
    if not posterior.std:
        return {}

    def make() -> Record:
        state = compare_with_prior(posterior, family.variational.prior_std, family.examples, family.symmetry())
        return {
            "KL per example": state.kl_per_example,
            "sigma / prior sigma": state.std_ratio,
            "active units": state.active_share,
        }

    return run.record((family, "diagnostics"), str(index), make)


def _row(case: Case, way: Way, records: Sequence[Record], naive: Sequence[Record], states: Sequence[Record]) -> Row:
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
    if way.method is not None and min(before) > 0:
        values["removed, test"] = [[1 - after / first for after, first in zip(test, before, strict=True)]]
    if way.method is None:
        values["loss of the ends, test"] = [[end["loss"] for end in ends]]
        values["accuracy of the ends"] = [[end["accuracy"] for end in ends]]
        for name in states[0]:
            values[name] = [[state[name] for state in states]]
    return Row(f"{case.label}: {way.label}", values)


def _pictures(config: Barriers, curves: Mapping[tuple[str, str], Line], rows: Sequence[Row]) -> dict[str, Picture]:
    """Return charts of the losses along geodesics and, if cases have positions (such as a width), of barriers by
    position.
    """

    def style(way: Way) -> Style:
        return "dashed" if way.method is None else "line"

    if not config.axis:
        charts = []
        for case in config.cases:
            series = tuple(loss_series(way.label, curves[case.label, way.label], style(way)) for way in config.ways)
            charts.append(Chart(case.label, "t", "test loss (nats)", series))
        return {"lines": tuple(charts)}
    count, charts = len(config.ways), []
    for split in SPLITS:
        lines = []
        for name in dict.fromkeys(case.series for case in config.cases):
            for j, way in enumerate(config.ways):
                of = [(k, case) for k, case in enumerate(config.cases) if case.series == name]
                found = [rows[count * k + j].values[f"barrier, {split}"] for k, _ in of]
                x = [case.position for _, case in of if case.position is not None]
                summaries = [summarize(values) for values in found]
                label = f"{name}{', ' if name else ''}{way.label}"
                low, high = ([one.span[side] for one in summaries] for side in (0, 1))
                lines.append(Series(label, x, [one.mean for one in summaries], low, high, style(way)))
        charts.append(Chart(f"Barrier, {split} images", config.axis, "nats per example", tuple(lines), True))
    return {"barriers": tuple(charts)}
