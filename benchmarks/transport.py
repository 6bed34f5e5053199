"""Fine-tunes carried to another base: the share of the gain that is kept, next to the same data without the fine-tune.

Base A and base B are trained from two seeds, or B is the next release of A: trained on. A is fine-tuned to a new task.
The gain is what the same fine-tune of B reaches on held-out examples, beyond B. Each row says which data it saw. The
settings (ridge, rates, scales) were chosen on the pairs of `TUNING`; those of `TABLE` were run once, afterwards.

    OMP_NUM_THREADS=1 python benchmarks/transport.py --out docs/records/transport.jsonl [--only SETUP ...]
    python benchmarks/transport.py --out docs/records/transport.jsonl --table
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge.data import digits

TABLE, TUNING = (10, 11, 12), (0, 1, 2)
"""Seeds of the first bases; those of the second ones are 100 more."""
STEPS = 300
"""Steps of training on labels at most."""
WIDTHS = "mirrored"
"""The task on which other widths are tried."""
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setup:
    """A kind of network, its tasks, and how it is trained.

    Attributes:
        make: A network with random weights.
        base: The examples of the bases.
        tasks: The examples of each new task, for training and for testing.
        steps: Steps of Adam for a base, and for a fine-tune.
        labels: Labelled examples of the new task, and those with which training is tried.
        metric: What the gain is measured in.
        other: First bases of other widths, by the words for them.
    """

    make: Callable[[], nn.Module]
    base: Callable[[], Data]
    tasks: Callable[[], dict[str, tuple[Data, Data]]]
    steps: tuple[int, int]
    labels: tuple[int, int]
    metric: str = "accuracy"
    other: tuple[tuple[str, Callable[[], nn.Module]], ...] = ()


def mlp(width: int = 256) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip


def images() -> tuple[Data, Data]:
    """Digits of 8 x 8 pixels: 1,437 for training and 360 for testing."""
    found = digits()
    return (found.train_images, found.train_labels), (found.test_images, found.test_labels)


def digit_tasks(shape: tuple[int, ...]) -> dict[str, tuple[Data, Data]]:
    """Digits seen in a mirror, upside down, and white on black."""
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "mirrored": lambda x: x.flip(-1),
        "upside down": lambda x: x.flip(-2),
        "inverted": lambda x: x.max() - x,
    }
    train, test = images()
    return {
        name: tuple((change(x).reshape(-1, *shape), y) for x, y in (train, test)) for name, change in changes.items()
    }  # type: ignore[misc]


SETUPS = {
    "MLP 64-256-256-10, digits": Setup(
        mlp,
        lambda: (images()[0][0].flatten(1), images()[0][1]),
        lambda: digit_tasks((64,)),
        (600, 150),
        (64, 96),
        other=(("from width 128", lambda: mlp(128)), ("from width 512", lambda: mlp(512))),
    ),
}  # fmt: skip


def train(module: nn.Module, data: Data, steps: int, seed: int, start: rg.Params | None = None) -> rg.Params:
    """Train with Adam on random batches of 64."""
    if start is not None:
        module.load_state_dict(start)
    chance, optimizer = torch.Generator().manual_seed(seed), torch.optim.Adam(module.parameters(), 1e-3)
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (64,), generator=chance)
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(data[0][rows]).flatten(0, -2), data[1][rows].flatten())
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


@dataclass(frozen=True)
class Measure:
    """The gain of a network: the share of what a fine-tune of B gains on held-out examples of the new task.

    Attributes:
        judge: The held-out examples.
        metric: What is measured.
        ends: The metric of B, and of its own fine-tune.
        facts: The task, the pair and the seed.
    """

    judge: rg.Task
    metric: str
    ends: tuple[float, float]
    facts: dict[str, Any]

    def row(self, name: str, seen: str, run: Callable[[], rg.merging.TransportResult | rg.Params]) -> dict[str, Any]:
        """Carry a change by a row of the table, and measure the result."""
        start = time.process_time()
        made = run()
        seconds = time.process_time() - start
        found: dict[str, Any] = {}
        if isinstance(made, rg.merging.TransportResult):
            found = {"scale": made.scale, "cosine": made.cosine, "steps": made.steps}
            found["is_element"], made = made.element is not None, made.params
        reached, (before, after) = self.judge.evaluate(made)[self.metric], self.ends
        gain = (reached - before) / (after - before)
        known = {"row": name, "seen": seen, "gain": gain, "reached": reached, "before": before, "after": after}
        return {**self.facts, **known, "seconds": seconds, **found}


def rows_of(setup: Setup, seed: int) -> Iterator[dict[str, Any]]:
    """The rows of all tasks of one pair of bases, of a base and its next release, and of bases of other widths."""
    data = setup.base()
    base_a = train(seeded(setup.make, seed), data, setup.steps[0], seed)
    released = train(setup.make(), data, setup.steps[0] // 2, seed + 1, base_a)
    base_b = train(seeded(setup.make, seed + 100), data, setup.steps[0], seed + 100)
    symmetry, inputs = rg.discover(setup.make(), (data[0][:2],)), data[0][:1000]
    seen = f"{len(inputs)} inputs of the base"
    for task, (new, held) in setup.tasks().items():
        judge = rg.Task(setup.make(), list(zip(held[0].split(256), held[1].split(256), strict=True)))
        module = setup.make()
        tuned = train(module, new, setup.steps[1], seed, base_a)
        few, more = (rg.Task(module, [(new[0][:count], new[1][:count])]) for count in setup.labels)
        for pair, base in (("two seeds", base_b), ("next release", released)):
            own = train(setup.make(), new, setup.steps[1], seed + 100, base)
            ends = judge.evaluate(base)[setup.metric], judge.evaluate(own)[setup.metric]
            measure = Measure(judge, setup.metric, ends, {"task": task, "pair": pair, "seed": seed})
            carried = partial(rg.transport, base_a, tuned, base, symmetry)
            alone = partial(rg.transport, base, base, base, symmetry, task=more, steps=STEPS)
            verbatim = {name: tensor + tuned[name] - base_a[name] for name, tensor in base.items()}
            yield measure.row("verbatim", "nothing", partial(dict, verbatim))
            yield measure.row("weights", "nothing", carried)
            yield measure.row("inputs", seen, partial(carried, inputs=[inputs], module=module))
            others = new[0][:1000]
            text = f"{len(others)} inputs of the task"
            yield measure.row("inputs", text, partial(carried, inputs=[others], module=module))
            few_seen, more_seen = (f"{count} labels, {seen}" for count in setup.labels)
            yield measure.row("labels", few_seen, partial(carried, inputs=[inputs], task=few))
            trained = partial(carried, inputs=[inputs], task=more, steps=STEPS)
            yield measure.row("labels and training", more_seen, trained)
            yield measure.row("training alone", f"{setup.labels[1]} labels", alone)
            if pair == "next release" or task != WIDTHS:
                continue
            for name, make in setup.other:
                other = seeded(make, seed)
                start = train(other, data, setup.steps[0], seed)
                change = train(other, new, setup.steps[1], seed, start)
                measure = Measure(judge, setup.metric, ends, {"task": task, "pair": name, "seed": seed})
                wider = partial(rg.transport, start, change, base, symmetry, inputs=[inputs])
                yield measure.row("inputs", seen, partial(wider, module=module, module_a=other))
                yield measure.row("labels", few_seen, partial(wider, task=few, module_a=other))


def table(rows: list[dict[str, Any]]) -> str:
    """The share of the gain that is kept, as a Markdown table for each kind of network: means over tasks and pairs."""
    lines = list[str]()
    for setup in dict.fromkeys(row["setup"] for row in rows):
        own = [row for row in rows if row["setup"] == setup]
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
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", choices=[*SETUPS], default=[*SETUPS])
    parser.add_argument("--seeds", nargs="*", type=int, default=TABLE)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
    if args.table:
        print(table(rows))
        return
    done = {(row["setup"], row["seed"]) for row in rows}
    for name in args.only:
        for seed in args.seeds:
            if (name, seed) in done:
                continue
            lines = [json.dumps({"setup": name, **row}) for row in rows_of(SETUPS[name], seed)]
            print("\n".join(lines), flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
