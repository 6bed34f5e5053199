"""Pairs of implicit representations of one shape, with one or two initializations, as in paper 003, chapter 3."""

import functools
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

import regauge as rg
from regauge.core.params import Params
from regauge.core.progress import Progress
from regauge.data.data_files import present
from regauge.data.shapes import SHAPES_SHA256, SHARED_START, shape, shared_start
from regauge.inr.fields.fields import CloudField
from regauge.inr.fields.signal_samples import EVALUATION, Queries, Samples, field_samples
from regauge.inr.fit_config import FitConfig
from regauge.inr.fitting import bce, fit
from regauge.inr.representation import Inr
from regauge.training import Adam
from regauge_papers.experiment import Run, Scale

CLOUD = 2048
"""The number of points of a shape to which a network is fitted."""
WIDE = 256
"""A limit on the width. On a laptop, wider networks are fitted with half of the batch size, and evaluated on fewer
samples."""
SHAPES = ("spot", "stanford-bunny", "fandisk", "horse", "rocker-arm", "cow")
BALL = "ball"
"""The name of a synthetic shape, for test runs without data."""


@dataclass(frozen=True)
class Study:
    """Settings: networks of several shapes.

    For every shape, all pairs share the first network. The first network has the shared initialization and sees one
    half of the points of the shape. The second network sees the other half of the points. The second network of a pair
    has the shared initialization ("same") or a separate initialization.
    """

    shapes: tuple[str, ...]
    pairs: int  # starts of second networks, for each shape
    inr: Inr  # the architecture of every network
    fit: FitConfig
    queries: Queries  # samples that the networks are fitted to
    points: int = 25  # networks on each line, both ends included
    judged: int = EVALUATION.total  # samples that a loss is measured on
    notes: tuple[str, ...] = ()  # departures of the scale

    @property
    def key(self) -> tuple[object, ...]:
        """The settings on which all results depend, and under which results are stored."""
        return self.inr, self.fit, self.queries, self.judged

    @property
    def description(self) -> str:
        """The protocol in a sentence."""
        widths = "-".join(map(str, self.inr.widths))
        return (
            f"SIREN {widths}, omega {self.inr.omega:g}, fitted to unsigned distances from {CLOUD:,} points (clipped at "
            f"{self.inr.limit:g}) in {self.fit.steps} steps of {self.fit.batch:,} of {self.queries.total:,} samples, "
            f"Adam with learning rate {self.fit.optimizer.lr:g}; {len(self.shapes)} shapes ({', '.join(self.shapes)}), "
            f"{self.pairs} pair(s) of starts; {self.points} points on each line"
        )


@dataclass(frozen=True)
class Shape:
    """The networks of one shape, with the data for evaluation and for methods."""

    name: str
    study: Study  # the settings of all networks
    run: Run  # draws the data
    first: Params  # the network from the shared start
    same: Params  # one from the shared start, fitted to other points of the shape
    others: tuple[Params, ...]  # networks from starts of their own, fitted to the same points as `same`

    def prune(self, share: float) -> "Shape":
        """Set a share of the parameters of every network to zero, beginning with the smallest parameters."""
        if not share:
            return self
        first, same, *others = (_prune(params, share) for params in (self.first, self.same, *self.others))
        return replace(self, first=first, same=same, others=tuple(others))

    @cached_property
    def judge(self) -> rg.Task:
        """The task with the loss on samples. Half of the samples come from each of the two samplings of the surface."""
        parts = [
            _samples(self.study, self.name, half, self.run.generator("evaluation", self.name, half), EVALUATION)
            for half in (0, 1)
        ]
        # Evenly spread ones of both: they are sorted by their distance from the surface.
        every = 2 * EVALUATION.total // self.study.judged
        points, labels = (
            torch.cat([getattr(part, field)[::every] for part in parts]) for field in ("points", "labels")
        )
        return rg.Task(self.study.inr.module(), [(points, labels)], lambda outputs, labels: bce(outputs, labels).mean())

    @cached_property
    def symmetry(self) -> rg.Symmetry:
        """The symmetry of the architecture."""
        return rg.discover(self.judge.module, (torch.zeros(2, self.study.inr.in_features),))

    @cached_property
    def samples(self) -> Samples:
        """The samples to which the second networks were fitted."""
        return _samples(self.study, self.name, 1, self.run.generator("samples", self.name, 1))

    def read(self, purpose: str, count: int, batch: int) -> rg.Task:
        """Return the task with the loss on a random subset of the samples."""
        order = torch.randperm(len(self.samples), generator=self.run.generator(purpose, self.name))[:count]
        batches = [(self.samples.points[part], self.samples.labels[part]) for part in torch.split(order, batch)]
        return rg.Task(self.judge.module, batches, self.judge.criterion)


def study(scale: Scale, width: int) -> Study:
    """Return the settings: six shapes with three pairs of initializations; the paper has one pair per shape."""
    if scale == "smoke":
        small = Queries(500, 400, 50, 50)
        return Study((BALL,), 1, Inr(width=12, depth=2), FitConfig(steps=30, batch=200, optimizer=Adam(1e-3)), small, 5)
    if scale == "cpu" and width > WIDE:
        notes = ("batches half as large as the paper's",)
        return Study(SHAPES, 3, Inr(width=width), FitConfig(batch=5_000), Queries(), judged=4_000, notes=notes)
    return Study(SHAPES if scale == "cpu" else tuple(SHAPES_SHA256), 3, Inr(width=width), FitConfig(), Queries())


def networks(study: Study, run: Run) -> list[Shape]:
    """Return all networks, fitted now or by an earlier run."""
    kinds = ("first", "same", *map(str, range(study.pairs)))
    found = run.grid("fitting", functools.partial(_network, study, run), study.shapes, kinds)
    return [
        Shape(name, study, run, first, same, tuple(others))
        for name, (first, same, *others) in zip(study.shapes, found, strict=True)
    ]


def clouds(name: str) -> tuple[Tensor, Tensor]:
    """Return two samplings of a surface without common points, `[2048, 3]` each."""
    if name == BALL:
        points = torch.randn(2 * CLOUD, 3, generator=torch.Generator().manual_seed(0))
        points = 0.7 * points / points.norm(dim=1, keepdim=True)
    else:
        points = shape(name).points
    return points[:CLOUD], points[CLOUD : 2 * CLOUD]


def starts(study: Study, kind: str, name: str, run: Run) -> Params:
    """Return an initialization: the shared initialization of inr2vec if it fits and is present, otherwise a random
    initialization.
    """
    if kind in ("first", "same"):
        if study.inr == Inr() and present(SHARED_START) is not None:
            return shared_start()
        return study.inr.start(run.generator("shared start"))
    return study.inr.start(run.generator("start", name, kind))


def _network(study: Study, run: Run, unit: Progress, name: str, kind: str) -> Params:
    def make() -> Params:
        half = 0 if kind == "first" else 1
        start, seen = starts(study, kind, name, run), _samples(study, name, half, run.generator("samples", name, half))
        generator = run.generator("fit", name, kind)
        return fit(study.inr, seen, study.fit, start=start, generator=generator, progress=unit).params

    return run.network((study.inr, study.fit, study.queries), f"{name}-{kind}", make)


def _samples(study: Study, name: str, half: int, generator: torch.Generator, queries: Queries | None = None) -> Samples:
    return field_samples(CloudField(clouds(name)[half]), study.inr, queries or study.queries, generator=generator)


def _prune(params: Params, share: float) -> Params:
    sizes = torch.cat([tensor.abs().flatten() for tensor in params.values()])
    limit = sizes.kthvalue(max(1, round(share * len(sizes)))).values
    return {name: torch.where(tensor.abs() <= limit, 0.0, tensor) for name, tensor in params.items()}
