"""Losses of networks rounded to the nearest level, in several gauges, as Markdown tables.

    REGAUGE_DATA=... .venv/bin/python benchmarks/quantization.py [--seeds 2] [Llama | GPT | ViT | depthwise ...]

Trained here, from several seeds: language models on characters of Python's help topics, a vision transformer on
Fashion-MNIST, and a network of depthwise convolutions with batch normalization on MNIST, which is then folded into the
convolutions, as runtimes do it. Shown are the rise of the loss on test data, in nats, or the accuracy: the mean over
seeds and its standard error.
"""

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable

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
BATCHES = 4
"""Number of batches of training data that methods read."""
Rounding = tuple[RoundToNearest, RoundToNearest | None]
LOSSES: dict[str, Rounding] = {
    "4 bits per row": (RoundToNearest(4), None),
    "3 bits per row": (RoundToNearest(3), None),
    "4 bits per 32": (RoundToNearest(4, 32), None),
    "8 bits, 8-bit activations": (RoundToNearest(8), RoundToNearest(8)),
}
IMAGES: dict[str, Rounding] = {
    "8 bits per tensor, both": (RoundToNearest(8, is_per_tensor=True), RoundToNearest(8, is_per_tensor=True)),
    "6 bits per tensor, both": (RoundToNearest(6, is_per_tensor=True), RoundToNearest(6, is_per_tensor=True)),
    "4 bits per tensor, weights": (RoundToNearest(4, is_per_tensor=True), None),
    "4 bits per row, weights": (RoundToNearest(4), None),
}


class Depthwise(nn.Module):
    """Depthwise convolutions and 1 x 1 convolutions in turn, each with batch normalization and ReLU."""

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
        """Without normalization, which goes into the convolutions."""
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


def main(names: list[str], seeds: int) -> None:
    warnings.simplefilter("ignore")
    families: dict[str, Callable[[int], None]] = {
        "Llama": lambda seeds: text_table("Llama", seeds),
        "GPT": lambda seeds: text_table("GPT", seeds),
        "ViT": vision_table,
        "depthwise": image_table,
    }
    for name in names or families:
        families[name](seeds)


def text_table(family: str, seeds: int) -> None:
    """The rise of the loss of language models."""
    text = help_topics()
    train, validation = windows(text.train, CONTEXT), windows(text.validation, CONTEXT)

    def make() -> nn.Module:
        if family == "Llama":
            return Llama(len(text.symbols), width=WIDTH, layers=2, heads=4)
        return GPT(len(text.symbols), CONTEXT, width=WIDTH, layers=2, heads=4)

    title = f"{family}, width {WIDTH}, 2 layers, {STEPS} steps"
    loss_table(title, make, train, (validation[0][:256], validation[1][:256]), seeds)


def vision_table(seeds: int) -> None:
    """The rise of the loss of vision transformers."""
    data = fashion_mnist()
    test = (data.test_images[:2000], data.test_labels[:2000])
    loss_table(
        f"ViT, width {WIDTH}, 2 layers, {2 * STEPS} steps on Fashion-MNIST",
        lambda: ViT(width=WIDTH, layers=2, heads=4),
        (data.train_images, data.train_labels),
        test,
        seeds,
        steps=2 * STEPS,
    )


def methods_for(weights: RoundToNearest) -> dict[str, GaugeMethod | None]:
    """The methods that are compared at one rounding; None leaves the network as trained."""
    return {
        "as trained": None,
        "equalized": rg.Equalize(),
        "smoothed": rg.Smooth(weights),
        "Hadamard": rg.Hadamard(weights, is_kept_always=True),
        "learned on weights": rg.LearnedRotation(weights),
        "learned on outputs": rg.LearnedRotation(weights, lr=0.02, by="outputs"),
    }


def loss_table(
    title: str,
    make: Callable[[], nn.Module],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    seeds: int,
    *,
    steps: int = STEPS,
) -> None:
    """The rise of the loss on test data, by method and rounding."""
    rows: dict[str, dict[str, list[float]]] = {}
    far: dict[str, dict[str, list[float]]] = {}
    losses = []
    for seed in range(seeds):
        module = fit(make, train, seed, lr=3e-3, steps=steps)
        task = rg.Task(module, [test])
        params = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        symmetry = rg.discover(module, (train[0][:2],))
        chosen = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(seed))[: BATCH * BATCHES]
        calibration = rg.Task(module, [(train[0][some], train[1][some]) for some in chosen.split(BATCH)])
        losses.append(task.evaluate(params)["loss"])
        with torch.no_grad():
            exact = task.run(params, test[0]).log_softmax(-1)
        for label, (weights, acts) in LOSSES.items():
            for name, method in methods_for(weights).items():
                if weights.bits == 8 and isinstance(method, rg.LearnedRotation):
                    continue  # Hardly anything is lost there.
                moved = choose(params, symmetry, method, calibration, seed)
                with rounded_activations(acts), torch.no_grad():
                    made = task.run(round_network(moved, symmetry, weights), test[0]).log_softmax(-1)
                rise = float(functional.nll_loss(made.flatten(0, -2), test[1].flatten())) - losses[-1]
                away = float(functional.kl_div(made, exact, log_target=True, reduction="none").sum(-1).mean())
                rows.setdefault(name, {}).setdefault(label, []).append(rise)
                far.setdefault(name, {}).setdefault(label, []).append(away)
                print(f"{title}, {seed}, {name}, {label}: {rise:.5f}, {away:.5f}", file=sys.stderr, flush=True)
    show(f"{title}; loss {spread(losses, 3)} nats, rises by", rows, list(LOSSES), 4)
    show("divergence of the outputs from those not rounded, nats", far, list(LOSSES), 4)


def image_table(seeds: int) -> None:
    """The accuracy of networks of depthwise convolutions."""
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
            smooth = rg.Smooth(weights, activations=acts)
            chained = rg.Chain((rg.Equalize(), smooth))
            for name, method in {"as trained": None, "equalized": rg.Equalize(), "both": chained}.items():
                moved = choose(params, symmetry, method, calibration, seed)
                found = rounded_loss(moved, symmetry, weights, acts, task)["accuracy"]
                rows.setdefault({"both": "equalized, smoothed"}.get(name, name), {}).setdefault(label, []).append(found)
        print(f"seed {seed} done", file=sys.stderr, flush=True)
    show(f"depthwise convolutions on MNIST; accuracy {spread(exact, 4)}", rows, list(IMAGES), 4)


def fit(
    make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], seed: int, *, lr: float, steps: int = STEPS
) -> nn.Module:
    """A network trained from a seed."""
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
    """The network in the gauge of a method."""
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
    """The metrics of the rounded network."""
    with rounded_activations(acts):
        return task.evaluate(round_network(params, symmetry, weights))


def spread(values: list[float], digits: int) -> str:
    """The mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def show(title: str, rows: dict[str, dict[str, list[float]]], labels: list[str], digits: int) -> None:
    """Print a table."""
    print(f"\n| {title} | {' | '.join(labels)} |\n| --- |{' --- |' * len(labels)}")
    for name, row in rows.items():
        cells = [spread(row[label], digits) if label in row else "" for label in labels]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    main(given.families, given.seeds)
