"""Paper 001, figure 4a: networks fitted to sine waves, aligned with more and more of their symmetry.

References:
    Navon et al. (2024), section 6.1, figure 4a and appendix E.
"""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import regauge as rg
from regauge.alignment import Method
from regauge.connect import Curve
from regauge.core.interpolation import distance
from regauge.core.params import Params
from regauge.data.waves import Waves, waves
from regauge.nets.siren import Siren, plain_population
from regauge.papers.classifiers import align, mean_curve
from regauge.papers.experiment import Experiment, Run, Scale
from regauge.papers.symmetries import permutations_only, without_shifts
from regauge.papers.table import Quantity, Record, Row, Table
from regauge.training.descent import Descent
from regauge.training.optimizers import Adam
from regauge.training.signals import fit_signals

RECOVERED = 1e-3
"""A copy is recovered when no parameter is further from the original than this share of the largest one."""
STACK = 20
"""Networks that are fitted in one stacked call, and kept in one file."""


@dataclass(frozen=True)
class SineWaves:
    """The settings.

    Attributes:
        pairs: Waves, each fitted by two networks.
        points: Where the networks are fitted; they are judged halfway between these.
        fitting: Steps and learning rate.
        line: Points on each line.
        notes: What the scale changes.
    """

    pairs: int
    points: int
    fitting: Descent
    line: int
    notes: tuple[str, ...] = ()


def fitting(steps: int) -> Descent:
    """Adam on all points in every step."""
    return Descent(steps=steps, batch=None, optimizer=Adam(5e-4))


def config(scale: Scale) -> SineWaves:
    """50 pairs on a CPU, and 100 at the paper's scale, as many as it tests on."""
    if scale == "smoke":
        return SineWaves(4, 64, fitting(50), 5, ("a test run: the networks are hardly fitted",))
    return SineWaves(50 if scale == "cpu" else 100, 512, fitting(1000), 25)


SYMMETRIES: Mapping[str, Callable[[rg.Symmetry], rg.Symmetry]] = {
    "permutations": permutations_only,
    "permutations and signs": without_shifts,
    "all that discovery finds": lambda symmetry: symmetry,
}
METHODS: Mapping[str, Method] = {
    "weight matching": rg.WeightMatching(),
    "activation matching": rg.ActivationMatching(),
    "mixed matching": rg.MixedMatching(),
}


def measure(config: SineWaves, run: Run) -> Table:
    """Align the two networks of each wave, and copies of the first that a random element has moved."""
    module = Siren(1, 32, 1)
    data = waves(config.pairs, config.points, generator=run.generator("waves"))
    networks = fitted(config, module, data, run)
    whole = rg.discover(module, (data.inputs,))
    cells: list[tuple[str, Method | None, str]] = [("as fitted", None, "all that discovery finds")]
    cells += [(f"{name}, {part}", method, part) for name, method in METHODS.items() for part in SYMMETRIES]

    def one(method: Method | None, part: str, pair: int) -> Record:
        def make() -> Record:
            symmetry = SYMMETRIES[part](whole)
            a, b = ({name: t[2 * pair + k] for name, t in networks.items()} for k in (0, 1))
            copy = whole.act(whole.random(run.generator("copy", pair)), a)
            task = rg.Task(module, [(data.inputs, data.targets[pair])], torch.nn.functional.mse_loss)
            judge = rg.Task(module, [(data.test_inputs, data.test_targets[pair])], torch.nn.functional.mse_loss)
            chance = run.generator("alignment", method, part, pair)
            began = time.thread_time()
            moved = align(method, a, b, symmetry, task, chance)
            seconds = time.thread_time() - began
            curve = rg.line(a, moved, judge, points=config.line)
            return {
                "line": list(curve.table),
                "distance": distance(a, moved),
                "recovered": is_recovered(a, align(method, a, copy, symmetry, task, chance)),
                "seconds": seconds,
            }

        return run.record((config, method, part), f"{pair}", make)

    steps = [functools.partial(one, method, part, pair) for _, method, part in cells for pair in range(config.pairs)]
    records = run.each("aligning", steps)
    rows = []
    for k, (label, method, _) in enumerate(cells):
        found = records[k * config.pairs : (k + 1) * config.pairs]
        curves = [Curve(tuple(record["line"])) for record in found]
        values = {
            "weight distance": [[record["distance"] for record in found]],
            "barrier": [[curve.barrier for curve in curves]],
            "AUC": [[max(0.0, curve.auc) for curve in curves]],
            "copies recovered": [[float(record["recovered"]) for record in found]],
        }
        if method is not None:
            values["CPU s"] = [[record["seconds"] for record in found]]
        rows.append(Row(label, values, curve=mean_curve(curves)))
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
        *config.notes,
    )
    quantities = (
        Quantity("weight distance", 2),
        Quantity("barrier"),
        Quantity("AUC"),
        Quantity("copies recovered", 2),
        Quantity("CPU s", 4),
    )
    return Table("Networks of sine waves", notes, quantities, tuple(rows), "test mean squared error")


def fitted(config: SineWaves, module: Siren, data: Waves, run: Run) -> Params:
    """Both networks of every wave, next to each other along the model axis."""
    targets = data.targets.repeat_interleave(2, dim=0)

    def stack(begin: int) -> Params:
        own = targets[begin : begin + STACK]

        def make() -> Params:
            start = plain_population(module, len(own), generator=run.generator("network", begin))
            return fit_signals(module, start, data.inputs, own, config.fitting)

        return run.network((config.pairs, config.points, config.fitting), f"{begin}", make)

    steps = [functools.partial(stack, begin) for begin in range(0, len(targets), STACK)]
    stacks = run.each(f"fitting stacks of {STACK} networks", steps)
    return {name: torch.cat([part[name] for part in stacks]) for name in stacks[0]}


def is_recovered(a: Params, found: Params) -> bool:
    """Whether two networks have the same parameters, up to rounding."""
    largest = max(float(tensor.abs().max()) for tensor in a.values())
    return max(float((a[name] - found[name]).abs().max()) for name in a) <= RECOVERED * largest


EXPERIMENTS = {
    "figure4a": Experiment("sine networks aligned by permutations, with signs, with shifts", config, measure),
}
