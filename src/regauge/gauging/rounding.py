"""Round-to-nearest quantization, used for choosing and evaluating gauges."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from regauge.core.arguments import check_arguments
from regauge.core.params import Params, work_dtype
from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class RoundToNearest:
    """Rounding of entries to the nearest of `2^bits - 1` equally spaced levels around zero.

    Entries share a scale, and the largest magnitude among them maps to the largest level. By default, each row (all
    weights of one output) has one scale. If `group` is set, this number of consecutive entries along the inputs of a
    row share a scale. With `is_per_tensor`, the whole tensor has one scale.

    Attributes:
        bits: The number of bits of an entry, from 2 to 16.
        group: The number of entries that share a scale. If None, a whole row shares a scale. The last group of a row
            may be shorter.
        is_per_tensor: Whether the whole tensor has one scale.
    """

    bits: int = 4
    group: int | None = None
    is_per_tensor: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits is {self.bits}, but values are rounded to 2 to 16 bits: choose one of these")
        if self.group is not None and (self.group < 1 or self.is_per_tensor):
            raise ValueError(
                f"group is {self.group}: it counts the values that share a scale, at least one, and excludes "
                "is_per_tensor"
            )

    @property
    def levels(self) -> int:
        """The index of the largest level."""
        return int(2 ** (self.bits - 1)) - 1

    def __str__(self) -> str:
        where = "tensor" if self.is_per_tensor else "row" if self.group is None else f"{self.group} values"
        return f"{self.bits} bits per {where}"

    def __call__(self, tensor: Tensor, rows: tuple[int, ...] = (0,)) -> Tensor:
        """Return the rounded tensor, with the same shape and dtype; `rows` are the axes that index its rows.

        Rounding is computed in float32, or in float64 for float64 tensors.
        """
        values = self._blocks(tensor.to(work_dtype(tensor.dtype)), rows)
        step = self._steps(values)
        return self._unblock((values / step).round() * step, tensor, rows).to(tensor.dtype)

    def straight_through(self, tensor: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Return the rounded tensor, whose gradients treat rounding as the identity but include the dependence of the
        step sizes on the tensor.

        References:
            Esser et al. (2020), Learned step size quantization, equation 3, with steps that follow the range.
        """
        values = self._blocks(tensor, rows)
        step = self._steps(values)
        number = values / step
        number = number + (number.round() - number).detach()
        return self._unblock(number * step, tensor, rows)

    def expected_error(
        self, tensor: Tensor, rows: tuple[int, ...] = (0,), weights: Tensor | None = None
    ) -> Float[Tensor, ""]:
        """Return the weighted sum of the expected squared errors of all entries, each `step^2 / 12`.

        The result is differentiable.
        """
        values = self._blocks(tensor, rows)
        shares = self._blocks(torch.ones_like(tensor) if weights is None else weights, rows)
        steps = values.abs().amax(-1) / self.levels
        return (steps.square() * shares.sum(-1)).sum() / 12

    def _steps(self, values: Tensor) -> Tensor:
        """Return the distance between levels for each block of entries with a common scale. For a block of zeros,
        return one.
        """
        step = values.abs().amax(-1, keepdim=True) / self.levels
        return torch.where(step == 0, 1.0, step)

    def _blocks(self, tensor: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Return the entries in blocks that share a scale, along the last axis, padded with zeros."""
        if self.is_per_tensor:
            return tensor.reshape(1, -1)
        rows = tuple(axis % tensor.ndim for axis in rows)
        rest = [axis for axis in range(tensor.ndim) if axis not in rows]
        flat = tensor.permute(*rows, *rest).reshape(math.prod(tensor.shape[axis] for axis in rows), -1)
        if self.group is None or self.group >= flat.shape[1]:
            return flat
        missing = -flat.shape[1] % self.group
        return functional.pad(flat, (0, missing)).reshape(len(flat), -1, self.group)

    def _unblock(self, blocks: Tensor, like: Tensor, rows: tuple[int, ...]) -> Tensor:
        if self.is_per_tensor:
            return blocks.reshape(like.shape)
        rows = tuple(axis % like.ndim for axis in rows)
        order = [*rows, *(axis for axis in range(like.ndim) if axis not in rows)]
        count = math.prod(like.shape[axis] for axis in rows)
        flat = blocks.reshape(count, -1)[:, : like.numel() // max(count, 1)]
        moved = flat.reshape([like.shape[axis] for axis in order])
        return moved.permute([order.index(axis) for axis in range(like.ndim)])


FOUR_BITS = RoundToNearest()
"""Rounding to four bits, with one scale for each row."""


@remembered
def layer_rows(symmetry: Symmetry) -> dict[str, tuple[int, ...]]:
    """Return the weights of layers with the axes that index their rows; a row contains all weights of one output.

    The result excludes vectors, buffers, embedding tables and position tables. The result includes only one name of a
    tied tensor. The layer sums over the axes of a row. The axes of a row include the positions of kernels, on which no
    group acts.
    """
    acting: dict[str, set[int]] = {}
    for group in symmetry.groups:
        for place in group.placements:
            acting.setdefault(place.parameter, set()).add(place.axis)
    readers = {name: {axis for other, axis in symmetry.readers if other == name} for name in symmetry.shapes}
    left_out = {*symmetry.buffers, *symmetry.unused}
    for names in symmetry.tied:
        first = next((name for name in names if readers.get(name)), names[0])
        left_out |= {*names} - {first}
    result = {}
    for name, shape in symmetry.shapes.items():
        if len(shape) < 2 or name in left_out or math.prod(shape) <= max(shape):
            continue
        acted, read = acting.get(name, set()), readers[name]
        if len(shape) == 2 and not read and acted == {1} and symmetry.readers:
            continue  # An embedding table: its rows are used unchanged.
        if read:
            others = [axis for axis in range(len(shape)) if axis not in read]
            rows = tuple(axis for axis in others if axis == 0 or axis in acted) or tuple(others)
        else:
            rows = (0,)
        result[name] = rows
    return result


REPORTED = tuple(RoundToNearest(bits) for bits in (8, 4, 3))
"""Rounding schemes for which the errors of layers are always reported."""


@check_arguments
def round_network(
    params: Mapping[str, Tensor], symmetry: Symmetry, scheme: Callable[[Tensor, tuple[int, ...]], Tensor]
) -> Params:
    """Return a network with rounded layer weights. All other tensors are the same objects as in `params`.

    `scheme` is a `RoundToNearest`, or another function of a tensor and the axes that index its rows.
    """
    rounded = {name: scheme(params[name], rows) for name, rows in layer_rows(symmetry).items() if name in params}
    for names in symmetry.tied:
        rounded |= {name: rounded[one] for one in names if one in rounded for name in names if name in params}
    return {**params, **rounded}


@check_arguments
def rounding_errors(params: Mapping[str, Tensor], symmetry: Symmetry, scheme: RoundToNearest) -> dict[str, float]:
    """Return the relative squared error of each layer's rounded weights: `|W - Q(W)|^2 / |W|^2`."""
    return {
        name: relative_error(params[name], rows, scheme)
        for name, rows in layer_rows(symmetry).items()
        if name in params
    }


@check_arguments
def mean_error(params: Mapping[str, Tensor], symmetry: Symmetry, scheme: RoundToNearest) -> float:
    """Return the relative squared error of the rounded weights, averaged over layers."""
    errors = rounding_errors(params, symmetry, scheme)
    return sum(errors.values()) / max(len(errors), 1)


def relative_error(tensor: Tensor, rows: tuple[int, ...], scheme: RoundToNearest) -> float:
    """Return `|W - Q(W)|^2 / |W|^2`, or zero for a tensor of zeros."""
    values = tensor.to(work_dtype(tensor.dtype))
    whole = float(values.square().sum(dtype=torch.float64))
    return float((values - scheme(values, rows)).square().sum(dtype=torch.float64)) / whole if whole else 0.0


def decibels(share: float) -> float:
    """Return the signal-to-noise ratio in dB, given the noise as a fraction of the signal."""
    return -10 * math.log10(max(share, 1e-30))


INPUTS = {
    functional.linear: -1, functional.conv1d: None, functional.conv2d: None, functional.conv3d: None,
    torch.conv1d: None, torch.conv2d: None, torch.conv3d: None, torch.addmm: -1,
}  # fmt: skip
"""Layer functions, each with the input axis along which activations share a scale. None means all axes except the batch
axis."""


class _Rounded(TorchFunctionMode):
    """A torch function mode in which the inputs of layers are rounded."""

    def __init__(self, scheme: RoundToNearest) -> None:
        super().__init__()
        self._scheme = scheme

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in INPUTS:
            place = 1 if func is torch.addmm else 0
            if len(args) > place:
                args = (*args[:place], self._round(args[place], INPUTS[func]), *args[place + 1 :])
        return func(*args, **(kwargs or {}))

    def _round(self, values: Tensor, axis: int | None) -> Tensor:
        rows = tuple(range(values.ndim - 1)) if axis == -1 else (0,)
        return self._scheme(values, rows)


@contextmanager
def rounded_activations(scheme: RoundToNearest | None) -> Iterator[None]:
    """Return a context in which layers read rounded activations: one scale per token, or per example in convolutions.

    The inputs of linear layers, of convolutions and of `addmm` are rounded. The inputs of products of two activations
    are not rounded.
    """
    if scheme is None:
        yield
        return
    with _Rounded(scheme):
        yield
