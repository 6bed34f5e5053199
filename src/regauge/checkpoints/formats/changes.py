"""Changes of single tensors of a network, computed on each read of a tensor or of a range of its first axis."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core.params import work_dtype

Read = Callable[[tuple[int, int] | None], Tensor]
"""A function that reads a network tensor, or a range of its first axis, in the dtype of the computation."""


@dataclass(frozen=True)
class LowRank:
    """The change of a matrix to `W + scale * up @ down`. If `is_transposed`, the matrix is stored transposed.

    With a magnitude (DoRA), the changed weights of every output are rescaled such that their norm equals the magnitude.
    """

    up: Tensor
    down: Tensor
    scale: float
    is_transposed: bool = False
    magnitude: Tensor | None = None

    def apply(self, read: Read, rows: tuple[int, int] | None) -> Tensor:
        """Return the changed tensor, or a range of its first axis."""
        if self.magnitude is not None and self.is_transposed and rows is not None:
            return self.apply(read, None)[rows[0] : rows[1]]
        part = slice(None) if rows is None else slice(*rows)
        weight = read(rows)
        up, down = self.up.to(weight.dtype), self.down.to(weight.dtype)
        change = (up @ down[:, part]).T if self.is_transposed else up[part] @ down
        result = weight.add_(change.reshape(weight.shape), alpha=self.scale)
        if self.magnitude is None:
            return result
        if self.is_transposed:
            return result.mul_(self.magnitude.to(result) / torch.linalg.vector_norm(result, dim=0))
        norms = torch.linalg.vector_norm(result.flatten(1), dim=1)
        return result.mul_((self.magnitude[part].to(result) / norms).reshape(-1, *[1] * (result.ndim - 1)))


@dataclass(frozen=True)
class Added:
    """The change of a tensor `b` to `b + scale * value`."""

    value: Tensor
    scale: float

    def apply(self, read: Read, rows: tuple[int, int] | None) -> Tensor:
        """Return the changed tensor, or a range of its first axis."""
        weight = read(rows)
        return weight.add_(self.value[slice(None) if rows is None else slice(*rows)].to(weight), alpha=self.scale)


@dataclass(frozen=True)
class Replaced:
    """The replacement of a tensor by another tensor, which the adapter stores completely."""

    value: Tensor

    def apply(self, read: Read, rows: tuple[int, int] | None) -> Tensor:
        """Return the changed tensor, or a range of its first axis."""
        part = self.value[slice(None) if rows is None else slice(*rows)]
        return part.to(work_dtype(self.value.dtype), copy=True)


@dataclass(frozen=True)
class Mapped:
    """A change of a tensor by a function of the whole tensor, viewed as a matrix `[first axis, remaining axes]`.

    Attributes:
        make: A function from the matrix to the changed matrix.
        sides: The required numbers of rows and columns; None for any number.
        entries: The required number of entries, if it is known.
        is_transposed: Whether the tensor is stored transposed.
        is_optional: Whether a network may lack the tensor.
        keeps_shape: Whether `make` takes the tensor in its original shape instead of a matrix.
    """

    make: Callable[[Tensor], Tensor]
    sides: tuple[int | None, int | None] | None = None
    entries: int | None = None
    is_transposed: bool = False
    is_optional: bool = False
    keeps_shape: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of a given shape can be changed."""
        matrix = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        sides = self.sides or (None, None)
        wanted = sides[::-1] if self.is_transposed else sides
        alike = all(one in (None, own) for one, own in zip(wanted, matrix, strict=True))
        return alike and self.entries in (None, math.prod(shape))

    def apply(self, read: Read, rows: tuple[int, int] | None) -> Tensor:
        """Return the changed tensor, or a range of its first axis."""
        weight = read(None)
        matrix = weight if self.keeps_shape else weight.reshape(len(weight), -1)
        try:
            result = (self.make(matrix.T).T if self.is_transposed else self.make(matrix)).reshape(weight.shape)
        except (IndexError, RuntimeError) as error:
            raise _misfit(weight, error) from error
        return result if rows is None else result[rows[0] : rows[1]].clone()


@dataclass(frozen=True)
class CarriedBias:
    """A change of a bias by a function of the bias and of the weight of the same module.

    Attributes:
        make: A function from the bias and the weight to the changed bias.
        weight: A function that reads the weight as it is before the adapter is added.
        is_optional: Whether a network may lack the bias.
    """

    make: Callable[[Tensor, Tensor], Tensor]
    weight: Callable[[], Tensor] | None = None
    is_optional: bool = True

    def apply(self, read: Read, rows: tuple[int, int] | None) -> Tensor:
        """Return the changed bias, or a range of it."""
        assert self.weight is not None
        bias = read(None)
        try:
            result = self.make(bias, self.weight()).reshape(bias.shape)
        except RuntimeError as error:
            raise _misfit(bias, error) from error
        return result if rows is None else result[rows[0] : rows[1]].clone()


@dataclass(frozen=True)
class Rearranged:
    """A change of a tensor that consists of entries of other, changed tensors; `make` returns the whole tensor."""

    make: Callable[[], Tensor]

    def apply(self, read: Read, rows: tuple[int, int] | None) -> Tensor:
        """Return the changed tensor, or a range of its first axis."""
        value = self.make()
        return value if rows is None else value[rows[0] : rows[1]].clone()


Trained = LowRank | Added | Replaced | Mapped | CarriedBias
"""The kinds of changes that adapters hold."""
Change = Trained | Rearranged


def _misfit(tensor: Tensor, error: Exception) -> ValueError:
    return ValueError(
        f"an adapter does not fit a tensor of shape {tuple(tensor.shape)}: {error}; give the base that it was "
        "trained on"
    )
