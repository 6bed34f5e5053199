"""Fitting of one INR to a signal, or of one INR to each of many signals."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from regauge.checkpoints.formats.state_dicts import match
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.params import Params
from regauge.core.products import add_matmul, scaled_matmul
from regauge.core.progress import Progress, no_progress
from regauge.inr.fields.signal_samples import Samples, image_samples
from regauge.inr.fit_config import FitConfig, LossName
from regauge.inr.rendering.field_values import evaluate
from regauge.inr.representation import Inr, blank
from regauge.nets.siren import Bias
from regauge.training import Adam, minimize
from regauge.training.chains.chain_steps import ACTIVATIONS
from regauge.training.descent import Minimum, OnStep, State
from regauge.training.threads import one_thread
from regauge.zoo import Examples, PopulationConfig, train

BLOCK_VALUES = 1 << 19
"""The number of entries of one layer's activations in a block: 2 MB."""
LEAST = 64
"""The smallest number of rows in a block."""


@dataclass(frozen=True)
class Focal:
    """The focal loss: cross entropy with less weight on correct predictions, `-w (1 - p)^gamma log p`.

    Here p is the probability of the true class. Labels are zero or one. The weight w is alpha if the label is one, and
    1 - alpha if the label is zero. If gamma = 0 and alpha = 1/2, the loss is half the cross entropy. A larger gamma
    reduces the weight of correct predictions.

    References:
        Lin et al. (2017), equation 5; De Luigi et al. (2023), whose program gives empty cells the weight 0.1.
    """

    alpha: float = 0.9
    gamma: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1 or not self.gamma >= 0:
            raise ValueError(f"a focal loss needs alpha between 0 and 1 and gamma >= 0, not {self}")

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        entropies = binary_cross_entropy_with_logits(outputs, labels, reduction="none")
        weights = self.alpha * labels + (1 - self.alpha) * (1 - labels)
        wrong = torch.sigmoid(outputs * (1 - 2 * labels))
        return weights * wrong**self.gamma * entropies


def bce(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy between labels in [0, 1] and logits, at every point."""
    return binary_cross_entropy_with_logits(outputs, labels, reduction="none")


def mse(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the squared errors at every point."""
    return mse_loss(outputs, labels, reduction="none")


LOSSES: dict[LossName, Callable[[Tensor, Tensor], Tensor]] = {"bce": bce, "mse": mse, "focal": Focal()}
"""Entrywise losses of outputs and labels `[n, out]`."""
OWN_LOSSES: dict[str, LossName] = {"image": "mse", "occupancy": "focal"}
"""The default loss for each signal that is not a distance. For distances, the default is "bce"."""


def loss_for(config: FitConfig, inr: Inr) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a network, as a function from outputs and labels `[n, out]` to losses of the same shape."""
    return LOSSES[config.loss or OWN_LOSSES.get(inr.signal, "bce")]


@check_arguments
def fit(
    inr: Inr,
    samples: Samples,
    config: FitConfig | None = None,
    *,
    start: Mapping[str, Tensor],
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    on_step: OnStep | None = None,
) -> Minimum:
    """Fit a network to samples of a signal, by minimizing a loss.

    Args:
        start: Initial parameters, which are not changed. The result has their dtype.
        generator: The random generator for the samples of each step. Default: a generator with seed 0.
        on_step: A function that is called after each step with the step number, loss and rate, as a
            `regauge.training.State`.

    Raises:
        ValueError: The samples or the initial parameters do not fit the network, or a loss is NaN or Inf.
    """
    generator = given_or_seed(generator)
    config = config or FitConfig()
    if (samples.points.shape[1], samples.labels.shape[1]) != (inr.in_features, inr.out_features):
        raise ValueError(
            f"the samples go from {samples.points.shape[1]} coordinates to {samples.labels.shape[1]} values, but the "
            f"network from {inr.in_features} to {inr.out_features}; give a network with the sizes of the samples"
        )
    start = match(start, blank(inr), "the start", "the network")
    like = next(iter(start.values()))
    samples = samples.to(like.dtype)
    points, labels = samples.points, samples.labels

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while config.batch is None or config.batch >= len(samples):
            yield points, labels
        while True:
            index = torch.randint(len(samples), (config.batch,), generator=generator)
            yield points.index_select(0, index), labels.index_select(0, index)

    return minimize(
        Gradient(inr, like, loss_for(config, inr)),
        start,
        batches(),
        config,
        examples=len(samples),
        progress=progress,
        label="fitting",
        on_step=on_step,
    )


def mean_loss(inr: Inr, params: Mapping[str, Tensor], samples: Samples, config: FitConfig | None = None) -> float:
    """Return the mean loss of a network on samples; for distance labels, `entropy_floor` is its lower bound."""
    losses = loss_for(config or FitConfig(), inr)(
        evaluate(inr, params, samples.points), samples.labels.to(next(iter(params.values())))
    )
    return losses.double().mean().item()


class Gradient:
    """A function `f(params, (points, labels))` to the mean loss and its gradients, at the cost of matrix products.

    A batch is processed in blocks of rows. Each block is processed forward and then immediately backward, so the block
    stays in the cache. Sines and cosines are computed once, in place, and no array of the batch's size is written. Up
    to rounding, the gradients equal the gradients of automatic differentiation. They are in the order of the
    parameters. The next call overwrites the memory of the gradients. The parameters have the dtype and device of
    `like`. `loss` maps outputs and labels `[n, out]` to losses of the same shape.
    """

    def __init__(self, inr: Inr, like: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.scale = 1.0 if inr.omega is None else inr.omega
        self.activation = ACTIVATIONS["sin" if inr.kind == "siren" else "relu"]
        self.loss = loss
        self.layers = range(len(inr.widths) - 1)
        self.rows = max(LEAST, BLOCK_VALUES // inr.width)
        self.values = like.new_empty(inr.depth, self.rows, inr.width)
        self.slopes = None if inr.kind == "relu" else torch.empty_like(self.values)
        self.deltas = like.new_empty(2, self.rows, inr.width)
        self.ones = like.new_ones(self.rows)
        self.gradients: Params = {}

    @torch.no_grad()
    def __call__(self, params: Params, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
        points, labels = batch
        self.weights, self.biases = ([params[f"layers.{k}.{name}"] for k in self.layers] for name in ("weight", "bias"))
        self.gradients = self.gradients or {name: torch.empty_like(tensor) for name, tensor in params.items()}
        for tensor in self.gradients.values():
            tensor.zero_()
        total = points.new_zeros(())
        for first in range(0, len(points), self.rows):
            rows = slice(first, first + self.rows)
            total += self._block(points[rows], labels[rows], labels.numel())
        return total, [self.gradients[name] for name in params]

    def _block(self, points: Tensor, labels: Tensor, total: int) -> Tensor:
        count = len(points)
        inputs = [points]
        for k in range(len(self.values)):
            weight, bias, buffer = self.weights[k], self.biases[k], self.values[k, :count]
            value = scaled_matmul(inputs[-1], weight.t(), shift=bias, factor=self.scale, buffer=buffer)
            self.activation.forward(value, self._slope(k, count))
            inputs.append(value)
        outputs = torch.addmm(self.biases[-1], inputs[-1], self.weights[-1].t())
        with torch.enable_grad():
            outputs.requires_grad_()
            loss = self.loss(outputs, labels).sum() / total
        (delta,) = torch.autograd.grad(loss, outputs)
        self._add(len(self.weights) - 1, delta, inputs[-1], 1.0)
        factor = 1.0  # of the layer above: the last one has no frequency
        for k in reversed(range(len(self.values))):
            below = scaled_matmul(delta, self.weights[k + 1], factor=factor, buffer=self.deltas[k % 2, :count])
            factor = self.scale
            delta = self.activation.backward(below, inputs[k + 1], self._slope(k, count))
            self._add(k, delta, inputs[k], factor)
        return loss.detach()

    def _add(self, k: int, delta: Tensor, inputs: Tensor, factor: float) -> None:
        """Add the contribution of a block to the gradient of layer k."""
        weight, bias = self.gradients[f"layers.{k}.weight"], self.gradients[f"layers.{k}.bias"]
        add_matmul(weight, delta.t(), inputs, factor=factor)
        bias.addmv_(delta.t(), self.ones[: len(delta)], alpha=factor)

    def _slope(self, k: int, count: int) -> Tensor | None:
        return None if self.slopes is None else self.slopes[k, :count]


IMAGES = FitConfig(steps=1000, batch=None, optimizer=Adam(5e-4))
"""The settings for the fits in `mnist-inrs`."""


def image_inr(height: int, width: int, channels: int = 1, *, units: int = 32, depth: int = 2) -> Inr:
    """Return a SIREN of the usual size for populations of images, 2-32-32-1 by default."""
    return Inr("siren", 2, channels, units, depth, "image", pixels=(height, width))


def fit_images(
    images: Tensor, inr: Inr | None = None, config: FitConfig = IMAGES, *, bias: Bias = "torch", seed: int = 0
) -> Params:
    """Fit one INR to every image, many INRs at once. One core fits hundreds of INRs per minute.

    Every network has a separate initialization (`Inr.start`), which depends only on the seed and the index of the
    network. If the networks do not fit in memory, or if you want to use several processes or machines, train a
    population instead (`regauge zoo train`).

    Args:
        images: Images with entries in [0, 1], `[images, channels, height, width]`.
        inr: The architecture of each network. Default: `image_inr` for the size of the images.
        config: The settings: steps, batch, optimizer and schedule. The loss is the squared error.

    Returns:
        The fitted parameters, `[images, ...]`, in the dtype of the images.

    Raises:
        ValueError: The images do not fit the network, another loss is requested, or a network diverges.
    """
    if images.ndim != 4 or not len(images):
        raise ValueError(f"images are [images, channels, height, width], at least one, not {list(images.shape)}")
    count, channels, height, width = images.shape
    inr = inr or image_inr(height, width, channels)
    if inr.pixels != (height, width) or inr.out_features != channels:
        raise ValueError(
            f"the images have {channels} channels of {height} x {width} pixels, but the network {inr.out_features} of "
            f"{inr.pixels}; give the same sizes"
        )
    if config.loss not in (None, "mse"):
        raise ValueError(f"a population of images is fitted by the squared error, not by {config.loss!r}")
    points = image_samples(images[0]).points
    values = images.flatten(2).transpose(1, 2)
    examples = Examples("images", points, values, points, values, is_signals=True)
    population = PopulationConfig(
        inr.architecture(bias=bias),
        examples.name,
        count,
        seed,
        steps=config.steps,
        batch=config.batch,
        epochs=config.epochs,
        optimizer=config.optimizer,
        schedule=config.schedule,
    )
    blocks = list(train(population, data=examples, dtype=images.dtype))
    diverged = [row["id"] for block in blocks for row in block.rows if row["is_diverged"]]
    if diverged:
        raise ValueError(
            f"{len(diverged)} of {count} networks diverged, the first is {diverged[0]}; lower the learning rate"
        )
    return {name: torch.cat([block.params[name] for block in blocks]) for name in blocks[0].params}


def fit_many(
    inr: Inr,
    samples: Sequence[Samples],
    config: FitConfig | None = None,
    *,
    starts: Sequence[Mapping[str, Tensor]],
    generators: Sequence[torch.Generator],
    workers: int | None = None,
    progress: Progress = no_progress,
    on_step: OnStep | None = None,
) -> list[Minimum]:
    """Fit networks to several signals at once, each network on one thread. Results do not depend on `workers`.

    A network for a shape is large enough to use a whole core, so training many networks in one stack would not be
    faster.

    Args:
        starts: The initial parameters of each network. Several networks may have the same initial parameters.
        generators: The random generators for the samples of each network's steps.
        workers: The number of networks that are fitted at the same time. Default: the number of processors.
        progress: Displays the steps of all networks. The function is called in the thread that fits the network.
        on_step: A function that is called in the thread of each network after each step, with the step number, loss,
            rate and network, as a `regauge.training.State`.

    Returns:
        The fitted parameters, in the order of the samples.

    Raises:
        ValueError: The numbers of initial parameters, generators and signals differ, or samples do not fit the network.
    """
    if not len(samples) == len(starts) == len(generators):
        raise ValueError(
            f"there are {len(samples)} signals, {len(starts)} starts and {len(generators)} generators; each network "
            "needs one of each"
        )

    config = config or FitConfig()
    advance = progress("fitting", sum(config.count_steps(len(one)) for one in samples))

    def one(k: int) -> Minimum:
        def show(state: State) -> None:
            if on_step is not None:
                on_step(state._replace(networks=(k,)))

        with one_thread():
            return fit(
                inr,
                samples[k],
                config,
                start=starts[k],
                generator=generators[k],
                progress=lambda label, total: advance,
                on_step=show,
            )

    with one_thread(), ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        return list(pool.map(one, range(len(samples))))
