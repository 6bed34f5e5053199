"""Training data: examples that all networks share, or one signal per network."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from regauge.data.curves import waves
from regauge.data.images import ImageData, cifar10, digits, fashion_mnist, mnist, pixel_centers
from regauge.data.packaged import breast_cancer
from regauge.names import did_you_mean
from regauge.storage.architecture import import_object
from regauge.training.initialization import use_seed

WAVES, WAVE_POINTS = 2000, 512
"""The number of signals in the data set "sine-waves", and the number of points of each signal."""


@dataclass(frozen=True)
class Examples:
    """Inputs and targets for training and validation.

    Attributes:
        name: The name of the examples.
        inputs: Inputs, `[n, ...]`.
        targets: Class indices `[n]`, int64 from 0, or floating-point targets `[n, out]`. For signals, the targets are
            `[signals, n, out]`.
        validation_inputs: Inputs that are not used for training. Test sets are never read.
        validation_targets: The targets of the validation inputs.
        is_signals: Whether each network learns a separate signal, at points that are the same for all networks.
        labels: The class label of each signal, `[signals]`, or None. Labels are written to rows, but are not used for
            training.
        is_test: Whether each signal is from the test set, `[signals]`. For signals with a split, the value of the
            column "split" is "test" or "train". `is_test` is None if the signals are not split.

    Raises:
        ValueError: The numbers of inputs and targets, or of signals and labels, differ. The error is also raised if the
            targets have another shape or dtype.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    validation_inputs: Tensor
    validation_targets: Tensor
    is_signals: bool = False
    labels: Tensor | None = None
    is_test: Tensor | None = None

    def __post_init__(self) -> None:
        axis = int(self.is_signals)
        pairs = ((self.inputs, self.targets), (self.validation_inputs, self.validation_targets))
        for inputs, targets in pairs:
            self._require_targets(targets)
            if not len(inputs) or len(inputs) != targets.shape[axis]:
                raise ValueError(
                    f"{self.name!r} has {len(inputs)} inputs and targets of shape {tuple(targets.shape)}; axis {axis} "
                    "of the targets must be as long as the inputs, and not empty"
                )
        if len({(t.is_floating_point(), *t.shape[:axis], *t.shape[axis + 1 :]) for _, t in pairs}) > 1:
            raise ValueError(
                f"the targets of {self.name!r} are {self.targets.dtype} of shape {tuple(self.targets.shape)}, but for "
                f"validation {self.validation_targets.dtype} of {tuple(self.validation_targets.shape)}; only axis "
                f"{axis} may be of another length"
            )
        for what, known in (("labels", self.labels), ("is_test", self.is_test)):
            if known is not None and (not self.is_signals or known.shape != self.targets.shape[:1]):
                raise ValueError(
                    f"{self.name!r} has {what} of shape {tuple(known.shape)} and targets of shape "
                    f"{tuple(self.targets.shape)}; only signals have {what}, one for each"
                )

    @property
    def is_classification(self) -> bool:
        """Whether targets are class indices."""
        return not self.targets.is_floating_point()

    def require_outputs(self, out: int) -> None:
        """Raise a ValueError unless the targets fit networks with a given number of outputs."""
        if self.is_classification:
            last = max(int(self.targets.max()), int(self.validation_targets.max()))
            if last >= out:
                raise ValueError(
                    f"{self.name!r} has examples of class {last}, but the networks have {out} outputs; give them "
                    f"{last + 1}, or number the classes from 0 to {out - 1}"
                )
        elif self.targets.shape[-1] != out:
            raise ValueError(
                f"the targets of {self.name!r} have {self.targets.shape[-1]} values each, but the networks {out} "
                "outputs; give them as many"
            )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Examples":
        """Move the examples to a device and convert floating-point tensors to a dtype, without unneeded copies."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        names = ("inputs", "targets", "validation_inputs", "validation_targets")
        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in names}
        return replace(self, **moved)

    def _require_targets(self, targets: Tensor) -> None:
        """Raise an error for targets for which no loss is defined."""
        is_values = targets.is_floating_point()
        if self.is_signals and not is_values:
            raise ValueError(f"the signals of {self.name!r} must be floating-point values, not {targets.dtype}")
        if not is_values and targets.dtype != torch.int64:
            raise ValueError(
                f"the targets of {self.name!r} are {targets.dtype}; give classes as torch.int64 (`targets.long()`), or "
                "values in floating point"
            )
        axes = "[signals, n, out]" if self.is_signals else "[n, out]" if is_values else "[n]"
        if targets.ndim != axes.count(",") + 1:
            raise ValueError(
                f"the targets of {self.name!r} are {targets.dtype} of shape {tuple(targets.shape)}, but {axes} is "
                "needed; values of one number each have an axis of length 1 (`targets[..., None]`), and classes are "
                "int64 without one"
            )
        if not is_values and len(targets) and targets.min() < 0:
            raise ValueError(f"{self.name!r} has an example of class {int(targets.min())}; number the classes from 0")


def require_trainable(module: nn.Module, examples: Examples) -> None:
    """Set a module to training mode; raise a ValueError if the module cannot be trained on examples of its dtype."""
    names = [name for name, _ in module.named_parameters()]
    tied = sorted({name for name, _ in module.named_parameters(remove_duplicate=False)} - set(names))
    if tied:
        raise ValueError(f"{tied[:3]} are tensors with two names; untie them to train a population")
    inputs = examples.inputs[:2].cpu()
    (first, draws), (second, _) = (_try(module, inputs, seed) for seed in (0, 1))
    # Randomness from other sources than torch's global generator is detected only by different outputs.
    if draws or not torch.allclose(first, second, rtol=1e-3, equal_nan=True):
        raise ValueError(
            f"a {type(module).__name__} uses random numbers in training, so networks would depend on one another; set "
            "the p of its dropout to 0, or remove the random numbers from its forward pass"
        )
    examples.require_outputs(first.shape[1])


def _try(module: nn.Module, inputs: Tensor, seed: int) -> tuple[Tensor, bool]:
    """Return a module's outputs in training mode, and whether it used torch's global generator. Buffers are kept."""
    own = {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    with use_seed(seed), torch.no_grad():
        before = torch.get_rng_state()
        outputs: object = torch.func.functional_call(module.train(), own, (inputs,))
        draws = not torch.equal(before, torch.get_rng_state())
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(inputs):
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise ValueError(
            f"a {type(module).__name__} gives {found} for {len(inputs)} examples, but [examples, out] is needed; wrap "
            "it in a module that gives that"
        )
    return outputs, draws


@lru_cache(maxsize=4)
def load_examples(name: str) -> Examples:
    """Return the examples named in `SETS`, or the examples that `package.module:function` returns. Each data set is
    read only once.

    Raises:
        ValueError: The data set or function does not exist, or the function does not return Examples.
    """
    if name in SETS:
        return SETS[name]()
    if ":" not in name:
        raise ValueError(
            f"{name!r} is no data set for populations; {did_you_mean(name, SETS)}choose from {sorted(SETS)}, name a "
            "function that returns Examples as package.module:function, or give `data`"
        )
    made = import_object(name)()
    if not isinstance(made, Examples):
        raise ValueError(f"{name!r} returned a {type(made).__name__}; it must return regauge.zoo.Examples")
    return made


def image_classes(data: ImageData, mean: float, std: float) -> Examples:
    """Return normalized images with class labels. The last tenth of the training images is for validation."""
    return _with_last_tenth_kept(data.name, (data.train_images - mean).div_(std), data.train_labels)


def image_signals(data: ImageData) -> Examples:
    """Return images as signals: functions from pixel centers in [-1, 1]^2 (row by row) to channels, with class labels.

    Test images are spread evenly among training images, so the first signals contain training and test images.
    """
    images, labels = torch.cat([data.train_images, data.test_images]), torch.cat([data.train_labels, data.test_labels])
    count, channels, height, width = images.shape
    places = [(torch.arange(n) + 0.5) / n for n in (len(data.train_images), len(data.test_images))]
    order = torch.cat(places).argsort(stable=True)
    points = pixel_centers(height, width)
    values = images[order].reshape(count, channels, height * width).transpose(1, 2)
    return Examples(
        f"{data.name} as functions",
        points,
        values,
        points,
        values,
        is_signals=True,
        labels=labels[order],
        is_test=order >= len(data.train_images),
    )


def _with_last_tenth_kept(name: str, inputs: Tensor, labels: Tensor) -> Examples:
    cut = len(labels) - len(labels) // 10
    return Examples(name, inputs[:cut], labels[:cut], inputs[cut:], labels[cut:])


def _breast_cancer() -> Examples:
    data = breast_cancer()
    return _with_last_tenth_kept(data.name, data.train_inputs, data.train_labels)


def _waves() -> Examples:
    data = waves(WAVES, WAVE_POINTS, generator=torch.Generator().manual_seed(0))
    return Examples("sine waves", data.inputs, data.targets, data.test_inputs, data.test_targets, is_signals=True)


SETS: dict[str, Callable[[], Examples]] = {
    "digits": lambda: image_classes(digits(), 0.0, 1.0),
    "mnist": lambda: image_classes(mnist(), 0.1307, 0.3081),
    "mnist-16": lambda: image_classes(mnist().shrunk(16), 0.1307, 0.3081),
    "fashion-mnist": lambda: image_classes(fashion_mnist(), 0.2860, 0.3530),
    "fashion-mnist-16": lambda: image_classes(fashion_mnist().shrunk(16), 0.2860, 0.3530),
    "cifar10": lambda: image_classes(cifar10(), 0.5, 0.5),
    "cifar10-gray": lambda: image_classes(cifar10().grayscale(), 0.5, 0.5),
    "cifar10-16": lambda: image_classes(cifar10().pooled(2), 0.5, 0.5),
    "breast-cancer": _breast_cancer,
    "sine-waves": _waves,
    "digits-signals": lambda: image_signals(digits()),
    "mnist-signals": lambda: image_signals(mnist()),
    "fashion-mnist-signals": lambda: image_signals(fashion_mnist()),
    "cifar10-signals": lambda: image_signals(cifar10()),
    "cifar10-16-signals": lambda: image_signals(cifar10().pooled(2)),
}
"""The data sets for training populations, by name. Images are standardized."""
