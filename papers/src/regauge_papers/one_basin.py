"""Transformers from different seeds that are moved into one basin (no barrier between them) with data and by training.

References:
    Theus et al. (2025), Generalized linear mode connectivity for transformers.
"""

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

import regauge as rg
from regauge.alignment import Method
from regauge.alignment.representatives import Rotate
from regauge.core.interpolation import mean
from regauge.core.params import Params
from regauge.data.packaged import SHAKESPEARE, help_topics, tiny_shakespeare, windows
from regauge.nets.classification import ClassifierConfig, split_batches, train
from regauge.nets.transformer import GPT, Llama, ViT, initialize_transformer
from regauge.training.optimizers import Adam, AdamW
from regauge.training.schedules import Cosine
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.populations import Examples, Population, networks
from regauge_papers.table import AREA, BARRIER, MIDPOINT, Quantity, Record, Row, Table, halfway
from regauge_papers.tempered import TemperedJudge
from regauge_papers.ways import TEMPERED, TEMPERED_NOTE

Family = Literal["basin-vit", "basin-gpt", "basin-llama"]
FAMILIES: Mapping[Family, str] = {
    "basin-vit": "vision transformers of digits",
    "basin-gpt": "GPT-2 style language models of Tiny Shakespeare",
    "basin-llama": "Llama style language models of Tiny Shakespeare",
}
BATCH = 64
"""The number of examples in a batch, for methods, for the control and for the evaluation."""
CONTROL_LR = 1e-3
"""The initial learning rate of Adam in the control. The learning rate decreases along half a cosine."""
QUANTITIES = (BARRIER, AREA, MIDPOINT, Quantity("accuracy", of=halfway("accuracy")), Quantity("CPU s", 1))


@dataclass(frozen=True)
class BasinWay:
    """A row of the table: an alignment, followed by gradient steps on the mean of both networks."""

    label: str
    method: Method | None = None  # None leaves the second network as it is
    rotate: Rotate = "auto"  # whether the stream is rotated
    has_labels: bool = True  # whether the method sees them
    is_tempered: bool = False  # whether each network of the line has a softmax temperature fitted to training examples
    trained: int = 0  # gradient steps on the mean


@dataclass(frozen=True)
class Basin:
    """Settings: disjoint pairs of networks of one architecture."""

    population: Population
    ways: tuple[BasinWay, ...]
    pairs: int
    points: int  # networks on each line, both ends included
    read: int  # training examples for methods that read data, and for the control
    test: int  # test examples


def population(family: Family, *, is_smoke: bool) -> Population:
    """Return the networks and their data; for test runs, small networks on data from installed packages."""
    size = {"width": 8, "layers": 1, "heads": 2} if is_smoke else {}

    def training(epochs: int) -> ClassifierConfig:
        return ClassifierConfig(epochs=1 if is_smoke else epochs, batch=64, optimizer=AdamW(3e-3, weight_decay=0.1))

    if family == "basin-vit":

        def see() -> ViT:
            return ViT(8, 4, **size) if is_smoke else ViT(8, 2, width=48, layers=2, heads=4)

        name = "ViT, width 48, 2 layers"
        return Population("digits", name, see, training(30), initialize=initialize_transformer)
    # The text itself is read when it is needed, since it may not be there.
    read, text, context = tiny_shakespeare, f"{SHAKESPEARE.data} ({SHAKESPEARE.sha256[:8]})", 64
    if is_smoke:
        read, text, context = help_topics, help_topics().name, 16

    def speak() -> GPT | Llama:
        symbols = len(read().symbols)
        if family == "basin-gpt":
            return GPT(symbols, context, **size)
        return Llama(symbols, **size, **({"kv_heads": 1} if is_smoke else {}))

    def load() -> Examples:
        known = read()
        parts = (known.train[:4000], known.validation[:1000]) if is_smoke else (known.train, known.validation)
        return Examples(text, *(tensor for part in parts for tensor in windows(part, context)))

    name = f"{'GPT-2' if family == 'basin-gpt' else 'Llama'} style, width 64, 2 layers"
    data = f"{text}, pieces of {context}"
    return Population(data, name, speak, training(6), load=load, initialize=initialize_transformer)


def config(family: Family, scale: Scale) -> Basin:
    """Return the settings: three pairs, and fewer methods for language models; at scale `paper`, there are ten pairs,
    and methods take more steps.
    """
    is_smoke, is_image = scale == "smoke", family == "basin-vit"
    short, long = (2, 4) if is_smoke else (100, 400) if scale == "cpu" else (400, 1600)
    variants = (
        BasinWay(f"learned, {long} steps, reordered", rg.ContinuousDescent(steps=long), "never"),
        BasinWay(f"learned halfway, {long} steps", rg.ContinuousDescent("midpoint", steps=long)),
        BasinWay(f"learned without labels, {long} steps", rg.ContinuousDescent(steps=long), has_labels=False),
    )
    ways = (
        BasinWay("as trained"),
        BasinWay(TEMPERED, is_tempered=True),
        BasinWay("by weights, reordered", rg.WeightMatching(), "never"),
        BasinWay("by weights", rg.WeightMatching()),
        BasinWay("by data", rg.alignment.DataMatching()),
        *(BasinWay(f"learned, {steps} steps", rg.ContinuousDescent(steps=steps)) for steps in (short, long)),
        *(variants if is_image or scale == "paper" else ()),
        *(BasinWay(f"plain mean, {steps} gradient steps", trained=steps) for steps in (short, long)),
        BasinWay(f"learned, {long} steps; mean, {short} steps", rg.ContinuousDescent(steps=long), trained=short),
    )
    if is_smoke:
        return Basin(population(family, is_smoke=True), ways, 1, points=3, read=40, test=60)
    pairs = 3 if scale == "cpu" else 10
    read, test = (1300, 360) if is_image else (3000, 600)
    return Basin(population(family, is_smoke=False), ways, pairs, points=11, read=read, test=test)


def measure(config: Basin, run: Run) -> Table:
    """Train the networks, align each pair by each method, and evaluate the lines."""
    population, data = config.population, config.population.read(run)
    trained = networks(population, data, run, range(2 * config.pairs))
    pairs = [BasinPair(config, data, trained[2 * k], trained[2 * k + 1], k, run) for k in range(config.pairs)]
    # All rows of a pair before the next pair, so that an interrupted run has whole pairs.
    found = run.grid("aligning", lambda _, pair, way: pair.line(way), pairs, config.ways)
    rows = []
    for k, way in enumerate(config.ways):
        known = tuple(one for one in QUANTITIES if one != AREA or not way.trained)
        rows.append(Row.of(way.label, [[records[k] for records in found]], known, is_drawn=not way.trained))
    training = population.training
    notes = (
        f"{population.architecture}, on {population.data}; {training.epochs} epochs of AdamW over "
        f"{len(data.targets):,} examples, learning rate up to {training.optimizer.lr:g} and down again, weight decay "
        f"{training.optimizer.weight_decay:g}, batches of {training.batch}",
        f"{config.pairs} independent pairs; the loss is that of {min(config.test, len(data.test_targets)):,} test "
        f"examples at {config.points} points of each line, which neither the networks nor the methods saw; methods "
        f"read {min(config.read, len(data.targets)):,} training examples, of which those that learn keep a quarter to "
        "choose by",
        f"gradient steps: Adam on the mean of both networks, on all examples that methods read, learning rate "
        f"{CONTROL_LR:g} and down along half a cosine; the result takes the place of the middle of the line",
        TEMPERED_NOTE,
    )
    title = f"{population.architecture}, on {population.data}"
    return Table(title, notes, QUANTITIES, tuple(rows), "test cross entropy (nats)")


class BasinPair:
    """Two networks, and all methods that may remove the barrier between the networks."""

    def __init__(self, config: Basin, data: Examples, a: Params, b: Params, index: int, run: Run) -> None:
        self._config, self._data, self._index, self._run = config, data, index, run
        self._a, self._b, self._module = a, b, config.population.make().eval()
        # Drawn from all of them: a text's beginning tells little about the rest.
        chosen = torch.randperm(len(data.targets), generator=run.generator("read", index))[: config.read]
        self._inputs, self._targets = data.inputs[chosen], data.targets[chosen]

    def line(self, way: BasinWay) -> Record:
        """Return loss and accuracy along the line to the second network, and the cost of the alignment."""
        config = self._config

        def make() -> Record:
            moved, seconds = self._align(way)
            judge = self._data.judge(self._module, config.test, BATCH)
            if not way.trained:
                tempered = TemperedJudge(judge, self._task()) if way.is_tempered else judge
                curve = rg.line(self._a, moved, tempered, points=config.points)
                return {"CPU s": seconds, "line": list(curve.table)}
            began = time.thread_time()
            training = ClassifierConfig(
                epochs=None, steps=way.trained, batch=BATCH, optimizer=Adam(CONTROL_LR), schedule=Cosine()
            )
            generator = self._run.generator("control", self._index)
            start = mean([self._a, moved])
            middle = train(self._module, start, self._inputs, self._targets, training, generator=generator)
            seconds += time.thread_time() - began
            ends = enumerate([self._a, middle, self._b])
            return {"CPU s": seconds, "line": [{"t": k / 2, **judge.evaluate(one)} for k, one in ends]}

        settings = (config.population, config.read, config.points, config.test, way)
        return self._run.record(settings, str(self._index), make)

    def _align(self, way: BasinWay) -> tuple[Params, float]:
        """Return the second network after the methods of a row, and the CPU seconds."""
        if way.method is None:
            return self._b, 0.0
        settings = (self._config.population, self._config.read, way.method, way.rotate, way.has_labels)
        key = str(self._index)

        def move() -> Params:
            generator = self._run.generator("alignment", self._index)
            task = self._task(has_labels=way.has_labels)
            found = rg.align(
                *(self._a, self._b, self._symmetry),
                method=way.method,
                task=task,
                generator=generator,
                rotate=way.rotate,
            )
            return found.params

        def measure_time() -> Record:
            began = time.thread_time()
            self._run.network(settings, key, move)
            return {"seconds": time.thread_time() - began}

        seconds = self._run.record(settings, key, measure_time)["seconds"]
        return self._run.network(settings, key, move), seconds

    def _task(self, *, has_labels: bool = True) -> rg.Task:
        """Return the task of methods, with or without labels."""
        batches = split_batches(self._inputs, self._targets, BATCH)
        if has_labels:
            return rg.Task(self._module, batches)
        return rg.Task(self._module, [(inputs, None) for inputs, _ in batches], has_targets=False)

    @functools.cached_property
    def _symmetry(self) -> rg.Symmetry:
        return rg.discover(self._module, self._data.few)


EXPERIMENTS: dict[str, Experiment] = {
    family: Experiment(
        f"pairs of {words}: learned alignment and gradient steps", functools.partial(config, family), measure
    )
    for family, words in FAMILIES.items()
}
