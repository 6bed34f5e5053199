"""Pairs of small transformers that are trained from scratch, and aligned with each part of their symmetry.

References:
    Theus et al. (2025), Generalized linear mode connectivity for transformers.
"""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

import regauge as rg
from regauge.core.devices import to_device
from regauge.core.params import Params
from regauge.data.packaged import help_topics, windows
from regauge.nets.augmentation import Augmentation
from regauge.nets.classification import ClassifierConfig, split_batches
from regauge.nets.transformer import GPT, Llama, ViT, initialize_transformer
from regauge.training.optimizers import AdamW
from regauge_papers.experiment import CPU, Experiment, Run, Scale
from regauge_papers.populations import DataName, Examples, Population, images, networks
from regauge_papers.table import AREA, BARRIER, MIDPOINT, Quantity, Record, Row, Table, halfway
from regauge_papers.ways import TEMPERED, TEMPERED_NOTE, Restrict, Way, permutations_only, whole, without_matrices

Family = Literal["vit", "vit-cifar10", "gpt", "llama"]
FAMILIES: Mapping[Family, str] = {
    "vit": "vision transformers of MNIST",
    "vit-cifar10": "vision transformers of CIFAR-10",
    "gpt": "GPT-2 style language models",
    "llama": "Llama style language models",
}
PARTS: Mapping[Restrict, str] = {permutations_only: "permutations", without_matrices: "discrete", whole: "all"}
"""The name of each part of the symmetry. Random seeds are derived from the names of parts."""
BATCH, REPAIR_BATCHES = 250, 4
"""The number of examples that are evaluated at a time, and the number of batches for repair, which are among the
batches that methods read."""
DESCENT_LR = 0.02
"""The learning rate of the descent on rotations."""
PAPER: Mapping[Family, Mapping[str, str]] = {
    "vit-cifar10": {
        "as trained": "1.69",
        "permutations, then straight-through": "0.45",
        "rotations, weight matching": "0.36",
        "rotations, activation matching": "1.27",
        "then continuous descent": "0",
    },
    "gpt": {
        "as trained": "2.02",
        "permutations, then straight-through": "0.63",
        "rotations, weight matching": "0.34",
        "rotations, activation matching": "1.43",
        "then continuous descent": "0.02",
    },
}
"""The barriers of Theus et al. on CIFAR-10 and Tiny Shakespeare, by row."""
QUANTITIES = (
    BARRIER,
    AREA,
    MIDPOINT,
    Quantity("accuracy", of=halfway("accuracy")),
    Quantity("CPU s", 1),
)


@dataclass(frozen=True)
class TransformerWay(Way):
    """A row of the table."""

    after: str | None = None  # the row whose aligned network it starts from; the trained one by default
    is_folded: bool = False  # whether the gains of both networks are folded first, so that the stream can be rotated


@dataclass(frozen=True)
class Transformers:
    """Settings: disjoint pairs of networks of one architecture."""

    population: Population
    ways: tuple[TransformerWay, ...]
    pairs: int
    points: int  # networks on each line, both ends included
    read: int  # training examples for methods that read data, and for repair
    batch: int  # size of the batches of these
    test: int  # test examples
    paper: Mapping[str, str]  # printed barriers, by row


def vision(scale: Scale) -> Population:
    """Return ViTs on MNIST, or on the digits for test runs."""
    is_smoke = scale == "smoke"

    def make() -> ViT:
        return ViT(8, 4, width=8, layers=1, heads=2) if is_smoke else ViT()

    name: DataName = "digits" if is_smoke else "MNIST"
    return _population(name, make, lambda: Examples.of(images(name)), _training(is_smoke, epochs=8, batch=128))


def color_vision(scale: Scale) -> Population:
    """Return ViTs on shifted and mirrored CIFAR-10 with patches of 4 pixels, or on the digits for test runs."""
    if scale == "smoke":
        return replace(vision(scale), is_bfloat16=True, augmentation=Augmentation(1))

    def make() -> ViT:
        return ViT(32, 4, channels=3, width=128, layers=4)

    training = _training(is_smoke=False, epochs=8 if scale == "cpu" else 100, batch=128)
    known = replace(_population("CIFAR-10", make, None, training), normalization=(0.5, 0.25))
    return replace(known, examples=50_000, is_bfloat16=True, augmentation=Augmentation())


def language(scale: Scale, family: Literal["gpt", "llama"]) -> Population:
    """Return language models on the characters of Python's help topics, or on a few thousand characters for test
    runs.
    """
    is_smoke = scale == "smoke"
    text = help_topics()
    symbols, context = len(text.symbols), 16 if is_smoke else 64
    size = {"width": 8, "layers": 1, "heads": 2} if is_smoke else {}

    def make() -> GPT | Llama:
        if family == "gpt":
            return GPT(symbols, context, **size)
        return Llama(symbols, **size, **({"kv_heads": 1} if is_smoke else {}))

    def load() -> Examples:
        train, test = text.train, text.validation
        if is_smoke:
            train, test = train[:4000], test[:1000]
        return Examples(text.name, *windows(train, context), *windows(test, context))

    return _population(f"{text.name}, pieces of {context}", make, load, _training(is_smoke, epochs=10, batch=64))


def config(family: Family, scale: Scale) -> Transformers:
    """Return the settings: two pairs at scale `cpu` (one for CIFAR-10), or five pairs at scale `paper`. The networks of
    the paper are larger than ours.
    """
    paper = PAPER.get(family, {})
    if family == "gpt" or family == "llama":
        population = language(scale, family)
    else:
        population = vision(scale) if family == "vit" else color_vision(scale)
    if scale == "smoke":
        return Transformers(population, _ways(4), 1, points=3, read=40, batch=20, test=60, paper=paper)
    read, batch, test = {"vit": (20_000, 250, 2000), "vit-cifar10": (5000, 100, 1000)}.get(family, (3000, 50, 300))
    pairs, steps, points = (2, 200, 25) if scale == "cpu" else (5, 1000, 25)
    if family == "vit-cifar10" and scale == "cpu":
        pairs, points = 1, 11
    return Transformers(population, _ways(steps), pairs, points=points, read=read, batch=batch, test=test, paper=paper)


def _ways(steps: int) -> tuple[TransformerWay, ...]:
    rotated = "rotations, mixed matching"
    descent = rg.ContinuousDescent("midpoint", init=None, steps=steps, lr=DESCENT_LR)
    soft, straight = (
        rg.Sinkhorn(init=None, steps=max(2, steps // 4)),
        rg.StraightThrough(init=None, steps=steps // 2),
    )
    ordered = "permutations, mixed matching"
    return (
        TransformerWay("as trained"),
        TransformerWay(TEMPERED, is_tempered=True),
        TransformerWay("permutations, weight matching", rg.WeightMatching(), permutations_only),
        TransformerWay(ordered, rg.alignment.MixedMatching(), permutations_only),
        TransformerWay("permutations, then straight-through", straight, permutations_only, after=ordered),
        TransformerWay("all discrete kinds, mixed matching", rg.alignment.MixedMatching(), without_matrices),
        TransformerWay("rotations, weight matching", rg.WeightMatching(), is_folded=True),
        TransformerWay("rotations, activation matching", rg.ActivationMatching(), is_folded=True),
        TransformerWay(rotated, rg.alignment.MixedMatching(), is_folded=True),
        TransformerWay("then continuous descent", descent, after=rotated, is_folded=True),
        TransformerWay("the same, repaired", after="then continuous descent", is_folded=True, is_repaired=True),
        TransformerWay("mixed matching, then straight-through", straight, after=rotated, is_folded=True),
        TransformerWay("mixed matching, then Sinkhorn", soft, after=rotated, is_folded=True),
        TransformerWay("Sinkhorn, then descent", descent, after="mixed matching, then Sinkhorn", is_folded=True),
    )


def measure(config: Transformers, run: Run) -> Table:
    """Train the networks, align each pair by each method, and evaluate the lines."""
    population, data = config.population, config.population.read(run)
    trained = networks(population, data, run, range(2 * config.pairs))
    pairs = [TransformerPair(config, data, trained[2 * k], trained[2 * k + 1], k, run) for k in range(config.pairs)]
    found = run.grid("aligning", lambda _, way, pair: pair.line(way), config.ways, pairs)
    printed = {label: {BARRIER.name: value} for label, value in config.paper.items()}
    rows = [
        Row.of(way.label, [records], QUANTITIES, paper=printed.get(way.label))
        for way, records in zip(config.ways, found, strict=True)
    ]
    training = population.training
    changes = "" if population.augmentation is None else f", {population.augmentation} at random"
    changes += f", in {run.half_precision}" if population.is_bfloat16 else ""
    notes: tuple[str, ...] = (
        f"{population.architecture}, on {population.data}; {training.epochs} epochs of AdamW over "
        f"{len(data.targets):,} examples{changes}, learning rate up to {training.optimizer.lr:g} and down again, "
        f"weight decay {training.optimizer.weight_decay:g}, batches of {training.batch}",
        f"{config.pairs} independent pairs; the loss is that of {min(config.test, len(data.test_targets)):,} test "
        f"examples at {config.points} points of each line; methods and repair read "
        f"{min(config.read, len(data.targets)):,} training examples; CPU seconds include those of earlier rows",
        TEMPERED_NOTE,
    )
    if config.paper:
        notes = (
            *notes,
            "paper: Theus et al. (2025), with larger networks that are trained for longer, on CIFAR-10 and Tiny "
            "Shakespeare; its permutations, and all that it learns, are learned from the loss along the line",
        )
    title = f"{population.architecture}, on {population.data}"
    return Table(title, notes, QUANTITIES, tuple(rows), "test cross entropy (nats)")


class TransformerPair:
    """Two networks, and all methods that align the second network."""

    def __init__(self, config: Transformers, data: Examples, a: Params, b: Params, index: int, run: Run) -> None:
        self._config, self._data, self._index, self._run = config, data, index, run
        self._networks, self._module = (a, b), run.bring(config.population.make())
        self._ways = {way.label: way for way in config.ways}
        # Drawn from all of them: a text's beginning tells little about the rest.
        chosen = torch.randperm(len(data.targets), generator=run.generator("read", index))[: config.read]
        self._read = split_batches(data.inputs[chosen], data.targets[chosen], config.batch)

    def line(self, way: TransformerWay) -> Record:
        """Return loss and accuracy along the line to the second network, and the cost of the alignment."""
        config = self._config

        def make() -> Record:
            (a, _), (b, seconds) = self._ends(way.is_folded), self._align(way)
            judge = self._data.judge(self._module, config.test, BATCH)
            path = way.path(self._module, [inputs for inputs, _ in self._read[:REPAIR_BATCHES]])
            task = way.judge(judge, rg.Task(self._module, self._read))
            curve = rg.line(a, b, task, points=config.points, path=path)
            spent = seconds if way.method and self._run.device == CPU else None
            return {"CPU s": spent, "line": list(curve.table)}

        evaluation = (config.points, config.test, way.is_repaired, *(["tempered"] if way.is_tempered else []))
        return self._run.record((*self._settings(way), evaluation), str(self._index), make)

    def _align(self, way: TransformerWay) -> tuple[Params, float]:
        """Return the second network after the methods of a row, and the CPU seconds."""
        (first, begin), before = self._ends(way.is_folded), 0.0
        if way.after is not None:
            begin, before = self._align(self._ways[way.after])
        if way.method is None:
            return begin, before
        settings, key = self._settings(way), str(self._index)

        def move() -> Params:
            task = rg.Task(self._module, self._read)
            generator = self._run.generator("alignment", *settings, self._index)
            return way.align(first, begin, self._rotated if way.is_folded else self._plain, task, generator)[0]

        def measure_time() -> Record:
            began = time.thread_time()
            self._run.network(settings, key, move)
            return {"seconds": time.thread_time() - began}

        seconds = self._run.record(settings, key, measure_time)["seconds"]
        return self._run.network(settings, key, move), before + seconds

    def _settings(self, way: TransformerWay) -> tuple[object, ...]:
        """Return the settings on which the alignment of a row depends, including the settings of earlier rows."""
        config = self._config
        before = () if way.after is None else self._settings(self._ways[way.after])
        own = () if way.method is None else (PARTS[way.restrict], way.method)
        return (*(before or (config.population, config.read, config.batch, way.is_folded)), *own)

    def _ends(self, is_folded: bool) -> tuple[Params, Params]:
        if not is_folded:
            return self._networks
        a, b = self._folded
        return self._run.bring(a.params), self._run.bring(b.params)

    @functools.cached_property
    def _plain(self) -> rg.Symmetry:
        return rg.discover(self._config.population.make(), self._data.few)

    @functools.cached_property
    def _folded(self) -> tuple[rg.discovery.Folded, rg.discovery.Folded]:
        module, few = self._config.population.make(), self._data.few
        a, b = (
            rg.discovery.fold(to_device(params, CPU), module, few, symmetry=self._plain) for params in self._networks
        )
        return a, b

    @functools.cached_property
    def _rotated(self) -> rg.Symmetry:
        """Return the symmetry of the folded networks, with the gains that are one in both networks."""
        a, b = self._folded
        module = self._config.population.make()
        return rg.discover(module, self._data.few, ones=[name for name in a.ones if name in b.ones])


def _population(
    data: str, make: Callable[[], GPT | Llama | ViT], load: Callable[[], Examples] | None, training: ClassifierConfig
) -> Population:
    module = make()
    name = {GPT: "GPT-2 style", Llama: "Llama style", ViT: "ViT"}[type(module)]
    count = sum(p.numel() for p in module.parameters())
    architecture = f"{name}, width {module.head.in_features}, {len(module.blocks)} layers, {count:,} parameters"
    return Population(data, architecture, make, training, load=load, initialize=initialize_transformer)


def _training(is_smoke: bool, *, epochs: int, batch: int) -> ClassifierConfig:
    return ClassifierConfig(epochs=1 if is_smoke else epochs, batch=batch, optimizer=AdamW(3e-3, weight_decay=0.1))


EXPERIMENTS: dict[str, Experiment] = {
    family: Experiment(
        f"pairs of {words}: barrier and accuracy with each part of the symmetry",
        functools.partial(config, family),
        measure,
        takes_device=True,
    )
    for family, words in FAMILIES.items()
}
