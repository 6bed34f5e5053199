"""Paper 000, figure 7.2: losses at the midpoint between trained networks, unaligned and aligned."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regauge import flow
from regauge.alignment import WeightMatching, align_pairs
from regauge.core.interpolation import interpolate
from regauge.core.params import Params, select
from regauge.core.symmetry import Symmetry
from regauge.flow.alignment import align_points, find_reference
from regauge.flow.space import Space
from regauge.report.pictures import Chart, Series
from regauge.zoo import Checkpoints, PopulationConfig
from regauge.zoo.presets import mlp_architecture, uci_mlps
from regauge_papers.experiment import Run, Scale
from regauge_papers.flows.networks import Networks, fewer
from regauge_papers.table import Quantity, Record, Row, Table

QUANTITIES = (
    Quantity("loss halfway"),
    Quantity("over pairs"),
    Quantity("barrier"),
    Quantity("pairs with a barrier above 0.01", 2),
    Quantity("accuracy halfway", 4),
)
AT_ONCE = 512
"""The number of pairs that are evaluated at a time."""
SHOWN = 101
"""The number of points of each curve."""
KEEP = WeightMatching(scales="keep")


@dataclass(frozen=True)
class Study:
    """Settings: a population, and the number of networks that are compared."""

    population: PopulationConfig
    networks: int


def config(scale: Scale) -> Study:
    """Return the settings: all pairs of 250 networks of 100 runs, as in the thesis."""
    population = replace(uci_mlps(100), checkpoints=Checkpoints(every=40, warmup=80))
    if scale == "smoke":
        small = replace(fewer(population, 12, 2), architecture=mlp_architecture(30, 4, 4, 2))
        return Study(small, 8)
    return Study(population, 250)


def measure(study: Study, run: Run) -> Table:
    """Align the networks by several methods, and evaluate all pairs."""
    networks = Networks.of("uci-pairs", study.population, run)
    count = min(study.networks, len(networks.store))
    numbers = torch.randperm(len(networks.store), generator=run.generator("networks"))[:count].sort().values
    known = networks.store.read(numbers.numpy())
    symmetry, task = networks.store.require_symmetry(), networks.task()
    first, second = torch.triu_indices(count, count, offset=1)
    ends = task.evaluate_each(known)["loss"]

    def score(label: str) -> Record:
        moved = known if label.startswith("every pair") else _align(label, known, symmetry)
        losses, accuracies = [], []
        for one, other in zip(torch.split(first, AT_ONCE), torch.split(second, AT_ONCE), strict=True):
            a, b = select(moved, one), select(moved, other)
            if label.startswith("every pair"):
                b = align_pairs(a, b, symmetry, method=KEEP).params
            found = task.evaluate_each(interpolate(a, b))
            losses.append(found["loss"])
            accuracies.append(found["accuracy"])
        return _summary(torch.cat(losses), torch.cat(accuracies), (ends[first] + ends[second]) / 2)

    papers = {"as trained": {"loss halfway": "0.244"}, "aligned to one network": {"loss halfway": "0.07"}}
    labels = (*papers, "aligned to their middle", "scaled, then aligned to their middle", "every pair aligned")
    found = run.records("pairs", study, score, labels)
    rows = [
        Row.of(label, [[record]], QUANTITIES, paper=papers.get(label, {}))
        for label, record in zip(labels, found, strict=True)
    ]
    notes = (
        f"{count} networks {networks.store.architecture.name} on breast cancer, random checkpoints of "
        f"{study.population.count} runs: {len(first)} pairs, on the 114 cases that no network was trained on (57 in "
        f"the thesis); the networks themselves have a mean loss of {float(ends.mean()):.3f}",
        "the thesis calls the loss halfway a barrier; here a barrier is what it has above the mean of both ends",
        "by permutations, weights as they are; scaled: every unit's incoming weights with a norm of one first; "
        "over pairs: the standard deviation",
    )
    shares = [k / (SHOWN - 1) for k in range(SHOWN)]
    series = tuple(Series(label, shares, record["curve"]) for label, record in zip(labels, found, strict=True))
    chart = Chart("All pairs of networks, sorted", "share of the pairs", "loss halfway", series)
    return Table(
        "Losses between networks of breast cancer", notes, QUANTITIES, tuple(rows), pictures={"pairs": (chart,)}
    )


def _align(label: str, networks: Params, symmetry: Symmetry) -> Params:
    """Return the networks, aligned by the method with a given label."""
    if label == "as trained":
        return networks
    space = Space.of(networks, symmetry, flow.Representation("flat" if label.startswith("scaled") else "keep"))
    points = space.enter(networks)
    reference = points[0] if label == "aligned to one network" else find_reference(space, points)
    return space.leave(align_points(space, reference, points))


def _summary(losses: Tensor, accuracies: Tensor, ends: Tensor) -> Record:
    barriers = losses - ends
    levels = torch.linspace(0, 1, SHOWN, dtype=losses.dtype)
    return {
        "loss halfway": float(losses.mean()),
        "over pairs": float(losses.std()),
        "barrier": float(barriers.mean()),
        "pairs with a barrier above 0.01": float((barriers > 0.01).double().mean()),
        "accuracy halfway": float(accuracies.mean()),
        "curve": torch.quantile(losses, levels).tolist(),
    }
