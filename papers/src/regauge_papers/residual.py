"""Residual MLPs, for which published weight matching fails. The experiment is not from a numbered paper, but from
earlier work on which the papers build.

References:
    Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, section 3.2; readers of the paper raised the question of
    residual MLPs.
"""

from dataclasses import dataclass

import torch

import regauge as rg
from regauge.alignment import Method
from regauge.core.params import Params
from regauge.nets.classification import ClassifierConfig
from regauge.nets.mlp import ResidualMLP
from regauge.training.optimizers import Adam
from regauge_papers.deep_align import PIXELS
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.populations import (
    DISTANCE,
    SECONDS,
    ClassifierWay,
    Comparison,
    DataName,
    Population,
    compare,
    small_images,
)
from regauge_papers.table import AREA, BARRIER, Quantity, Record, Row, Table
from regauge_papers.ways import PUBLISHED_ACTIVATIONS, TEMPERED, TEMPERED_NOTE, permutations_only

REFINING, REFINING_BATCH = 10_000, 256
"""The number of training images for refining a mixed matching, and the number of images in each step."""


@dataclass(frozen=True)
class Planted:
    """Settings: random networks, with permuted and perturbed copies whose permutations the methods must find."""

    trials: int = 20  # networks for each depth and each noise
    stream: int = 64  # width of the stream
    hidden: int = 64  # width inside the blocks
    anchor: int = 3  # inputs, and outputs; besides the blocks only they tell the units of the stream apart
    blocks: tuple[int, ...] = (6, 12)  # depths
    noises: tuple[float, ...] = (0.0, 0.5, 1.0)  # standard deviations, relative to those of the weights


def planted_config(scale: Scale) -> Planted:
    """Return the settings: the full size, which takes a minute, or a small size."""
    return Planted(trials=2, stream=12, hidden=16, blocks=(2,)) if scale == "smoke" else Planted()


STARTS: dict[str, Method] = {
    "WM from the identity": rg.WeightMatching(start="identity"),
    "the same, and 10 random starts": rg.WeightMatching(start="identity", restarts=10),
    "WM from the barycenter": rg.WeightMatching(),
}


def measure_planted(config: Planted, run: Run) -> Table:
    """Measure the share of permutations that are recovered completely."""
    modules = {b: ResidualMLP(config.anchor, config.stream, config.hidden, b, config.anchor) for b in config.blocks}
    example = (torch.zeros(2, config.anchor),)
    symmetries = {b: permutations_only(rg.discover(module, example)) for b, module in modules.items()}

    def find(method: Method, blocks: int, noise: float, trial: int) -> Record:
        module, symmetry = modules[blocks], symmetries[blocks]
        chance = run.generator("planted", blocks, noise, trial)
        a = _normal(module, chance)
        element = symmetry.random(chance)
        added = _normal(module, chance)
        b = {name: tensor + noise * added[name] for name, tensor in symmetry.act(element, a).items()}
        found = rg.align(a, b, symmetry, method=method, generator=chance).element
        undone = symmetry.inverse(element)
        orders = [(found[name].perm, undone[name].perm) for name in found]
        return {"recovered": all(one is None or other is None or torch.equal(one, other) for one, other in orders)}

    axes = (list(STARTS.values()), config.blocks, config.noises, range(config.trials))
    found = run.records("matching", config, find, *axes)
    rows = []
    for label, depths in zip(STARTS, found, strict=True):
        values = {
            f"{b} blocks, noise {n:g}": [[float(record["recovered"]) for record in trials]]
            for b, noises in zip(config.blocks, depths, strict=True)
            for n, trials in zip(config.noises, noises, strict=True)
        }
        rows.append(Row(label, values))
    notes = (
        f"share of {config.trials} planted permutations that are found again, every unit of every group",
        f"residual MLPs {config.anchor}-{config.stream}-...-{config.anchor} with blocks of {config.hidden} hidden "
        "units; weights are standard normal, and so is the noise that is added after the permutation, times the factor "
        "above; biases are zero",
    )
    return Table(
        "Planted permutations in residual MLPs", notes, tuple(Quantity(name, 2) for name in rows[0].values), tuple(rows)
    )


def trained_config(scale: Scale) -> Comparison:
    """Return the settings: 784-128 with six blocks of 256 on MNIST; four pairs on a CPU."""
    if scale == "smoke":
        name, quick = small_images(), ClassifierConfig(epochs=2, batch=64, optimizer=Adam(2e-3))
        population = _residual_mlps(name, 16, 16, 2, quick, examples=1000)
        return Comparison(population, _ways(steps=3), pairs=2, seeds=1, points=5, test=500)
    training = ClassifierConfig(epochs=5, batch=128, optimizer=Adam(2e-3))
    population = _residual_mlps("MNIST", 128, 256, 6, training, examples=60_000)
    pairs = 4 if scale == "cpu" else 20
    return Comparison(population, _ways(steps=rg.Sinkhorn.steps), pairs=pairs, seeds=1, points=25)


def measure_trained(config: Comparison, run: Run) -> Table:
    """Measure every method on every pair."""
    population, data = config.population, config.population.read(run)
    notes = (
        f"{population.architecture} on {data.name}, {population.description}",
        f"{config.pairs} independent pairs; losses on {min(config.test, len(data.test_targets)):,} test images at "
        f"{config.points} points of each line",
        TEMPERED_NOTE,
    )
    return compare(config, data, run, (BARRIER, AREA, DISTANCE, SECONDS), notes)


def _residual_mlps(
    data: DataName, stream: int, hidden: int, blocks: int, training: ClassifierConfig, *, examples: int
) -> Population:
    pixels = PIXELS[data]
    name = f"residual MLP {pixels}-{stream}, {blocks} blocks of {hidden}"
    return Population(data, name, lambda: ResidualMLP(pixels, stream, hidden, blocks, 10), training, examples)


def _ways(*, steps: int) -> tuple[ClassifierWay, ...]:
    mixed = rg.alignment.MixedMatching()
    refined = rg.Sinkhorn(init=mixed, steps=steps)
    return (
        ClassifierWay("Naive"),
        ClassifierWay(TEMPERED, is_tempered=True),
        ClassifierWay("Naive, repaired", is_repaired=True),
        ClassifierWay("WM from the identity", rg.WeightMatching(start="identity")),
        ClassifierWay("WM from the barycenter", rg.WeightMatching()),
        ClassifierWay("WM from the barycenter, repaired", rg.WeightMatching(), is_repaired=True),
        ClassifierWay("Activation Matching", PUBLISHED_ACTIVATIONS),
        ClassifierWay("Activation Matching, correlations", rg.ActivationMatching()),
        ClassifierWay("Mixed Matching", mixed),
        ClassifierWay("Mixed Matching, repaired", mixed, is_repaired=True),
        ClassifierWay("Mixed + Sinkhorn, midpoint", refined, batch=REFINING_BATCH, examples=REFINING),
    )


def _normal(module: torch.nn.Module, generator: torch.Generator) -> Params:
    """Sample standard normal weights. Biases are zero, because each bias would distinguish the units of the residual
    stream.
    """
    return {
        name: torch.randn(tensor.shape, generator=generator) if tensor.ndim == 2 else torch.zeros_like(tensor)
        for name, tensor in module.state_dict().items()
    }


EXPERIMENTS = {
    "planted": Experiment(
        "planted permutations in residual MLPs: how many are found again", planted_config, measure_planted
    ),
    "residual": Experiment(
        "trained residual MLPs: barrier and AUC of every start", trained_config, measure_trained, takes_device=True
    ),
}
