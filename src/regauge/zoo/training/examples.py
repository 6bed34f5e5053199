"""What networks are trained on: examples that all share, or one signal for each network; held in memory once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from regauge.data.images import ImageData, cifar10, digits, fashion_mnist, mnist, pixel_centers
from regauge.data.tables import breast_cancer
from regauge.data.waves import waves
from regauge.zoo.architecture import imported

WAVES, WAVE_POINTS = 2000, 512
"""Signals and points of each in the set "sine-waves"."""


@dataclass(frozen=True)
class Examples:
    """Inputs and targets.

    Attributes:
        name: In words.
        inputs: `[n, ...]`.
        targets: Classes `[n]` or values `[n, out]`; of signals `[signals, n, out]`.
        validation_inputs: Kept from training, as the inputs. Test sets are not read at all.
        validation_targets: As the targets.
        is_signals: Whether each network learns a signal of its own, at points that all share.

    Raises:
        ValueError: Numbers of inputs and targets differ.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    validation_inputs: Tensor
    validation_targets: Tensor
    is_signals: bool = False

    def __post_init__(self) -> None:
        axis = int(self.is_signals)
        pairs = ((self.inputs, self.targets), (self.validation_inputs, self.validation_targets))
        for inputs, targets in pairs:
            if not len(inputs) or targets.ndim <= axis or len(inputs) != targets.shape[axis]:
                raise ValueError(
                    f"{self.name!r} has {len(inputs)} inputs and targets of shape {tuple(targets.shape)}; axis {axis} "
                    "of the targets must be as long as the inputs, and not empty"
                )
        if self.is_signals and not self.targets.is_floating_point():
            raise ValueError(f"the signals of {self.name!r} must be floating-point values, not {self.targets.dtype}")

    @property
    def is_classification(self) -> bool:
        """Whether targets are classes."""
        return not self.targets.is_floating_point()

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Examples":
        """The same on a device, floating-point values in a dtype; nothing is copied where it is so already."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        return replace(
            self,
            inputs=move(self.inputs),
            targets=move(self.targets),
            validation_inputs=move(self.validation_inputs),
            validation_targets=move(self.validation_targets),
        )


@lru_cache(maxsize=4)
def load_examples(name: str) -> Examples:
    """The examples of a name in `SETS`, or what the function `package.module:function` returns, read once.

    Raises:
        ValueError: There is no such set or function, or it returns something else.
    """
    if name in SETS:
        return SETS[name]()
    if ":" not in name:
        raise ValueError(
            f"{name!r} is no data set for populations; choose from {sorted(SETS)}, name a function that returns "
            "Examples as package.module:function, or give `data`"
        )
    made = imported(name)()
    if not isinstance(made, Examples):
        raise ValueError(f"{name!r} returned a {type(made).__name__}; it must return regauge.zoo.Examples")
    return made


def image_classes(data: ImageData, mean: float, std: float) -> Examples:
    """Images with normalized pixels and their classes; the last tenth of the training images is for validation."""
    return _with_last_tenth_kept(data.name, (data.train_images - mean).div_(std), data.train_labels)


def image_signals(data: ImageData) -> Examples:
    """Every training image as a function from pixel centers in [-1, 1]^2, row by row, to its channels."""
    count, channels, height, width = data.train_images.shape
    points = pixel_centers(height, width)
    values = data.train_images.reshape(count, channels, height * width).transpose(1, 2)
    return Examples(f"{data.name} as functions", points, values, points, values, is_signals=True)


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
    "fashion-mnist": lambda: image_classes(fashion_mnist(), 0.2860, 0.3530),
    "cifar10": lambda: image_classes(cifar10(), 0.5, 0.5),
    "cifar10-gray": lambda: image_classes(cifar10().grayscale(), 0.5, 0.5),
    "breast-cancer": _breast_cancer,
    "sine-waves": _waves,
    "digits-signals": lambda: image_signals(digits()),
    "mnist-signals": lambda: image_signals(mnist()),
    "cifar10-signals": lambda: image_signals(cifar10()),
}
