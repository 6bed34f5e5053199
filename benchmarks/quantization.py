"""Losses of networks rounded to the nearest level, in several gauges, as Markdown tables.

    REGAUGE_DATA=... .venv/bin/python benchmarks/quantization.py --records FILE [GPT | ViT | encoder | Llama ...]
    REGAUGE_DATA=... .venv/bin/python benchmarks/quantization.py depthwise

The benchmark trains networks from several seeds: language models on characters of Python's help topics, an encoder with
normalization after its blocks that restores hidden characters, a vision transformer on Fashion-MNIST, and a network of
depthwise convolutions with batch normalization on MNIST. The batch normalization is folded into the convolutions, as in
runtimes. Methods choose the gauge on training data. The tables show the increase of the loss on test data and the
divergence of the outputs from the outputs without rounding, or the accuracy. Numbers are means over seeds and, for
three or more seeds, standard errors. Every value is appended to FILE as a line of JSON, and an interrupted run
continues. docs/records/quantization.jsonl contains the values of docs/measurements/gauges.md.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

import regauge as rg
from regauge.core.params import Params
from regauge.data.images import fashion_mnist, mnist
from regauge.data.packaged import help_topics, windows
from regauge.gauging import GaugeMethod, RoundToNearest, round_network, rounded_activations
from regauge.nets.transformer import GPT, Llama, ViT

SEEDS = 3
CONTEXT, WIDTH, STEPS, BATCH = 64, 64, 400, 32
BATCHES = 8
"""The number of batches of training data for methods with data, except for `by="function"`."""
LEARNED_STEPS = 400
"""The number of steps of `LearnedRotation(by="function")`."""
SMALL_BATCH = 8
"""The number of sequences of text in a batch of the descent by function. For images, the number is four times as
large."""
SMALL_BATCHES = 128
"""The number of batches of the descent by function, of which a quarter is held out."""
Rounding = tuple[RoundToNearest, RoundToNearest | None]
LOSSES: dict[str, Rounding] = {
    "4 bits per row": (RoundToNearest(4), None),
    "3 bits per row": (RoundToNearest(3), None),
    "4 bits per 32": (RoundToNearest(4, 32), None),
    "3 bits per 32": (RoundToNearest(3, 32), None),
    "4 bits, 4-bit activations": (RoundToNearest(4), RoundToNearest(4)),
}
METHODS = ("as trained", "equalized", "smoothed", "Hadamard", "learned", "learned by function")
IMAGES: dict[str, Rounding] = {
    "8 bits per tensor, both": (RoundToNearest(8, is_per_tensor=True), RoundToNearest(8, is_per_tensor=True)),
    "6 bits per tensor, both": (RoundToNearest(6, is_per_tensor=True), RoundToNearest(6, is_per_tensor=True)),
    "4 bits per tensor, weights": (RoundToNearest(4, is_per_tensor=True), None),
    "4 bits per row, weights": (RoundToNearest(4), None),
}


class Depthwise(nn.Module):
    """A network of alternating depthwise convolutions and 1 x 1 convolutions, each with batch normalization and
    ReLU.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_layer(1, 16, 3, 2, 1))
        for before, after, stride in ((16, 32, 1), (32, 64, 2), (64, 64, 1)):
            self.layers.extend(_layer(before, before, 3, stride, before))
            self.layers.extend(_layer(before, after, 1, 1, 1))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x.mean((-2, -1)))
        return result

    def fused(self) -> "Depthwise":
        """Return the network without normalization, which is folded into the convolutions."""
        result: list[nn.Module] = []
        for layer in self.layers:
            if isinstance(layer, nn.BatchNorm2d):
                convolution = result[-1]
                assert isinstance(convolution, nn.Conv2d)
                result[-1] = fuse_conv_bn_eval(convolution, layer)
            else:
                result.append(layer)
        self.layers = nn.ModuleList(result)
        return self


def _layer(before: int, after: int, kernel: int, stride: int, groups: int) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(after), nn.ReLU()]


class Encoder(nn.Module):
    """PyTorch's encoder with its defaults (normalization after each block, ReLU), from tokens to logits of each
    token.
    """

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols + 1, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


@dataclass(frozen=True)
class Family:
    """A network that the benchmark trains, and its data: inputs and targets."""

    make: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    steps: int = STEPS
    batch: int = SMALL_BATCH


def text_family(name: str) -> Family:
    """Return a network that reads characters."""
    text = help_topics()
    symbols = len(text.symbols)
    train, validation = windows(text.train, CONTEXT), windows(text.validation, CONTEXT)
    test = (validation[0][:256], validation[1][:256])
    makes: dict[str, Callable[[], nn.Module]] = {
        "Llama": lambda: Llama(symbols, width=WIDTH, layers=2, heads=4),
        "GPT": lambda: GPT(symbols, CONTEXT, width=WIDTH, layers=2, heads=4),
        "encoder": lambda: Encoder(symbols),
    }
    if name == "encoder":
        return Family(makes[name], hidden(train[0], symbols), hidden(test[0], symbols))
    return Family(makes[name], train, test)


def hidden(tokens: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Return a text with a quarter of its characters hidden, and the whole text."""
    chosen = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.25
    return torch.where(chosen, mask, tokens), tokens


def vision_family() -> Family:
    """Return a vision transformer."""
    data = fashion_mnist()
    train, test = (data.train_images, data.train_labels), (data.test_images[:2000], data.test_labels[:2000])
    return Family(lambda: ViT(width=WIDTH, layers=2, heads=4), train, test, 2 * STEPS, 4 * SMALL_BATCH)


FAMILIES: dict[str, Callable[[], Family]] = {
    "GPT": lambda: text_family("GPT"),
    "ViT": vision_family,
    "encoder": lambda: text_family("encoder"),
    "Llama": lambda: text_family("Llama"),
}


def methods_for(weights: RoundToNearest) -> dict[str, GaugeMethod | None]:
    """Return the methods that are compared for one rounding scheme; None leaves the network as trained."""
    methods = (
        None,
        rg.Equalize(),
        rg.gauging.Smooth(weights),
        rg.Hadamard(weights, is_kept_always=True),
        rg.gauging.LearnedRotation(weights),
        rg.gauging.LearnedRotation(weights, steps=LEARNED_STEPS, by="function"),
    )
    return dict(zip(METHODS, methods, strict=True))


def measure(name: str, seed: int, roundings: Sequence[str], methods: Sequence[str], file: Path) -> None:
    """Write the missing values of one network: the increase of the loss and the divergence, by method and rounding
    scheme.
    """
    done = {(row["family"], row["seed"], row["rounding"], row["method"]) for row in read(file)}
    missing = [(one, how) for one in roundings for how in methods if (name, seed, one, how) not in done]
    if not missing:
        return
    family = FAMILIES[name]()
    train, test = family.train, family.test
    module = fit(family.make, train, seed, lr=3e-3, steps=family.steps)
    task = rg.Task(module, [test])
    params = {key: tensor.detach() for key, tensor in module.state_dict().items()}
    symmetry = rg.discover(module, (train[0][:2],))
    order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(seed))
    few, many = (
        rg.Task(module, [(train[0][some], train[1][some]) for some in order[: size * count].split(size)])
        for size, count in ((BATCH, BATCHES), (family.batch, SMALL_BATCHES))
    )
    loss = task.evaluate(params)["loss"]
    with torch.no_grad():
        exact = task.run(params, test[0]).log_softmax(-1)
    for label, how in missing:
        weights, acts = LOSSES[label]
        began = time.process_time()
        moved = choose(params, symmetry, methods_for(weights)[how], many if "function" in how else few, seed)
        seconds = time.process_time() - began
        with rounded_activations(acts), torch.no_grad():
            made = task.run(round_network(moved, symmetry, weights), test[0]).log_softmax(-1)
        rise = float(functional.nll_loss(made.flatten(0, -2), test[1].flatten())) - loss
        away = float(functional.kl_div(made, exact, log_target=True, reduction="none").sum(-1).mean())
        row = {"family": name, "seed": seed, "rounding": label, "method": how, "loss": loss, "rise": rise}
        row |= {"divergence": away, "seconds": seconds}
        digits = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
        with file.open("a", encoding="utf-8") as out:
            print(json.dumps(digits), file=out, flush=True)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows that an earlier run wrote."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Return the tables of docs/measurements/gauges.md, line by line: thousandths of a nat, by network and rounding
    scheme.
    """
    methods = [how for how in METHODS if any(row["method"] == how for row in rows)]
    lines = []
    for key, title in (("divergence", "divergence of the outputs"), ("rise", "rise of the loss")):
        head = ["", f"{title}, nats / 1000", *methods, "removed", ""]
        lines += ["", " | ".join(head).strip(), f"|{' --- |' * (len(head) - 2)}"]
        for name, label in dict.fromkeys((row["family"], row["rounding"]) for row in rows):
            own = [row for row in rows if (row["family"], row["rounding"]) == (name, label)]
            found = {how: [1000 * row[key] for row in own if row["method"] == how] for how in methods}
            cells = [spread(values, 1) if values else "" for values in found.values()]
            lines.append(f"| {name}, {label} | {' | '.join(cells)} | {removed(found)} |")
    return lines[1:]


def removed(found: dict[str, list[float]]) -> str:
    """Return the share of the mean increase, as trained, that learning by function removes."""
    before, after = (found.get(how, []) for how in (METHODS[0], METHODS[-1]))
    return f"{1 - statistics.mean(after) / statistics.mean(before):.0%}" if before and after else ""


def image_table(seeds: int) -> None:
    """Return the accuracies of networks of depthwise convolutions."""
    data = mnist()
    train = (data.train_images[:20_000], data.train_labels[:20_000])
    test = [(data.test_images[:2000], data.test_labels[:2000])]
    rows: dict[str, dict[str, list[float]]] = {}
    exact = []
    for seed in range(seeds):
        fitted = fit(Depthwise, train, seed, lr=3e-3)
        assert isinstance(fitted, Depthwise)
        module = fitted.eval().fused()
        task = rg.Task(module, test)
        params = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        symmetry = rg.discover(module, (train[0][:2],))
        calibration = rg.Task(module, [(train[0][:64], train[1][:64])])
        exact.append(task.evaluate(params)["accuracy"])
        for label, (weights, acts) in IMAGES.items():
            smooth = rg.gauging.Smooth(weights, activations=acts)
            chained = rg.gauging.Chain((rg.Equalize(), smooth))
            for name, method in {"as trained": None, "equalized": rg.Equalize(), "both": chained}.items():
                moved = choose(params, symmetry, method, calibration, seed)
                found = rounded_loss(moved, symmetry, weights, acts, task)["accuracy"]
                rows.setdefault({"both": "equalized, smoothed"}.get(name, name), {}).setdefault(label, []).append(found)
        print(f"seed {seed} done", file=sys.stderr, flush=True)
    show(f"depthwise convolutions on MNIST; accuracy {spread(exact, 4)}", rows, list(IMAGES), 4)


def fit(
    make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], seed: int, *, lr: float, steps: int = STEPS
) -> nn.Module:
    """Return a network trained from a seed."""
    torch.manual_seed(seed)
    module, generator = make(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(len(data[0]), (BATCH,), generator=generator)
        output = module(data[0][chosen])
        loss = functional.cross_entropy(output.flatten(0, -2), data[1][chosen].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return module.eval()


def choose(params: Params, symmetry: rg.Symmetry, method: GaugeMethod | None, task: rg.Task, seed: int) -> Params:
    """Return the network in the gauge of a method."""
    if method is None:
        return params
    generator = torch.Generator().manual_seed(seed)
    result = rg.gauge(params, symmetry, method=method, task=task, generator=generator)
    assert result.certificate is not None
    assert result.certificate.ok, result.certificate
    return result.params


def rounded_loss(
    params: Params, symmetry: rg.Symmetry, weights: RoundToNearest, acts: RoundToNearest | None, task: rg.Task
) -> dict[str, float]:
    """Return the metrics of the rounded network."""
    with rounded_activations(acts):
        return task.evaluate(round_network(params, symmetry, weights))


def spread(values: list[float], digits: int) -> str:
    """Return the mean and its standard error, or all values if there are fewer than three."""
    if len(values) < 3:
        return ", ".join(f"{value:.{digits}f}" for value in values)
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def show(title: str, rows: dict[str, dict[str, list[float]]], labels: list[str], digits: int) -> None:
    """Print a table."""
    print(f"\n| {title} | {' | '.join(labels)} |\n| --- |{' --- |' * len(labels)}")
    for name, row in rows.items():
        cells = [spread(row[label], digits) if label in row else "" for label in labels]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure the requested values that are missing, and print the tables."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, "depthwise", []], default=[])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--records", type=Path, default=Path("quantization.jsonl"))
    parser.add_argument("--roundings", nargs="+", choices=list(LOSSES), default=list(LOSSES)[:2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    given = parser.parse_args()
    if "depthwise" in given.families:
        image_table(given.seeds)
    for name in given.families or FAMILIES:
        for seed in range(given.seeds if name in FAMILIES else 0):
            measure(name, seed, given.roundings, given.methods, given.records)
    print("\n".join(tables(read(given.records))))


if __name__ == "__main__":
    main()
