"""Residual MLPs, where weight matching as published fails: of no paper in the list, but of what they build on.

References:
    Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, section 3.2; the question was raised by its readers.
"""

import functools
from dataclasses import dataclass

import torch

import regauge as rg
from regauge.alignment import Method
from regauge.core.params import Params
from regauge.nets.classification import Training
from regauge.nets.residual_mlp import ResidualMLP
from regauge.papers.classifiers import Comparison, Entry, Population, compare, small_images
from regauge.papers.experiment import Experiment, Run, Scale
from regauge.papers.symmetries import permutations_only
from regauge.papers.table import Quantity, Record, Row, Table
from regauge.training.optimizers import Adam

REFINING, REFINING_BATCH = 10_000, 256
"""Training images for the refinement of a mixed matching, and how many a step sees."""


@dataclass(frozen=True)
class Planted:
    """Random networks, moved by a random permutation and disturbed, to see whether it is found.

    Attributes:
        trials: Networks for each depth and each noise.
        stream: Width of the stream.
        hidden: Width inside the blocks.
        anchor: Inputs and outputs: all that tells the units of the stream apart but the blocks.
        blocks: Depths.
        noises: Standard deviations of what is added, in those of the weights.
    """

    trials: int = 20
    stream: int = 64
    hidden: int = 64
    anchor: int = 3
    blocks: tuple[int, ...] = (6, 12)
    noises: tuple[float, ...] = (0.0, 0.5, 1.0)


def planted_config(scale: Scale) -> Planted:
    """The full size, which takes a minute, or a small one."""
    return Planted(trials=2, stream=12, hidden=16, blocks=(2,)) if scale == "smoke" else Planted()


STARTS: dict[str, Method] = {
    "WM from the identity": rg.WeightMatching(start="identity"),
    "the same, and 10 random starts": rg.WeightMatching(start="identity", restarts=10),
    "WM from the barycentre": rg.WeightMatching(),
}


def measure_planted(config: Planted, run: Run) -> Table:
    """How often the permutation is found again, all of it."""
    modules = {b: ResidualMLP(config.anchor, config.stream, config.hidden, b, config.anchor) for b in config.blocks}
    example = (torch.zeros(2, config.anchor),)
    symmetries = {b: permutations_only(rg.discover(module, example)) for b, module in modules.items()}
    cells = [
        (method, blocks, noise, trial)
        for method in STARTS.values()
        for blocks in config.blocks
        for noise in config.noises
        for trial in range(config.trials)
    ]

    def one(method: Method, blocks: int, noise: float, trial: int) -> Record:
        def make() -> Record:
            module, symmetry = modules[blocks], symmetries[blocks]
            chance = run.generator("planted", blocks, noise, trial)
            a = _normal(module, chance)
            element = symmetry.random(chance)
            added = _normal(module, chance)
            b = {name: tensor + noise * added[name] for name, tensor in symmetry.act(element, a).items()}
            found = rg.align(a, b, symmetry, method=method, generator=chance).element
            undone = symmetry.inverse(element)
            return {"recovered": all(_same(found[name].perm, undone[name].perm) for name in found)}

        return run.record((config, method), f"{blocks}-{noise:g}-{trial}", make)

    records = run.each("matching", [functools.partial(one, *cell) for cell in cells])
    quantities = [Quantity(f"{b} blocks, noise {n:g}", 2) for b in config.blocks for n in config.noises]
    rows = []
    per_row = len(cells) // len(STARTS)
    for k, label in enumerate(STARTS):
        found = [float(record["recovered"]) for record in records[k * per_row : (k + 1) * per_row]]
        parts = [found[j : j + config.trials] for j in range(0, per_row, config.trials)]
        rows.append(Row(label, {q.name: [part] for q, part in zip(quantities, parts, strict=True)}))
    notes = (
        f"share of {config.trials} planted permutations that are found again, every unit of every group",
        f"residual MLPs {config.anchor}-{config.stream}-...-{config.anchor} with blocks of {config.hidden} hidden "
        "units; weights are standard normal, and so is the noise that is added after the permutation, times the factor "
        "above; biases are zero",
    )
    return Table("Planted permutations in residual MLPs", notes, tuple(quantities), tuple(rows))


@dataclass(frozen=True)
class Trained:
    """Residual MLPs trained on images.

    Attributes:
        comparison: Networks, methods, pairs.
        notes: What the scale changes.
    """

    comparison: Comparison
    notes: tuple[str, ...] = ()


def trained_config(scale: Scale) -> Trained:
    """784-128 with six blocks of 256 on MNIST; four pairs on a CPU."""
    if scale == "smoke":
        name, quick = small_images(), Training(epochs=2, batch=64, optimizer=Adam(2e-3))
        population = _residual_mlps(name, 16, 16, 2, quick, examples=1000)
        return Trained(
            Comparison(population, _entries(steps=3), pairs=2, seeds=1, points=5, test=500),
            ("a test run on small networks, which are hardly trained",),
        )
    training = Training(epochs=5, batch=128, optimizer=Adam(2e-3))
    population = _residual_mlps("MNIST", 128, 256, 6, training, examples=60_000)
    pairs = 4 if scale == "cpu" else 20
    return Trained(Comparison(population, _entries(steps=rg.Sinkhorn.steps), pairs=pairs, seeds=1, points=25))


def measure_trained(config: Trained, run: Run) -> Table:
    """Every method on every pair."""
    comparison = config.comparison
    data = comparison.population.images()
    rows = compare(comparison, data, run)
    training = comparison.population.training
    notes = (
        f"{comparison.population.architecture} on {data.name}, {comparison.population.examples:,} training images, "
        f"{training.epochs} epochs of Adam, learning rate up to {training.optimizer.lr:g} and down again, batches of "
        f"{training.batch}",
        f"{comparison.pairs} independent pairs; losses on {min(comparison.test, len(data.test_labels)):,} test images "
        f"at {comparison.points} points of each line",
        *config.notes,
    )
    quantities = (Quantity("barrier"), Quantity("AUC"), Quantity("weight distance", 2), Quantity("CPU s", 2))
    title = f"{comparison.population.architecture} on {data.name}"
    return Table(title, notes, quantities, rows, "test cross entropy (nats)")


def _residual_mlps(
    data: str, stream: int, hidden: int, blocks: int, training: Training, *, examples: int
) -> Population:
    pixels = {"digits": 64, "MNIST": 784}[data]
    name = f"residual MLP {pixels}-{stream}, {blocks} blocks of {hidden}"
    return Population(
        "MNIST" if data == "MNIST" else "digits",
        name,
        lambda: ResidualMLP(pixels, stream, hidden, blocks, 10),
        training,
        examples,
    )


def _entries(*, steps: int) -> tuple[Entry, ...]:
    mixed = rg.MixedMatching()
    return (
        Entry("Naive", None),
        Entry("Naive, repaired", None, is_repaired=True),
        Entry("WM from the identity", rg.WeightMatching(start="identity")),
        Entry("WM from the barycentre", rg.WeightMatching()),
        Entry("WM from the barycentre, repaired", rg.WeightMatching(), is_repaired=True),
        Entry("Activation Matching", rg.ActivationMatching()),
        Entry("Mixed Matching", mixed),
        Entry("Mixed Matching, repaired", mixed, is_repaired=True),
        Entry("Mixed + Sinkhorn, midpoint", rg.Sinkhorn(init=mixed, steps=steps), REFINING_BATCH, REFINING),
    )


def _normal(module: torch.nn.Module, generator: torch.Generator) -> Params:
    """Standard normal weights and no biases, each of which would tell the units of the stream apart."""
    return {
        name: torch.randn(tensor.shape, generator=generator) if tensor.ndim == 2 else torch.zeros_like(tensor)
        for name, tensor in module.state_dict().items()
    }


def _same(found: torch.Tensor | None, planted: torch.Tensor | None) -> bool:
    return found is None or planted is None or torch.equal(found, planted)


EXPERIMENTS = {
    "planted": Experiment(
        "planted permutations in residual MLPs: how many are found again", planted_config, measure_planted
    ),
    "residual": Experiment("trained residual MLPs: barrier and AUC of every start", trained_config, measure_trained),
}
