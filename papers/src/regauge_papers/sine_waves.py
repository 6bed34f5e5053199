"""Paper 001, figure 4a: networks fitted to sine waves, aligned with increasing parts of their symmetry.

References:
    Navon et al. (2024), section 6.1, figure 4a and appendix E.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

import regauge as rg
from regauge.alignment import Method
from regauge.core.interpolation import distance
from regauge.core.params import Params
from regauge.core.progress import Progress
from regauge.data.curves import Waves, waves
from regauge.nets.siren import Siren, plain_population
from regauge.training.optimizers import Adam
from regauge.training.stacks import fit_signals
from regauge.training.training_configs import DescentConfig
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.table import AREA, BARRIER, Quantity, Record, Row, Table
from regauge_papers.ways import (
    PUBLISHED_ACTIVATIONS,
    PUBLISHED_WEIGHTS,
    Restrict,
    Way,
    permutations_only,
    whole,
    without_shifts,
)

RECOVERED = 1e-3
"""A copy counts as recovered if no parameter differs from the original by more than this share of the largest
parameter."""
FITTING = DescentConfig(steps=1000, batch=None, optimizer=Adam(5e-4))
STACK = 20
"""The number of networks that are fitted together in one stack, and stored in one file."""


@dataclass(frozen=True)
class SineWaves:
    """Settings: pairs of networks, each pair fitted to one wave."""

    pairs: int
    points: int  # where the networks are fitted; they are judged halfway between these
    fitting: DescentConfig
    line: int  # points on each line


def config(scale: Scale) -> SineWaves:
    """Return the settings: 50 pairs on a CPU, and 100 at the paper's scale, the number of the paper's test pairs."""
    if scale == "smoke":
        return SineWaves(2, 64, replace(FITTING, steps=50), 3)
    return SineWaves(50 if scale == "cpu" else 100, 512, FITTING, 25)


PARTS: Mapping[Restrict, str] = {
    permutations_only: "permutations",
    without_shifts: "permutations and signs",
    whole: "all that discovery finds",
}
METHODS: Mapping[str, Method] = {
    "weight matching": rg.WeightMatching(),
    "activation matching": rg.ActivationMatching(),
    "mixed matching": rg.alignment.MixedMatching(),
}
WAYS = (
    Way("as fitted"),
    Way("weight matching as published, permutations", PUBLISHED_WEIGHTS, permutations_only),
    Way("activation matching as published, permutations", PUBLISHED_ACTIVATIONS, permutations_only),
    *(Way(f"{name}, {part}", method, restrict) for name, method in METHODS.items() for restrict, part in PARTS.items()),
)
QUANTITIES = (
    Quantity("weight distance", 2),
    BARRIER,
    AREA,
    Quantity("copies recovered", 2),
    Quantity("CPU s", 4),
)


def measure(config: SineWaves, run: Run) -> Table:
    """Align the two networks of each wave, and copies of the first network, transformed by a random element."""
    module = Siren(1, 32, 1)
    data = waves(config.pairs, config.points, generator=run.generator("waves"))
    networks = fit_pairs(config, module, data, run)
    symmetry = rg.discover(module, (data.inputs,))

    def measure_pair(way: Way, pair: int) -> Record:
        a, b = ({name: t[2 * pair + k] for name, t in networks.items()} for k in (0, 1))
        copy = symmetry.act(symmetry.random(run.generator("copy", pair)), a)
        task = rg.Task(module, [(data.inputs, data.targets[pair])], torch.nn.functional.mse_loss)
        judge = rg.Task(module, [(data.test_inputs, data.test_targets[pair])], torch.nn.functional.mse_loss)
        chance = run.generator("alignment", way.method, PARTS[way.restrict], pair)
        moved, seconds = way.align(a, b, symmetry, task, chance)
        found, _ = way.align(a, copy, symmetry, task, chance)
        return {
            "line": list(rg.line(a, moved, judge, points=config.line).table),
            "weight distance": distance(a, moved),
            "copies recovered": float(is_recovered(a, found)),
            "CPU s": seconds if way.method else None,
        }

    found = run.records("aligning", config, measure_pair, WAYS, range(config.pairs))
    rows = [Row.of(way.label, [records], QUANTITIES) for way, records in zip(WAYS, found, strict=True)]
    ends = [row["loss"] for row in (rows[0].curve[0], rows[0].curve[-1])]
    notes = (
        f"{config.pairs} waves sin(a x) on [-pi, pi] with a uniform in [0.5, 10], each fitted by two networks "
        f"1-32-32-1 with sin(30 z), from different initial values (uniform, biases zero); {config.fitting.steps:,} "
        f"steps of Adam with {config.fitting.optimizer.lr:g} on {config.points} points, then mean squared errors of "
        f"{ends[0]:.2g} and {ends[1]:.2g}",
        f"barrier and AUC of the mean squared error halfway between these points, at {config.line} points of each "
        "line; weight distance: Euclidean",
        "copies recovered: share of the networks found again after a random element of the whole symmetry (order, "
        "signs and half-period shifts) has moved them",
        "the paper shows this experiment as a figure, without numbers",
    )
    return Table("Networks of sine waves", notes, QUANTITIES, tuple(rows), "test mean squared error")


def fit_pairs(config: SineWaves, module: Siren, data: Waves, run: Run) -> Params:
    """Return both networks of every wave, next to each other along the model axis."""
    targets = data.targets.repeat_interleave(2, dim=0)

    def stack(unit: Progress, begin: int) -> Params:
        own = targets[begin : begin + STACK]

        def make() -> Params:
            start = plain_population(module, len(own), generator=run.generator("network", begin))
            return fit_signals(module, start, data.inputs, own, config.fitting, progress=unit)

        return run.network((config.pairs, config.points, config.fitting), f"{begin}", make)

    stacks = run.grid(f"fitting stacks of {STACK} networks", stack, range(0, len(targets), STACK))
    return {name: torch.cat([part[name] for part in stacks]) for name in stacks[0]}


def is_recovered(a: Params, found: Params) -> bool:
    """Return whether two networks have the same parameters up to rounding."""
    largest = max(float(tensor.abs().max()) for tensor in a.values())
    return max(float((a[name] - found[name]).abs().max()) for name in a) <= RECOVERED * largest


EXPERIMENTS = {
    "figure4a": Experiment("sine networks aligned by permutations, with signs, with shifts", config, measure),
}
