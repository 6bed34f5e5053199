"""Random changes of training networks that are not symmetries: input transformations, noise, and dropped weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regauge.core.params import Params, count_models
from regauge.learn.input_layer import InputLayer

SAMPLED = 1 << 12
"""The number of weights per network from which the pruning threshold is estimated."""


@dataclass(frozen=True)
class Translation:
    """A shift of the inputs: `f(x + t)`, where `t` is uniformly random in `[-size, size]` along each axis.

    References:
        Navon et al. (2023), appendix, augmentations.
    """

    size: float
    moves_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require("the size of translations", self.size)

    def draw(self, count: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample a matrix and a shift of the inputs for each of `count` networks."""
        shift = self.size * (2 * torch.rand(count, inputs, generator=generator) - 1)
        return torch.eye(inputs).expand(count, -1, -1), shift


@dataclass(frozen=True)
class Rotation:
    """A rotation of the inputs in a random plane, by a uniformly random angle in `[-degrees, degrees]`.

    References:
        Navon et al. (2023), appendix, augmentations.
    """

    degrees: float
    moves_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require("the angle of rotations", self.degrees, 180)

    def draw(self, count: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample a matrix and a shift of the inputs for each of `count` networks."""
        if inputs < 2:
            raise ValueError("inputs of length 1 have no rotations; leave them out")
        angle = math.radians(self.degrees) * (2 * torch.rand(count, 1, 1, generator=generator) - 1)
        u, v = torch.linalg.qr(torch.randn(count, inputs, 2, generator=generator)).Q.unsqueeze(-1).unbind(-2)
        within, across = u @ u.mT + v @ v.mT, v @ u.mT - u @ v.mT
        return torch.eye(inputs) + (angle.cos() - 1) * within + angle.sin() * across, torch.zeros(count, inputs)


@dataclass(frozen=True)
class Scaling:
    """A scaling of the inputs by a uniformly random factor in `[1 - share, 1 + share]`.

    References:
        Navon et al. (2023), appendix, augmentations.
    """

    share: float
    moves_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require("the share of scalings", self.share, 0.99)

    def draw(self, count: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample a matrix and a shift of the inputs for each of `count` networks."""
        factor = 1 + self.share * (2 * torch.rand(count, 1, 1, generator=generator) - 1)
        return factor * torch.eye(inputs), torch.zeros(count, inputs)


@dataclass(frozen=True)
class Noise:
    """Normal noise on every weight, relative to the root mean square of all weights in the same tensor of the network.

    Tensors that have no negative entries, such as variances, stay nonnegative.
    """

    share: float
    moves_inputs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require("the share of noise", self.share)

    def change(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """Change one tensor of all networks, `[models, ...]`."""
        size = tensor.flatten(1).square().mean(1).sqrt().reshape(-1, *[1] * (tensor.ndim - 1))
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        noisy = tensor + self.share * size * drawn
        return noisy.abs() if bool((tensor >= 0).all()) else noisy


@dataclass(frozen=True)
class Dropout:
    """Dropout of weights: each weight is set to zero with a given probability. Other weights are not rescaled."""

    share: float
    moves_inputs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require("the share of dropped values", self.share, 0.99)

    def change(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """Change one tensor of all networks, `[models, ...]`."""
        return tensor * (torch.rand(tensor.shape, generator=generator) >= self.share)


@dataclass(frozen=True)
class Pruning:
    """Pruning of the smallest weights of each network: a share of all weights, uniformly random in `[0, share]`.

    References:
        Navon et al. (2024), the published settings: quantile dropout.
    """

    share: float
    moves_inputs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require("the largest share of pruned values", self.share, 0.99)

    def prune(self, tensors: Mapping[str, Tensor], generator: torch.Generator) -> Params:
        """Set the smallest weights of each network to zero. The weights of all `tensors` are ranked together."""
        sizes = torch.cat([tensor.flatten(1) for tensor in tensors.values()], 1).abs()
        if sizes.shape[1] > SAMPLED:
            sizes = sizes[:, torch.randint(sizes.shape[1], (SAMPLED,), generator=generator)]
        ranks = self.share * torch.rand(len(sizes), generator=generator) * sizes.shape[1]
        limits = sizes.sort(1).values.gather(1, ranks.long().clamp(max=sizes.shape[1] - 1).unsqueeze(1))
        return {
            name: torch.where(tensor.abs() < limits.reshape(-1, *[1] * (tensor.ndim - 1)), 0.0, tensor)
            for name, tensor in tensors.items()
        }


Change = Translation | Rotation | Scaling | Noise | Dropout | Pruning


def changes_of_copies() -> tuple[Change, ...]:
    """Return the default changes that create copies of networks, whose units a matcher learns to recognize."""
    return Noise(0.1), Dropout(0.05), Pruning(0.1)


def move_inputs(
    params: Mapping[str, Tensor], changes: Sequence[Change], layer: InputLayer | None, generator: torch.Generator
) -> Params:
    """Return networks after all transformations of their inputs, one after another."""
    result = dict(params)
    for change in changes:
        if isinstance(change, Translation | Rotation | Scaling):
            assert layer is not None
            result = layer.move(result, *change.draw(count_models(params), layer.inputs, generator))
    return result


def change_values(
    params: Mapping[str, Tensor],
    changes: Sequence[Change],
    tied: Sequence[Sequence[str]],
    generator: torch.Generator,
) -> Params:
    """Return networks after all changes of weights have been applied. Tied tensors stay equal."""
    result = dict(params)
    for change in changes:
        if isinstance(change, Noise | Dropout | Pruning):
            first = {other: names[0] for names in tied for other in names[1:]}
            own = {name: t for name, t in result.items() if t.is_floating_point() and name not in first}
            if isinstance(change, Pruning):
                result.update(change.prune(own, generator))
            else:
                result.update({name: change.change(tensor, generator) for name, tensor in own.items()})
            result.update({name: result[other] for name, other in first.items() if name in result})
    return result


def _require(what: str, value: float, largest: float = math.inf) -> None:
    if not 0 < value <= largest or value == math.inf:
        end = "" if largest == math.inf else f" and at most {largest:g}"
        raise ValueError(f"{what} is {value}; it must be positive{end}; leave the change out for none")
