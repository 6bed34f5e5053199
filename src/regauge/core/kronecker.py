"""Rotations that are Kronecker products of small matrices: applied factor by factor, without the product itself."""

import math
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from jaxtyping import Float, Float64
from torch import Tensor

PIECE = 1 << 17
"""Values that are multiplied at once, which a cache holds with what becomes of them."""


@dataclass(frozen=True, eq=False)
class Kronecker:
    """The rotation `(F_1 ⊗ F_2 ⊗ ...) diag(signs)`.

    Multiplying a vector of n entries by it takes n times the sum of the sizes of the factors, not n times n.

    Attributes:
        factors: Orthogonal matrices whose sizes multiply to n.
        signs: Plus or minus one for each column.
    """

    factors: tuple[Float64[Tensor, "k k"], ...]
    signs: Float64[Tensor, " n"]

    @cached_property
    def matrix(self) -> Float64[Tensor, "n n"]:
        """All entries."""
        product: Tensor = reduce(torch.kron, self.factors)
        return product * self.signs

    def times(self, tensor: Float[Tensor, "*shape"], axis: int) -> Float[Tensor, "*shape"]:
        """The product of the matrix with every vector along an axis, in the precision of the tensor."""
        n, outer, inner = len(self.signs), math.prod(tensor.shape[:axis]), math.prod(tensor.shape[axis + 1 :])
        factors, signs = [one.to(tensor) for one in self.factors], self.signs.to(tensor).unsqueeze(-1)
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        given, made = tensor.reshape(outer, n, inner), result.view(outer, n, inner)
        columns = min(inner, max(1, PIECE // n))
        rows = max(1, PIECE // (n * max(columns, 1)))
        for i in range(0, outer, rows):
            for j in range(0, inner, columns):
                piece = given[i : i + rows, :, j : j + columns] * signs
                made[i : i + rows, :, j : j + columns] = _multiplied(piece.contiguous(), factors)
        return result


def _multiplied(values: Float[Tensor, "outer n inner"], factors: list[Tensor]) -> Float[Tensor, "outer n inner"]:
    """Multiply along the middle axis by factor after factor."""
    shape, (outer, n, inner) = values.shape, values.shape
    inner *= n
    for factor in factors:
        size = len(factor)
        inner //= size
        values = values.view(-1, size) @ factor.mT if inner == 1 else factor @ values.view(outer, size, inner)
        outer *= size
    return values.view(shape)
