"""Figure A14 of paper 004: seconds to align posteriors, and points of the same networks, by width."""

import functools
import time
from dataclasses import dataclass

import torch
from torch import nn

import regauge as rg
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.core.params import Params
from regauge.nets.classification import initialize
from regauge.nets.mlp import mlp
from regauge.nets.resnet import resnet20
from regauge.papers.experiment import Run, Scale
from regauge.papers.table import Chart, Quantity, Record, Row, Series, Table

QUANTITIES = (
    Quantity("points, CPU s", of=lambda record: float(record["points"])),
    Quantity("posteriors, CPU s", of=lambda record: float(record["posteriors"])),
    Quantity("ratio", 2, lambda record: float(record["posteriors"] / record["points"])),
)


@dataclass(frozen=True)
class Timing:
    """Pairs of networks of several widths."""

    mlps: tuple[int, ...]  # widths
    resnets: tuple[int, ...]  # multipliers of the channels of ResNet20
    repeats: int  # pairs of each width


def config(scale: Scale) -> Timing:
    """Widths up to the paper's MLP."""
    if scale == "smoke":
        return Timing((8, 16), (1,), 2)
    widths = (64, 128, 256, 512) if scale == "cpu" else (64, 128, 256, 512, 1024, 2048)
    return Timing(widths, (1, 2, 4) if scale == "cpu" else (1, 2, 4, 8, 16), 3)


def measure(config: Timing, run: Run) -> Table:
    """CPU seconds of both alignments in turn."""
    cases = [("MLP 784-3 x ", width) for width in config.mlps]
    cases += [("ResNet20 with FRN, width x", width) for width in config.resnets]
    measure = functools.partial(_measure_time, run)
    found = run.records("aligning", "timing", measure, cases, range(config.repeats))
    rows = [Row.of(f"{name}{width}", [own], QUANTITIES) for (name, width), own in zip(cases, found, strict=True)]
    charts = []
    for name in dict.fromkeys(name for name, _ in cases):
        of = [(width, own) for (other, width), own in zip(cases, found, strict=True) if other == name]
        series = [
            Series(kind, [width for width, _ in of], [min(record[kind] for record in own) for _, own in of])
            for kind in ("points", "posteriors")
        ]
        charts.append(Chart(name.strip(), "width", "CPU seconds", tuple(series), True))
    notes = (
        "the paper: within a minute in most cases, and dearer for posteriors than for points, both on its hardware",
        "networks as initialized, standard deviations random; CPU seconds of one thread",
    )
    return Table("Figure A14: time", notes, QUANTITIES, tuple(rows), pictures={"seconds": tuple(charts)})


def _measure_time(run: Run, case: tuple[str, int], repeat: int) -> Record:
    name, width = case
    generator = run.generator("timing", name, width, repeat)
    is_mlp = name.startswith("MLP")
    module: nn.Module = mlp(784, *[width] * 3, 10) if is_mlp else resnet20(width=width, norm="filter")
    symmetry = rg.discover(module, (torch.zeros(2, 784) if is_mlp else torch.zeros(2, 3, 32, 32),))
    a, b = (_posterior(module, generator) for _ in range(2))
    began = time.thread_time()
    rg.align(a.mean, b.mean, symmetry, method=rg.WeightMatching(scales="keep"))
    middle = time.thread_time()
    rg.align(a, b, symmetry, method=rg.GaussianMatching())
    return {"points": middle - began, "posteriors": time.thread_time() - middle}


def _posterior(module: nn.Module, generator: torch.Generator) -> GaussianPosterior:
    mean = initialize(module, generator)
    std: Params = {n: 0.01 + 0.04 * torch.rand(t.shape, generator=generator) for n, t in mean.items()}
    return GaussianPosterior(mean, std)
