"""Figure A13 of paper 004: two Gaussians that mirror each other, matched under three costs."""

import math

import torch

import regauge as rg
from regauge.alignment.methods.gaussian_matching import GaussianCost
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.transport.wasserstein import distance
from regauge.papers.experiment import Run, Scale
from regauge.papers.table import Chart, Quantity, Row, Series, Table

COSTS: dict[GaussianCost, str] = {
    "mean": "means alone, to which the paper reduces the KL divergence",
    "kl": "KL divergence",
    "wasserstein": "Wasserstein distance",
}


MEAN, STDS = 1.0, (0.2, 0.8)
"""Mean of both parameters, so that the means say nothing, and their standard deviations."""


def config(scale: Scale) -> None:
    """The same at every scale."""


def measure(config: None, run: Run) -> Table:
    """Match the mirror image to the Gaussian; the swap is what all costs ought to find."""
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
    """The ellipse of one standard deviation."""
    (x, y), (a, b) = posterior.mean["theta"].tolist(), posterior.std["theta"].tolist()
    angles = [2 * math.pi * k / 60 for k in range(61)]
    return [x + a * math.cos(angle) for angle in angles], [y + b * math.sin(angle) for angle in angles]
