"""Merges of fine-tunes of one base by every rule, with and without alignment.

A family is a base and two, three or four fine-tunes of this base. Language models in the style of GPT and Llama learn
the first half of Shakespeare's plays. The language models are fine-tuned on the second half, on WikiText, on Python's
help or on Python's source. Vision transformers learn digits, and are fine-tuned on groups of clothes ("new classes") or
on groups of the digits that they know ("known classes"). Fine-tuning takes from 1% to 200% of the base's training
steps, at the largest learning rate of that training. In the rows "strangers", each network is trained on its task from
its own initialization.

Every rule merges the same networks twice: aligned as `rg.merge` aligns them, and as stored. The loss is the mean over
the tasks of the merged networks. Trivial controls are the base, and each of the networks on all tasks ("one of them").

    REGAUGE_DATA=... OMP_NUM_THREADS=1 python benchmarks/aligned_merges.py FOLDER       # continues where it stopped
    python benchmarks/aligned_merges.py --table docs/records/aligned-merges.jsonl       # tables, and the rule's test

FOLDER contains the networks, and FOLDER/aligned-merges.jsonl has a line for each family, amount, rule and alignment.
Thresholds of `regauge.merging.merge_record` were checked on even seeds, and are tested on odd seeds.
"""

import argparse
import inspect
import json
import tarfile
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import regauge as rg
from regauge.alignment import MergeMany, Method, Result, align_many
from regauge.data.data_files import folders
from regauge.data.images import fashion_mnist, mnist
from regauge.data.packaged import help_topics, tiny_shakespeare, windows
from regauge.merging import Average, Dare, Della, ModelStock, Rule, Slerp, TaskArithmetic, Ties
from regauge.merging.blend import Blend
from regauge.merging.merge_record import Need
from regauge.nets.transformer import GPT, Llama, ViT, initialize_transformer

Params = rg.Params
Examples = tuple[Tensor, Tensor]
"""Inputs and targets."""

STEPS, BATCH, CONTEXT, WIDTH, LAYERS, HEADS = 300, 32, 32, 32, 2, 4
AMOUNTS = (0.01, 0.05, 0.2, 0.5, 1.0, 2.0)
"""Lengths of fine-tuning, as shares of the base's training steps."""
STRANGERS = "strangers"
SEEDS = tuple(range(8))
COUNTS = (2, 3, 3, 2, 4, 4, 2, 2)
"""The number of merged networks, by seed."""
JUDGED = 200
"""The number of windows of text on which a task is evaluated. For images, the number is five times as large."""
SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))
"""The symbols that are used. All other symbols of a text are dropped."""
RULES: dict[str, Rule] = {
    "linear": Average(),
    "slerp": Slerp(),
    "task arithmetic": TaskArithmetic(scale=0.5),
    "ties": Ties(),
    "dare": Dare(0.5, TaskArithmetic(scale=0.5)),
    "della": Della(),
    "model stock": ModelStock(),
}
KINDS = ("GPT", "ViT, new classes", "Llama", "ViT, known classes")


@dataclass(frozen=True)
class Kind:
    """An architecture with the data of a base and of four tasks, each with training and test data."""

    name: str
    module: nn.Module
    lr: float
    base: Examples
    tasks: tuple[tuple[Examples, Examples], ...]

    @cached_property
    def symmetry(self) -> rg.Symmetry:
        """The symmetry that `discover` finds."""
        return rg.discover(self.module.eval(), (self.base[0][:2],))

    def initialize(self, seed: int) -> Params:
        """Return a randomly initialized network."""
        return initialize_transformer(self.module, torch.Generator().manual_seed(seed))  # type: ignore[arg-type]

    def train(
        self, start: Params, data: Examples, seed: int, steps: Sequence[int], rate: Callable[[int], float]
    ) -> Iterator[Params]:
        """Train, and yield the network after given numbers of steps."""
        generator, (inputs, targets) = torch.Generator().manual_seed(seed), data
        self.module.load_state_dict(start)
        self.module.train()
        optimizer = torch.optim.Adam(self.module.parameters(), lr=self.lr, fused=True)
        for step in range(1, max(steps) + 1):
            optimizer.param_groups[0]["lr"] = self.lr * rate(step)
            rows = torch.randint(len(inputs), (BATCH,), generator=generator)
            optimizer.zero_grad()
            cross_entropy(self.module(inputs[rows]).flatten(0, -2), targets[rows].flatten()).backward()
            optimizer.step()
            if step in steps:
                yield {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def judge(self, params: Params, count: int) -> list[float]:
        """Return the loss on each of the first tasks."""
        self.module.eval()
        with torch.no_grad():
            outputs = [(functional_call(self.module, params, (x,)), y) for _, (x, y) in self.tasks[:count]]
        return [float(cross_entropy(out.flatten(0, -2), targets.flatten())) for out, targets in outputs]


@cache
def kind_of(name: str) -> Kind:
    """Return the kind of families with a given name."""
    if name.startswith("ViT"):
        module = ViT(14, 7, classes=20, width=WIDTH, layers=LAYERS, heads=HEADS)
        digits, clothes = (made.pooled(2) for made in (mnist(), fashion_mnist()))
        base = digits.train_images[:20_000], digits.train_labels[:20_000]
        images, offset = (clothes, 10) if name == "ViT, new classes" else (digits, 0)
        tasks = []
        for own in ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9)):
            parts = []
            for inputs, labels in (
                (images.train_images[20_000:], images.train_labels[20_000:]),
                (images.test_images, images.test_labels),
            ):
                rows = torch.isin(labels, torch.tensor(own)).nonzero().flatten()
                parts.append((inputs[rows], labels[rows] + offset))
            (train, (x, y)) = parts
            tasks.append((train, (x[: 5 * JUDGED], y[: 5 * JUDGED])))
        return Kind(name, module, 2e-3, base, tuple(tasks))
    plays, wiki = tiny_shakespeare(), next(path for one in folders("wikitext2") if (path := one / "valid.txt").exists())
    known = plays.decode(plays.train)
    source = "".join(map(inspect.getsource, (tarfile, argparse, typing, inspect)))
    help_text = help_topics()
    texts = [wiki.read_text(), source, help_text.decode(help_text.train), known[len(known) // 2 :]]
    n = len(SYMBOLS)
    made: dict[str, nn.Module] = {
        "GPT": GPT(n, CONTEXT, width=WIDTH, layers=LAYERS, heads=HEADS),
        "Llama": Llama(n, width=WIDTH, layers=LAYERS, heads=HEADS, kv_heads=2),
    }
    tasks = [parted(numbers_of(text)) for text in texts]
    return Kind(name, made[name], 3e-3, windows(numbers_of(known[: len(known) // 2]), CONTEXT), tuple(tasks))


def numbers_of(text: str) -> Tensor:
    """Return a text as indices of symbols."""
    place = {symbol: k for k, symbol in enumerate(SYMBOLS)}
    return torch.tensor([place[symbol] for symbol in text if symbol in place])


def parted(numbers: Tensor) -> tuple[Examples, Examples]:
    """Return a text for training, and windows from its last tenth for tests."""
    cut = len(numbers) * 9 // 10
    inputs, targets = windows(numbers[cut:], CONTEXT)
    rows = torch.linspace(0, len(inputs) - 1, JUDGED).long()
    return windows(numbers[:cut], CONTEXT), (inputs[rows], targets[rows])


@dataclass(frozen=True)
class Family:
    """A base, its fine-tunes and strangers, which are trained once and stored in a folder."""

    kind: Kind
    seed: int
    folder: Path

    @property
    def count(self) -> int:
        """The number of networks that are merged."""
        return COUNTS[self.seed % len(COUNTS)]

    def base(self) -> Params:
        """The base."""
        kind, seed = self.kind, 100 * self.seed
        return self._kept("base", lambda: list(kind.train(kind.initialize(seed), kind.base, seed, [STEPS], falling)))[0]

    def ends(self, amount: float | str) -> list[Params]:
        """The networks that are merged."""
        return [self._tuned(task, amount) for task in range(self.count)]

    def _tuned(self, task: int, amount: float | str) -> Params:
        kind, seed = self.kind, 100 * self.seed + 1 + task
        data = kind.tasks[task][0]
        if amount == STRANGERS:
            start = kind.initialize(seed + 50)
            return self._kept(f"stranger {task}", lambda: list(kind.train(start, data, seed, [STEPS], falling)))[0]
        steps = [max(1, round(one * STEPS)) for one in AMOUNTS]
        made = self._kept(f"tuned {task}", lambda: list(kind.train(self.base(), data, seed, steps, lambda _: 1.0)))
        return made[AMOUNTS.index(float(amount))]

    def _kept(self, name: str, make: Callable[[], list[Params]]) -> list[Params]:
        """Return networks, made now or by an earlier run."""
        path = self.folder / f"{self.kind.name} {self.seed} {name}.safetensors"
        if not path.exists():
            flat = {f"{k}/{n}": t.contiguous() for k, one in enumerate(make()) for n, t in one.items()}
            save_file(flat, partial := path.with_suffix(".partial"))
            partial.rename(path)
        flat = load_file(path)
        count = 1 + max(int(name.partition("/")[0]) for name in flat)
        return [{n.partition("/")[2]: t for n, t in flat.items() if n.startswith(f"{k}/")} for k in range(count)]


def falling(step: int) -> float:
    """Return the learning rate of a whole training, as a share of its largest value."""
    return 1 - (step - 1) / STEPS


def describe(ends: Sequence[Params], found: Result[Any]) -> dict[str, Any]:
    """Return the numbers of an alignment to the first network, as means over all other networks."""
    rows = []
    for k in range(1, len(ends)):
        need = Need.of(found.symmetry, found.element.item(k), ends[0], ends[k], found.params[k])
        rows.append(
            {"before": need.before, "after": need.after, "worst": need.worst, "moved": need.moved / need.units}
            | {"stored mean": need.stored or 0.0, "aligned mean": need.aligned or 0.0}
            | {"rotated": float(any("rotated" in note for note in found.notes))}
        )
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def examine(family: Family, amount: float | str) -> Iterator[dict[str, Any]]:
    """Evaluate all rules, with and without alignment, and the trivial controls."""
    kind, base, ends, count = family.kind, family.base(), family.ends(amount), family.count
    head = {"kind": kind.name, "seed": family.seed, "networks": count, "amount": amount}
    every = [kind.judge(end, count) for end in ends]
    own = [every[k][k] for k in range(count)]
    for name, losses in (("base", kind.judge(base, count)), ("own task", own)):
        yield head | {"rule": name, "aligned": False, "losses": losses}
    yield head | {"rule": "one of them", "aligned": False, "losses": [sum(one) / count for one in every]}
    known: dict[tuple[int, bool], Result[Any]] = {}
    for name, rule in RULES.items():
        used, has_base = ends[: rule.most], rule.base == "needed"
        given = [base, *used] if has_base else used
        key = len(used), has_base
        if key not in known:
            method: Method = rg.WeightMatching() if has_base else MergeMany()
            wide = [{n: t.double() for n, t in one.items()} for one in given]
            known[key] = align_many(wide, kind.symmetry, method=method)
        found = known[key]
        for is_aligned in (False, True):
            networks = found.params[has_base:] if is_aligned else used
            blend = Blend(rule, found.symmetry, tuple(networks), base if has_base else None, seed=family.seed)
            merged = {n: t.float() for n, t in blend.params.items()}
            row = head | {"rule": name, "aligned": is_aligned, "losses": kind.judge(merged, len(used))}
            yield row | (describe(given, found) if is_aligned else {})


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a record."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def need_of(row: dict[str, Any]) -> Need:
    """Return the change by alignment, given the numbers of a row."""
    return Need(
        moved=0, units=1, worst=row["worst"], before=row["before"], after=row["after"], stored=row["stored mean"],
        aligned=row["aligned mean"], is_carried=False,
    )  # fmt: skip


def loss_of(row: dict[str, Any]) -> float:
    """Return the mean loss over tasks."""
    return sum(row["losses"]) / len(row["losses"])


def spread(values: Sequence[float]) -> str:
    """Return a mean and its standard error."""
    data = torch.tensor(values, dtype=torch.float64)
    return f"{float(data.mean()):+.3f} ± {float(data.std() / len(data) ** 0.5):.3f}"


def text_of(amount: float | str) -> str:
    """Return an amount of fine-tuning as text."""
    return amount if isinstance(amount, str) else f"{amount:.0%}"


def changes(rows: list[dict[str, Any]]) -> dict[tuple[str, int, float | str, str], float]:
    """Return the changes of the loss by alignment, by kind, seed, amount and rule."""
    known = {(*(row[key] for key in ("kind", "seed", "amount", "rule")), row["aligned"]): loss_of(row) for row in rows}
    return {key[:4]: loss - known[(*key[:4], False)] for key, loss in known.items() if key[4]}


def change_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the change of the loss by alignment, over all families."""
    lines = [f"| tuning | n | {' | '.join(RULES)} |", "| --- " * (len(RULES) + 2) + "|"]
    found = changes(rows)
    for amount in (*AMOUNTS, STRANGERS):
        cells = [[x for key, x in found.items() if key[2:] == (amount, name)] for name in RULES]
        lines.append(f"| {text_of(amount)} | {len(cells[0])} | {' | '.join(map(spread, cells))} |")
    return lines


def loss_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the losses as stored, with the change by alignment, for each kind."""
    heads = ("kind", "tuning", "n", "base", "one of them", "own task", *RULES)
    lines, found = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"], changes(rows)
    for kind in KINDS:
        for amount in (*AMOUNTS, STRANGERS):
            own = [row for row in rows if (row["kind"], row["amount"], row["aligned"]) == (kind, amount, False)]
            cells = [kind, text_of(amount), str(len({row["seed"] for row in own}))]
            for name in heads[3:]:
                losses = [loss_of(row) for row in own if row["rule"] == name]
                moved = [x for key, x in found.items() if (key[0], *key[2:]) == (kind, amount, name)]
                cells.append(f"{sum(losses) / len(losses):.2f}" + (f" {sum(moved) / len(moved):+.3f}" if moved else ""))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def rule_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the evidence of `Need` on even and odd seeds: its range, and the decision of the rule."""
    heads = ("seeds", "networks", "merges", "units moved", "distance", "explained", "aligning is needed")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for half, rest in (("even", 0), ("odd", 1)):
        for what, is_strange in (("fine-tunes", False), ("strangers", True)):
            own = [
                row
                for row in rows
                if row["aligned"] and row["seed"] % 2 == rest and (row["amount"] == STRANGERS) == is_strange
            ]
            ratios = [
                [row["worst"] for row in own],
                [row["after"] / row["before"] for row in own],
                [row["stored mean"] / row["aligned mean"] for row in own],
            ]
            spans = [f"{min(one):.3f} to {max(one):.3f}" for one in ratios]
            needed = sum(need_of(row).is_there for row in own)
            lines.append(f"| {half} | {what} | {len(own)} | {' | '.join(spans)} | {needed} of {len(own)} |")
    return lines


def outcome_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the effect of alignment on odd seeds, by the decision of the rule about the merge."""
    heads = ("the rule says", "merges", "lower loss", "change", "largest rise", "largest fall")
    lines, found = [f"| rule | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"], changes(rows)
    for name in RULES:
        for says, is_there in (("changes nothing", False), ("helps", True)):
            own = [
                found[row["kind"], row["seed"], row["amount"], name]
                for row in rows
                if row["rule"] == name and row["aligned"] and row["seed"] % 2 and need_of(row).is_there is is_there
            ]
            cells = (name, says, str(len(own)), f"{sum(x < 0 for x in own)} of {len(own)}", spread(own))
            lines.append(f"| {' | '.join(cells)} | {max(own):+.3f} | {min(own):+.3f} |")
    return lines


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return the tables of docs/measurements/aligned_merges.md, line by line."""
    tables = [change_table(rows), rule_table(rows), outcome_table(rows), loss_table(rows)]
    return [line for table in tables for line in (*table, "")][:-1]


def main() -> None:
    """Evaluate all missing merges, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table is not None:
        print("\n".join(lines_of(read(options.table))))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "aligned-merges.jsonl"
    done = {(row["kind"], row["seed"], row["amount"]) for row in read(file)}
    for seed in options.seeds:
        for name in options.kinds:
            family = Family(kind_of(name), seed, options.folder)
            for amount in (*AMOUNTS, STRANGERS):
                if (name, seed, amount) not in done:
                    lines = [json.dumps(rounded(row)) + "\n" for row in examine(family, amount)]
                    with file.open("a") as out:
                        out.write("".join(lines))
    print("\n".join(lines_of(read(file))))


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with numbers rounded to five digits."""
    return {
        key: [float(f"{x:.5g}") for x in value]
        if isinstance(value, list)
        else float(f"{value:.5g}")
        if isinstance(value, float)
        else value
        for key, value in row.items()
    }


if __name__ == "__main__":
    main()
