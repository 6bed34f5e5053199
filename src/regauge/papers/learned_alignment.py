"""Paper 001, Equivariant Deep Weight Space Alignment (Deep-Align): a net learns to align, beside methods that do not.

References:
    Navon et al. (2024), tables 1 and 2, figure 4, section 6 and appendix E.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

import regauge as rg
from regauge import learn
from regauge.alignment import Method
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.params import select
from regauge.core.task import cross_entropy
from regauge.learn import MatchingConfig
from regauge.papers.experiment import Experiment, Run, Scale
from regauge.papers.populations import SECONDS
from regauge.papers.table import AREA, BARRIER, Record, Row, Table
from regauge.papers.ways import TEMPERED, TEMPERED_NOTE, Way
from regauge.papers.weight_nets.accuracy import train_population
from regauge.storage.store import Store
from regauge.zoo.presets import cifar10_cnns, cifar10_mlps, mlp_architecture, mnist_mlps, sine_inrs
from regauge.zoo.training import Config
from regauge.zoo.training.examples import Examples, load_examples

POINTS = 11
"""Networks on each line, both ends included."""
BATCH = 128
"""Examples of a batch."""


@dataclass(frozen=True)
class Study:
    """A population, how a matcher is trained on it, and what it is compared with."""

    what: str  # the networks, in words
    population: tuple[str, Config]  # by the name of its folder
    matching: MatchingConfig
    examples: int  # for training that the matcher, and methods with data, see
    pairs: int  # of networks that were kept from the matcher's training
    paper: Mapping[str, str] = field(default_factory=dict)  # printed barriers, by the label of the row
    notes: tuple[str, ...] = ()


def measure(study: Study, run: Run) -> Table:
    """Train the networks and the matcher, and align pairs of networks that it has not seen in every way."""
    store = train_population(*study.population, run)
    examples = load_examples(study.population[1].data)
    split = _split(store, examples, study.pairs)
    matcher = _matcher(study, run, store, examples, split)
    ways = ways_of(matcher, has_classes=not examples.is_signals)
    networks, symmetry = store.read(split["test"]), store.symmetry
    assert symmetry is not None

    def one(way: Way, pair: int) -> Record:
        a, b = (select(networks, k) for k in (2 * pair, 2 * pair + 1))
        signal = _signal(store, split["test"][2 * pair]) if examples.is_signals else None
        task, judge = (_task(store, examples, study.examples, signal, is_kept=kept) for kept in (False, True))
        moved, seconds = way.align(a, b, symmetry, task, run.generator("alignment", way.label, pair))
        curve = rg.line(a, moved, way.judge(judge, task), points=POINTS)
        return {"line": list(curve.table), SECONDS.name: seconds if way.method else None}

    settings = (study.population, repr(study.matching), study.examples, study.pairs)
    found = run.records("aligning", settings, one, ways, range(study.pairs))
    rows = [
        Row.of(way.label, [records], (BARRIER, AREA, SECONDS), paper={"barrier": study.paper.get(way.label, "")})
        for way, records in zip(ways, found, strict=True)
    ]
    notes = (
        f"a matcher trained on {len(split['train'])} networks for {matcher.about['seconds']:.0f} seconds: "
        f"{matcher.about['steps']} steps of {study.matching.batch} pairs, with {study.examples:,} training examples",
        f"{study.pairs} pairs of networks that it has not seen; losses on examples kept from training, at {POINTS} "
        "points of each line",
        "CPU s: of one pair alone; in batches of `rg.align_pairs` matchers take a fraction of it",
        *([] if examples.is_signals else [TEMPERED_NOTE]),
        *study.notes,
    )
    title = f"Learned alignment of {study.what}"
    return Table(title, notes, (BARRIER, AREA, SECONDS), tuple(rows), paired="Weight Matching")


def ways_of(matcher: learn.LearnedMatching, *, has_classes: bool) -> tuple[Way, ...]:
    """The rows of the paper, the mixed matching of this library, and for classifiers a fitted temperature."""

    def refined(init: Method) -> Method:
        return rg.Sinkhorn(loss="midpoint", init=init)

    alone = _Alone(matcher)
    return (
        Way("Naive"),
        *([Way(TEMPERED, is_tempered=True)] if has_classes else []),
        Way("Weight Matching", rg.WeightMatching()),
        Way("Mixed Matching", rg.MixedMatching()),
        Way("Mixed + Sinkhorn, midpoint", refined(rg.MixedMatching())),
        Way("Deep-Align", alone),
        Way("Deep-Align and sweeps, judged", matcher),
        Way("Deep-Align + Sinkhorn", refined(matcher)),
    )


@dataclass(frozen=True, repr=False)
class _Alone(Method):
    """What the vectors of a matcher say, whatever the data say."""

    matcher: learn.LearnedMatching

    def __repr__(self) -> str:
        return "Alone()"

    def match(self, problem: Problem) -> Results:
        return replace(self.matcher, sweeps=0).match(replace(problem, task=None))


def _matcher(
    study: Study, run: Run, store: Store, examples: Examples, split: Mapping[str, NDArray[np.int64]]
) -> learn.LearnedMatching:
    """The matcher, trained unless an earlier run did."""
    settings = (*study.population, study.matching, study.examples, study.pairs)
    path, module = run.place("matchers", settings), store.architecture.module()
    if not path.exists():
        state = path.with_name(f"{path.stem}.partial.safetensors")
        made = learn.fit_matching(
            store,
            config=study.matching,
            task=_task(store, examples, study.examples, None, is_kept=False),
            generator=run.generator("matcher", study.matching),
            split=split,
            pair_by="signal" if examples.is_signals else None,
            inputs=examples.inputs[:512],
            state=state,
            progress=run.progress,
        )
        made.save(path, overwrite=True)
        state.unlink(missing_ok=True)
    return learn.load_matching(path, module=module if study.matching.probes else None)


def _split(store: Store, examples: Examples, pairs: int) -> dict[str, NDArray[np.int64]]:
    """The last networks for the pairs of the table, those before for validation; views of a signal are neighbors."""
    order = np.arange(len(store))
    if examples.is_signals:
        order = order[np.argsort(store.rows["signal"], kind="stable")]
    kept = max(4, 2 * (len(store) // 40))
    return {
        "test": order[-2 * pairs :],
        "validation": order[-2 * pairs - kept : -2 * pairs],
        "train": order[: -2 * pairs - kept],
    }


def _signal(store: Store, index: int) -> int:
    return int(store.rows["signal"][index])


def _task(store: Store, examples: Examples, count: int, signal: int | None, *, is_kept: bool) -> rg.Task:
    """Some examples for training, or those that were kept from it; of signals those of one."""
    inputs = examples.validation_inputs if is_kept else examples.inputs[:count]
    targets = examples.validation_targets if is_kept else examples.targets
    if examples.is_signals:
        targets = targets[0 if signal is None else signal]
    batches = list(zip(torch.split(inputs, BATCH), torch.split(targets[: len(inputs)], BATCH), strict=True))
    criterion = functional.mse_loss if targets.is_floating_point() else cross_entropy
    return rg.Task(store.architecture.module(), batches, criterion)


def _config(scale: Scale, *, name: str, what: str, config: Config, paper: Mapping[str, str], reduced: str) -> Study:
    is_signals = name == "sines"
    line: dict[str, Any] = {"line_by": "outputs", "distance": 0.0} if is_signals else {}
    if scale == "smoke":
        count, matching = 24, MatchingConfig(width=8, depth=1, vectors=8, epochs=1, batch=8, checked=2, **line)
        small = config if is_signals else replace(config, architecture=mlp_architecture(64, 8, 8, 10), data="digits")
        short: dict[str, Any] = {"steps": 5} if is_signals else {"epochs": 1}
        small = replace(small, count=count, **short)
        return Study(what, (f"{name}-smoke", small), matching, 200, 2, paper)
    count, seconds, pairs = (2000, 900.0, 16) if scale == "cpu" else (config.count, None, 100)
    matching = MatchingConfig(
        depth=2,
        probes=0 if is_signals else 128,
        lr=3e-3,
        batch=16,
        epochs=100_000,
        seconds=seconds,
        is_cpu_time=True,
        **line,
    )
    if scale == "paper":
        matching = replace(matching, batch=32, epochs=100, is_cpu_time=False)
    return Study(what, (name, replace(config, count=count)), matching, 8192, pairs, paper, (reduced,))


REDUCED = "reduced at the scale cpu: 2,000 networks and 15 CPU minutes of training; the paper has thousands, on a GPU"
STUDIES = {
    "learned-mnist": ("mnist-mlps", "MLPs 784-128-128-128-10 on MNIST", mnist_mlps(), {
        "Naive": "2.007", "Weight Matching": "0.047", "Deep-Align": "0.005", "Deep-Align + Sinkhorn": "0.000",
    }),
    "learned-cifar10": ("cifar10-mlps", "MLPs 3072-128-128-128-10 on CIFAR-10", cifar10_mlps(), {
        "Naive": "0.927", "Weight Matching": "0.156", "Deep-Align": "0.078", "Deep-Align + Sinkhorn": "0.037",
    }),
    "learned-cnn": ("cifar10-cnns", "CNNs of table 4 on CIFAR-10", cifar10_cnns(), {
        "Naive": "1.124", "Weight Matching": "0.661", "Deep-Align": "0.237", "Deep-Align + Sinkhorn": "0.081",
    }),
    "learned-sines": ("sines", "sine networks 1-32-32-1 of waves", sine_inrs(), {}),
}  # fmt: skip
"""For each experiment the folder of the population, what it is in words, its training, and the paper's barriers."""
EXPERIMENTS = {
    key: Experiment(
        f"{what}: a net learns to align, beside methods that do not",
        partial(_config, name=name, what=what, config=config, paper=paper, reduced=REDUCED),
        measure,
    )
    for key, (name, what, config, paper) in STUDIES.items()
}
