"""Fine-tunes transferred to another base: the share of the gain that is preserved, compared with the same data without
the fine-tune.

Base A and base B are trained from two seeds, or B is the next release of A, which was trained further. A is fine-tuned
to a new task. The gain is the improvement over B, on held-out examples, of the same fine-tune of B. Each row names the
data that it uses. The settings (ridge, rates, scales) were chosen on the pairs of `TUNING`. The pairs of `TABLE` were
run once, afterwards.

    OMP_NUM_THREADS=1 python benchmarks/transport.py --out docs/records/transport.jsonl [--only SETUP ...]
    python benchmarks/transport.py --out docs/records/transport.jsonl --table

An interrupted run continues with the first missing row. `--networks FOLDER` also stores the trained networks, and
`--rows` names the rows that are computed.
"""

import argparse
import inspect
import json
import re
import tarfile
import time
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge.data import digits
from regauge.data.packaged import help_topics, tiny_shakespeare, windows
from regauge.merging import activation_maps
from regauge.nets.transformer import GPT, Llama, ViT

SCALES = tuple(k / 8 for k in range(33))
"""Scales that the rows of other methods try."""
TABLE, TUNING = (10, 11, 12), (0, 1, 2)
"""Seeds of the first bases. The seeds of the second bases are larger by 100."""
WIDTHS = "mirrored"
"""The task on which other widths are tried."""
RELEASES = {f"release after {share:.0%} more steps": share for share in (0.05, 0.1, 0.25)}
"""Releases of base A after fewer steps than "next release", which has half as many steps more. For these releases, only
rows without data are made.
"""
WITHOUT_DATA = ("verbatim", "weights")
THESEUS = "orthogonal maps (as Theseus is described)"
GRADFIX = "signs of gradients (as GradFix is described)"
BATCH = 100
"""The number of inputs in a batch of training without labels."""
CONTEXT, HELD = 32, 256
"""The number of symbols in an example of a text, and the number of examples at its end that are held out."""
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setup:
    """A kind of network, its tasks, and the settings of its training.

    Attributes:
        make: A function that returns a network with random weights.
        base: The examples of the bases.
        tasks: The examples of each new task, for training and for testing.
        steps: The numbers of steps of Adam for a base, and for a fine-tune.
        labels: The number of labelled examples of the new task, and the number of examples with which training is
            tried.
        lr: The learning rate of Adam.
        batch: The number of examples in a step of Adam.
        inputs: The number of inputs without labels.
        training: The largest number of training steps on labels or on inputs.
        only: The rows between two seeds that are made, for curves; all rows of both kinds of pairs by default.
        metric: The metric in which the gain is measured.
        other: First bases of other widths, by their descriptions.
        is_text: Whether the examples are consecutive pieces of a text. Labelled examples and inputs are then sampled at
            random, because the first pieces are all from one page.
    """

    make: Callable[[], nn.Module]
    base: Callable[[], Data]
    tasks: Callable[[], dict[str, tuple[Data, Data]]]
    steps: tuple[int, int]
    labels: tuple[int, int]
    lr: float = 1e-3
    batch: int = 64
    inputs: int = 1000
    training: int = 300
    only: tuple[str, ...] = ()
    metric: str = "accuracy"
    other: tuple[tuple[str, Callable[[], nn.Module]], ...] = ()
    is_text: bool = False

    def known(self, data: Data, count: int) -> Data:
        """Return examples of a task or of the bases. A smaller sample is a part of every larger sample."""
        order = torch.arange(len(data[0]))
        if self.is_text:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
        return data[0][order[:count]], data[1][order[:count]]


def mlp(width: int = 256, hidden: int = 1) -> nn.Module:
    """Return the layers of an MLP of one width, some of which read other layers of this width."""
    between = [part for _ in range(hidden) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *between, nn.Linear(width, 10))


def curve(width: int, hidden: int) -> Setup:
    """Return one task at a width and a depth, without training on labels."""
    return Setup(
        partial(mlp, width, hidden),
        lambda: (images()[0][0].flatten(1), images()[0][1]),
        lambda: {WIDTHS: digit_tasks((64,))[WIDTHS]},
        (600, 150),
        (64, 96),
        only=("verbatim", "weights", "inputs", "labels"),
    )


def images() -> tuple[Data, Data]:
    """Return digits of 8 x 8 pixels: 1,437 for training and 360 for testing."""
    found = digits()
    return (found.train_images, found.train_labels), (found.test_images, found.test_labels)


def digit_tasks(shape: tuple[int, ...]) -> dict[str, tuple[Data, Data]]:
    """Return digits that are mirrored, upside down, or inverted."""
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "mirrored": lambda x: x.flip(-1),
        "upside down": lambda x: x.flip(-2),
        "inverted": lambda x: x.max() - x,
    }
    train, test = images()
    return {
        name: tuple((change(x).reshape(-1, *shape), y) for x, y in (train, test)) for name, change in changes.items()
    }  # type: ignore[misc]


def tokens(text: str) -> Data:
    """Return a text as windows of the symbols that occur in Python's help, and the symbols that follow. Other symbols
    are dropped.
    """
    place = {symbol: number for number, symbol in enumerate(help_topics().symbols)}
    return windows(torch.tensor([place[symbol] for symbol in text if symbol in place]), CONTEXT)


def help_text() -> str:
    return help_topics().decode(torch.cat([help_topics().train, help_topics().validation]))


@cache
def text_tasks() -> dict[str, tuple[Data, Data]]:
    """Return Shakespeare's plays, source code of Python's library, and Python's help in capital letters."""
    plays = tiny_shakespeare()
    sources = "".join(Path(one.__file__).read_text(encoding="utf-8") for one in (argparse, typing, tarfile, inspect))
    texts = {
        "Shakespeare": plays.decode(torch.cat([plays.train, plays.validation])),
        "source code": sources,
        "capitals": help_text().upper(),
    }
    made = {name: tokens(text) for name, text in texts.items()}
    return {name: ((x[:-HELD], y[:-HELD]), (x[-HELD:], y[-HELD:])) for name, (x, y) in made.items()}


def digit_data() -> Data:
    return images()[0]


def language(
    make: Callable[[], nn.Module], steps: tuple[int, int] = (500, 125), batch: int = 32, training: int = 60
) -> Setup:
    """Return a language model of some style, trained on Python's help."""
    return Setup(
        make,
        lambda: tokens(help_text()),
        text_tasks,
        steps,
        (64, 96),
        lr=3e-3,
        batch=batch,
        inputs=200,
        training=training,
        metric="loss",
        is_text=True,
    )


def gpt(width: int = 32) -> nn.Module:
    return GPT(len(help_topics().symbols), CONTEXT, width=width, layers=2, heads=4)


def llama(width: int = 32) -> nn.Module:
    return Llama(len(help_topics().symbols), width=width, layers=2, heads=4, kv_heads=2)


def vit(width: int = 32) -> nn.Module:
    return ViT(8, 2, width=width, layers=2, heads=4)


SETUPS = {
    "MLP 64-256-256-10, digits": Setup(
        mlp,
        lambda: (images()[0][0].flatten(1), images()[0][1]),
        lambda: digit_tasks((64,)),
        (600, 150),
        (64, 96),
        other=(("from width 128", lambda: mlp(128)), ("from width 512", lambda: mlp(512))),
    ),
    "ViT of width 32, digits": Setup(
        vit,
        digit_data,
        lambda: digit_tasks((1, 8, 8)),
        (500, 125),
        (64, 96),
        lr=2e-3,
        batch=32,
        inputs=500,
        training=60,
    ),
    "GPT of width 32, text": language(gpt),
    "Llama of width 32, text": language(llama),
    "GPT of width 32, text, trained longer": language(gpt, (800, 200), 64, 100),
    **{f"{2 + deep} layers of {width} units": curve(width, 1 + deep) for deep in (0, 2) for width in (16, 64, 256)},
}  # fmt: skip


def train(
    module: nn.Module, data: Data, steps: int, seed: int, setup: Setup, start: rg.Params | None = None
) -> rg.Params:
    """Train with Adam on random batches."""
    if start is not None:
        module.load_state_dict(start)
    chance, optimizer = torch.Generator().manual_seed(seed), torch.optim.Adam(module.parameters(), setup.lr, fused=True)
    module.train()
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (setup.batch,), generator=chance)
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(data[0][rows]).flatten(0, -2), data[1][rows].flatten())
        loss.backward()
        optimizer.step()
    module.eval()
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@dataclass(frozen=True)
class Trained:
    """The networks of one pair of seeds, trained on request, and stored in a folder if one is given."""

    name: str
    seed: int
    folder: Path | None = None

    def __call__(
        self, what: str, data: Data, steps: int, seed: int, *, module: nn.Module, start: rg.Params | None = None
    ) -> rg.Params:
        """Return a network: the stored network of this name, or a network that is trained now."""
        words = re.sub("[^a-z0-9]+", "-", f"{self.name} {self.seed} {what}".lower())
        path = self.folder and self.folder / f"{words}.safetensors"
        if path and path.exists():
            return rg.load(path)
        made = train(module, data, steps, seed, SETUPS[self.name], start)
        if path:
            rg.save(made, path)
        return made

    def bases(self) -> tuple[rg.Params, dict[str, rg.Params]]:
        """Return the first base, and the second base of each kind of pair."""
        setup, seed = SETUPS[self.name], self.seed
        data, (steps, _) = setup.base(), setup.steps
        base_a = self("a", data, steps, seed, module=seeded(setup.make, seed))
        base_b = self("b", data, steps, seed + 100, module=seeded(setup.make, seed + 100))
        if setup.only:
            return base_a, {"two seeds": base_b}
        shares = {"next release": 0.5} | RELEASES
        return base_a, {"two seeds": base_b} | {
            pair: self(
                pair.removeprefix("next "), data, int(steps * share), seed + 1, module=setup.make(), start=base_a
            )
            for pair, share in shares.items()
        }

    def tuned(self, task: str, pair: str, start: rg.Params) -> rg.Params:
        """Return the fine-tune of a base: of the first base, or of the second base of a pair."""
        setup = SETUPS[self.name]
        seed = self.seed + 100 * (pair != "a")
        return self(f"{task} {pair}", setup.tasks()[task][0], setup.steps[1], seed, module=setup.make(), start=start)


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


@dataclass(frozen=True)
class Measure:
    """The gain of a network on held-out examples of the new task, as a share of the gain of a fine-tune of B.

    Attributes:
        judge: The held-out examples.
        metric: The measured metric.
        ends: The metric of B, and of its own fine-tune.
        facts: The task, the pair and the seed.
    """

    judge: rg.Task
    metric: str
    ends: tuple[float, float]
    facts: dict[str, Any]

    def row(self, name: str, seen: str, run: Callable[[], rg.merging.TransportResult | rg.Params]) -> dict[str, Any]:
        """Transfer a change by a row of the table, and measure the result."""
        start = time.process_time()
        made = run()
        seconds = time.process_time() - start
        found: dict[str, Any] = {}
        if isinstance(made, rg.merging.TransportResult):
            found = {"scale": made.scale, "cosine": made.cosine, "steps": made.steps, "losses": made.losses}
            found["is_element"], made = made.element is not None, made.params
        reached, (before, after) = self.judge.evaluate(made)[self.metric], self.ends
        gain = (reached - before) / (after - before)
        known = {"row": name, "seen": seen, "gain": gain, "reached": reached, "before": before, "after": after}
        return {**self.facts, **known, "seconds": seconds, **found}


def orthogonal(moments: Any, *, is_inverse: bool = False, is_shared: bool = False) -> tuple[Tensor, Tensor]:
    """Return the orthogonal map between centered activations, instead of a ridge map."""
    count, x, y, _, both, _ = moments.sums
    x, y, both = (y, x, both.mT) if is_inverse else (x, y, both)
    if is_shared and len(x) == len(y):
        return torch.eye(len(x), dtype=x.dtype), torch.zeros_like(x)
    left, _, right = torch.linalg.svd((both - x.outer(y) / count).mT, full_matrices=False)
    return left @ right, (y - left @ right @ x) / count


def scaled(base: rg.Params, change: Mapping[str, Tensor], task: rg.Task) -> rg.Params:
    """Return a base plus a change, multiplied by the scale with the smallest loss."""

    def at(scale: float) -> rg.Params:
        return {name: tensor + scale * change[name].to(tensor) if name in change else tensor
                for name, tensor in base.items()}  # fmt: skip

    return min(map(at, SCALES), key=lambda one: task.evaluate(one)["loss"])


def theseus(
    networks: tuple[rg.Params, rg.Params, rg.Params], module: nn.Module, inputs: Tensor, sym: rg.Symmetry, task: rg.Task
) -> rg.Params:
    """Transfer a change through orthogonal maps between activations, as described in arXiv 2602.12952."""
    with patch.object(activation_maps._Moments, "map", orthogonal):
        carried, _ = activation_maps.carry_by_maps(networks, (module, module), [inputs], sym)
    return scaled(networks[2], carried.change, task)


def gradfix(base: rg.Params, change: rg.Params, task: rg.Task) -> rg.Params:
    """Keep only the entries of a change that oppose the gradients of most examples, as described in arXiv
    2510.09658.
    """
    names = [name for name, _ in task.module.named_parameters()]
    votes = {name: torch.zeros_like(base[name]) for name in names}
    for inputs, targets in task.batches:
        for x, y in zip(inputs, targets, strict=True):
            free = {name: base[name].clone().requires_grad_() for name in names}
            task.loss({**base, **free}, (x[None], y[None])).backward()
            for name, tensor in free.items():
                votes[name] += tensor.grad.sign()
    return scaled(base, {name: change[name] * (change[name] * vote < 0) for name, vote in votes.items()}, task)


def rows_of(fit: Trained, is_wanted: Callable[..., bool]) -> Iterator[dict[str, Any]]:
    """Return the rows of one pair of bases, of a base and its next release, and of bases of other widths, task by task.

    A row is computed if its task, pair, name and data are requested.
    """
    setup, seed = SETUPS[fit.name], fit.seed
    data, (base_a, bases) = setup.base(), fit.bases()
    symmetry, inputs = rg.discover(setup.make().eval(), (data[0][:2],)), setup.known(data, setup.inputs)[0]
    seen = f"{len(inputs)} inputs of the base"
    for task, (new, held) in setup.tasks().items():
        judge = rg.Task(setup.make(), list(zip(held[0].split(256), held[1].split(256), strict=True)))
        module = setup.make()
        tuned = fit.tuned(task, "a", base_a)
        few, more = (rg.Task(module, [setup.known(new, count)]) for count in setup.labels)
        for pair, base in bases.items():
            own = fit.tuned(task, pair, base)
            ends = judge.evaluate(base)[setup.metric], judge.evaluate(own)[setup.metric]
            measure = Measure(judge, setup.metric, ends, {"task": task, "pair": pair, "seed": seed})
            carried = partial(rg.transport, base_a, tuned, base, symmetry)
            alone = partial(rg.transport, base, base, base, symmetry, task=more, steps=setup.training)
            change = {name: tensor - base_a[name] for name, tensor in tuned.items() if tensor.is_floating_point()}
            verbatim = {name: tensor + change[name] if name in change else tensor for name, tensor in base.items()}
            others, networks = setup.known(new, setup.inputs)[0], (base_a, tuned, base)
            text = f"{len(others)} inputs of the task"
            few_seen, more_seen = (f"{count} labels, {seen}" for count in setup.labels)
            by_inputs, taught = partial(carried, inputs=[inputs]), partial(carried, inputs=list(others.split(BATCH)))
            rows: list[tuple[str, str, Any]] = [
                ("verbatim", "nothing", partial(dict, verbatim)),
                ("weights", "nothing", carried),
                ("inputs", seen, partial(by_inputs, module=module)),
                ("inputs", text, partial(carried, inputs=[others], module=module)),
                ("labels", few_seen, partial(by_inputs, task=few)),
                ("labels and training", more_seen, partial(by_inputs, task=more, steps=setup.training)),
                ("training alone", f"{setup.labels[1]} labels", alone),
                (THESEUS, few_seen, partial(theseus, networks, module, inputs, symmetry, few)),
                (GRADFIX, f"{setup.labels[0]} labels", partial(gradfix, base, change, few)),
            ]
            if pair == "two seeds":
                taught = partial(taught, module=module, steps=setup.training)
                rows += [("inputs and training", text, taught), ("training alone", text, partial(taught, scale=0.0))]
            only = WITHOUT_DATA if pair in RELEASES else setup.only
            for row in rows:
                if (not only or row[0] in only) and is_wanted(task, pair, *row[:2]):
                    yield measure.row(*row)
            if pair != "two seeds" or task != WIDTHS:
                continue
            for name, make in setup.other:
                other = seeded(make, seed)
                start = fit(name, data, setup.steps[0], seed, module=other)
                tuned_other = fit(f"{name} tuned", new, setup.steps[1], seed, module=other, start=start)
                measure = Measure(judge, setup.metric, ends, {"task": task, "pair": name, "seed": seed})
                wider = partial(rg.transport, start, tuned_other, base, symmetry, inputs=[inputs])
                by_inputs = partial(wider, module=module, module_a=other)
                by_labels = partial(wider, task=few, module_a=other)
                for row in (("inputs", seen, by_inputs), ("labels", few_seen, by_labels)):
                    if is_wanted(task, name, *row[:2]):
                        yield measure.row(*row)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the share of the gain that is preserved, as a Markdown table for each kind of network, with means over
    tasks and pairs.
    """
    lines = list[str]()
    for setup in dict.fromkeys(row["setup"] for row in rows if not SETUPS[row["setup"]].only):
        own = [row for row in rows if row["setup"] == setup and row["pair"] not in RELEASES]
        tasks = list(dict.fromkeys(row["task"] for row in own))
        lines += [f"{setup}:", "", f"| B is | carried by | data | {' | '.join(tasks)} | mean | least |"]
        lines += [f"| --- | --- | --- | {'---: | ' * len(tasks)}---: | ---: |"]
        for key in dict.fromkeys((row["pair"], row["row"], row["seen"]) for row in own):
            found = [row for row in own if (row["pair"], row["row"], row["seen"]) == key]
            gains = [[row["gain"] for row in found if row["task"] == task] for task in tasks]
            cells = [f"{fmean(some):.2f}" if some else "" for some in gains]
            every = [row["gain"] for row in found]
            lines.append(f"| {' | '.join([*key, *cells])} | {fmean(every):.2f} | {min(every):.2f} |")
        lines.append("")
    return "\n".join(
        [*lines, *curve_table([row for row in rows if SETUPS[row["setup"]].only]), "", *release_table(rows)]
    )


def curve_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the share that is preserved at several widths and depths, as means over pairs, as the lines of a table."""
    ways = list(dict.fromkeys((row["row"], row["seen"]) for row in rows))
    heads = [f"{name}: {seen}" if seen != "nothing" else name for name, seen in ways]
    lines = [f"| network | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(ways)]
    for setup in dict.fromkeys(row["setup"] for row in rows):
        own = [[r["gain"] for r in rows if (r["setup"], r["row"], r["seen"]) == (setup, *way)] for way in ways]
        lines.append(f"| {setup} | {' | '.join(f'{fmean(gains):.2f}' for gains in own)} |")
    return lines if rows else []


def release_table(rows: list[dict[str, Any]]) -> list[str]:
    """The share that is kept without data, by the distance of the release: mean and least of all tasks and pairs."""
    own = [row for row in rows if row["row"] in WITHOUT_DATA]
    setups = list(dict.fromkeys(row["setup"] for row in own if row["pair"] in RELEASES))
    lines = [f"| B is | carried by | {' | '.join(setups)} |", "| --- | --- |" + " ---: |" * len(setups)]
    for pair in (*RELEASES, "next release"):
        for way in WITHOUT_DATA:
            gains = [
                [r["gain"] for r in own if (r["pair"], r["row"], r["setup"]) == (pair, way, one)] for one in setups
            ]
            cells = [f"{fmean(some):.2f} ({min(some):.2f})" if some else "" for some in gains]
            lines.append(f"| {pair} | {way} | {' | '.join(cells)} |")
    return lines if setups else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", choices=[*SETUPS], default=[*SETUPS])
    parser.add_argument("--seeds", nargs="*", type=int, default=TABLE)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--networks", type=Path)
    parser.add_argument("--rows", nargs="*")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
    if args.table:
        print(table(rows))
        return
    for seed in args.seeds:
        for name in args.only:
            fit = Trained(name, seed, args.networks)
            done = {key(row) for row in rows if (row["setup"], row["seed"]) == (name, seed)}
            for row in rows_of(fit, partial(is_missing, done, args.rows)):
                line = json.dumps({"setup": name, **row})
                print(line, flush=True)
                if args.out:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(f"{line}\n")


def is_missing(done: Collection[tuple[str, ...]], rows: list[str] | None, *one: str) -> bool:
    """Return whether a row has no record yet. If rows are named, only named rows can be missing."""
    return one not in done and (rows is None or one[2] in rows)


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the task, pair, name and data of a row, which identify it among the rows of its seeds."""
    return row["task"], row["pair"], row["row"], row["seen"]


if __name__ == "__main__":
    main()
