"""Products along an axis of a tensor with one matrix per copy of a group, or with a Kronecker product of factors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from jaxtyping import Float, Float64
from torch import Tensor

MULTIPLIED_AT_ONCE = 1 << 18
"""The number of entries that are multiplied at once. The multiplied entries and their products fit in a cache."""
LONG_ROW = 8
"""If at least this number of consecutive entries belongs to each index of an axis, products along the axis are computed
without moving the axis.

If fewer consecutive entries belong to each index, the axis is first moved to the last position.
"""


@dataclass(frozen=True, eq=False)
class Kronecker:
    """The rotation `(F_1 ⊗ F_2 ⊗ ...) diag(signs)`, stored as its factors and signs.

    A product with a vector of n entries takes n times the sum of the factor sizes, instead of n times n operations.

    Attributes:
        factors: Orthogonal matrices whose sizes multiply to n.
        signs: Plus or minus one for each column.
    """

    factors: tuple[Float64[Tensor, "k k"], ...]
    signs: Float64[Tensor, " n"]

    @cached_property
    def matrix(self) -> Float64[Tensor, "n n"]:
        """The dense matrix: the Kronecker product of the factors, whose columns are multiplied by the signs."""
        product: Tensor = reduce(torch.kron, self.factors)
        return product * self.signs

    def times(self, tensor: Float[Tensor, "*shape"], axis: int) -> Float[Tensor, "*shape"]:
        """Return the product of the matrix with every vector along an axis, in the dtype of the tensor."""
        n, outer, inner = len(self.signs), math.prod(tensor.shape[:axis]), math.prod(tensor.shape[axis + 1 :])
        factors, signs = [one.to(tensor) for one in self.factors], self.signs.to(tensor).unsqueeze(-1)
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        given, made = tensor.reshape(outer, n, inner), result.view(outer, n, inner)
        columns = min(inner, max(1, MULTIPLIED_AT_ONCE // n))
        rows = max(1, MULTIPLIED_AT_ONCE // (n * max(columns, 1)))
        for i in range(0, outer, rows):
            for j in range(0, inner, columns):
                piece = given[i : i + rows, :, j : j + columns] * signs
                made[i : i + rows, :, j : j + columns] = _multiplied(piece.contiguous(), factors)
        return result


def _multiplied(values: Float[Tensor, "outer n inner"], factors: list[Tensor]) -> Float[Tensor, "outer n inner"]:
    """Multiply the vectors along the middle axis by all factors, one after the other."""
    shape, (outer, n, inner) = values.shape, values.shape
    inner *= n
    for factor in factors:
        size = len(factor)
        inner //= size
        values = values.view(-1, size) @ factor.mT if inner == 1 else factor @ values.view(outer, size, inner)
        outer *= size
    return values.view(shape)


def multiply_copies(
    blocks: Float[Tensor, "*which n n"],
    values: Float[Tensor, "*shape"],
    axis: int,
    others: Sequence[int] | None,
    batch: int,
    lead: int,
) -> Float[Tensor, "*shape"]:
    """Multiply the units of each copy of a group by the matrix of this copy.

    Args:
        blocks: `[*batch, *other axes, copies or 1, n, n]`, or `[*batch, n, n]` if all copies share one matrix.
        values: The tensor, `[*lead, *axes]`. The units of one copy must be consecutive along the axis.
        axis: The axis of the units. Index 0 is the first axis after the leading axes.
        others: The other axes whose indices select the matrix, in ascending order. `others` is None if all copies share
            one matrix.
        batch: The number of leading axes of the matrices.
        lead: The number of leading axes of the tensor.
    """
    n, shape, ones, axis = blocks.shape[-1], values.shape, [1] * (lead - batch), lead + axis
    own, inner = blocks.shape[:batch], math.prod(shape[axis + 1 :])
    if not others and inner >= LONG_ROW:
        copies = blocks.shape[-3] if others is not None else 1
        rows = values.reshape(*shape[:lead], -1, copies, n, inner)
        return (blocks.reshape(*own, *ones, 1, copies, n, n) @ rows).reshape(shape)
    last = torch.unflatten(values.movedim(axis, -1), -1, (-1, n))  # [*lead, *remaining axes, copies, n]
    product: Tensor
    if others is None:
        # One product for all vectors.
        product = (last.flatten(lead, -2) @ blocks.reshape(*own, *ones, n, n).mT).reshape(last.shape)
    elif not others:
        # One product for each copy, without repeating a matrix.
        rows = last.reshape(*shape[:lead], -1, *last.shape[-2:]).movedim(-2, -3)  # [*lead, copies, rest, n]
        whole = blocks.reshape(*own, *ones, *blocks.shape[-3:])
        product = (rows @ whole.mT).movedim(-3, -2).reshape(last.shape)
    else:
        # Matrices are broadcast to [*lead, *remaining axes, copies, n, n].
        wanted = [1] * (values.ndim - lead - 1)
        for k, other in enumerate(others):
            wanted[other - (lead + other > axis)] = blocks.shape[batch + k]
        blocks = blocks.reshape(*own, *ones, *wanted, *blocks.shape[-3:])
        product = (blocks @ last.unsqueeze(-1)).squeeze(-1)
    return product.flatten(-2).movedim(-1, axis)
