"""Figures A13 and A14 of paper 004: mirrored Gaussians matched under three costs, and alignment time by width."""

import functools
import math
import time
from dataclasses import dataclass

import torch
from torch import nn

import regauge as rg
from regauge.alignment.methods.gaussian_matching import GaussianCost
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.transport.wasserstein import distance
from regauge.core.params import Params
from regauge.nets.classification import initialize
from regauge.nets.mlp import mlp
from regauge.nets.resnet import resnet20
from regauge.report.pictures import Chart, Series
from regauge_papers.experiment import Run, Scale
from regauge_papers.table import Quantity, Record, Row, Table

COSTS: dict[GaussianCost, str] = {
    "mean": "means alone, to which the paper reduces the KL divergence",
    "kl": "KL divergence",
    "wasserstein": "Wasserstein distance",
}
"""The costs by which units are matched in figure A13, each with its description in the table."""
MEAN, STDS = 1.0, (0.2, 0.8)
"""The mean and the standard deviations of two parameters. The two parameters have equal means, so the means cannot
determine the matching."""
TIMES = (
    Quantity("points, CPU s", of=lambda record: float(record["points"])),
    Quantity("posteriors, CPU s", of=lambda record: float(record["posteriors"])),
    Quantity("ratio", 2, lambda record: float(record["posteriors"] / record["points"])),
)


def mirrored_config(scale: Scale) -> None:
    """Return no settings, because at every scale, one Gaussian is matched to its mirror image."""


def match_mirrored(config: None, run: Run) -> Table:
    """Match the mirror image to the Gaussian. All costs should find that the two parameters are swapped."""
    symmetry = rg.Symmetry.from_axes({"theta": ("units",)}, kinds={"units": "permutation"})
    mean, std = torch.full((2,), MEAN), torch.tensor(STDS)
    first, second = (GaussianPosterior({"theta": mean}, {"theta": one}) for one in (std, std.flip(0)))
    rows, series = [], [Series("first", *_circle(first)), Series("second, its mirror image", *_circle(second))]
    for cost, label in COSTS.items():
        found = rg.align(first, second, symmetry, method=rg.GaussianMatching(cost=cost))
        is_swapped = found.element["units"].perm is not None and found.element["units"].perm.tolist() == [1, 0]
        left = distance(first, found.params).total
        rows.append(Row(label, {"swapped": [[float(is_swapped)]], "squared distance left": [[left]]}))
        series.append(Series(f"second, matched by {cost}", *_circle(found.params), style="dashed"))
    notes = (
        f"means {MEAN:g} for both parameters, standard deviations {STDS[0]:g} and {STDS[1]:g}, "
        "and the other way round in the mirror image",
        "the paper's appendix B drops the trace term of the KL divergence, as if permutations did not change it, and "
        "is left with the means; they agree as they are, so that nothing is swapped. The divergence itself finds the "
        "swap, as the Wasserstein distance does",
    )
    quantities = (Quantity("swapped", 0), Quantity("squared distance left"))
    chart = Chart("One standard deviation", "first parameter", "second parameter", tuple(series))
    return Table("Figure A13: costs", notes, quantities, tuple(rows), pictures={"ellipses": (chart,)})


def _circle(posterior: GaussianPosterior) -> tuple[list[float], list[float]]:
    """Return the ellipse of one standard deviation."""
    (x, y), (a, b) = posterior.mean["theta"].tolist(), posterior.std["theta"].tolist()
    angles = [2 * math.pi * k / 60 for k in range(61)]
    return [x + a * math.cos(angle) for angle in angles], [y + b * math.sin(angle) for angle in angles]


@dataclass(frozen=True)
class Timing:
    """Settings: pairs of networks of several widths."""

    mlps: tuple[int, ...]  # widths
    resnets: tuple[int, ...]  # multipliers of the channels of ResNet20
    repeats: int  # pairs of each width


def timing_config(scale: Scale) -> Timing:
    """Return the settings: widths up to that of the paper's MLP."""
    if scale == "smoke":
        return Timing((8, 16), (1,), 2)
    widths = (64, 128, 256, 512) if scale == "cpu" else (64, 128, 256, 512, 1024, 2048)
    return Timing(widths, (1, 2, 4) if scale == "cpu" else (1, 2, 4, 8, 16), 3)


def measure_times(config: Timing, run: Run) -> Table:
    """Measure the CPU seconds of two alignments, one after the other."""
    cases = [("MLP 784-3 x ", width) for width in config.mlps]
    cases += [("ResNet20 with FRN, width x", width) for width in config.resnets]
    measure = functools.partial(_measure_time, run)
    found = run.records("aligning", "timing", measure, cases, range(config.repeats))
    rows = [Row.of(f"{name}{width}", [own], TIMES) for (name, width), own in zip(cases, found, strict=True)]
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
    return Table("Figure A14: time", notes, TIMES, tuple(rows), pictures={"seconds": tuple(charts)})


@functools.cache
def _discovered(name: str, width: int) -> tuple[nn.Module, rg.Symmetry]:
    """Return networks of one width and their symmetry, which all repetitions of the measurement share."""
    is_mlp = name.startswith("MLP")
    module: nn.Module = mlp(784, *[width] * 3, 10) if is_mlp else resnet20(width=width, norm="filter")
    return module, rg.discover(module, (torch.zeros(2, 784) if is_mlp else torch.zeros(2, 3, 32, 32),))


def _measure_time(run: Run, case: tuple[str, int], repeat: int) -> Record:
    generator = run.generator("timing", *case, repeat)
    module, symmetry = _discovered(*case)
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
