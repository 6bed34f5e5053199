"""Subgroups of O(n): rotations that keep the vector of all ones, and rotations without reflections.

A rotation that keeps the vector of all ones has the form `1 1^T / n + H^T R H`. The n - 1 rows of H are an orthonormal
basis of the vectors whose sum is zero, and R is any rotation of these vectors. A rotation that keeps the vector of all
ones changes neither the mean of a vector nor the norm of its deviation from the mean. Therefore LayerNorm without gains
commutes with the rotation.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def zero_sum_basis(n: int) -> Float[Tensor, "{n}-1 {n}"]:
    """Return an orthonormal basis of the zero-sum vectors with n entries, as rows in float64 (Helmert)."""
    k = torch.arange(1, n, dtype=torch.float64).unsqueeze(-1)
    columns = torch.arange(n)
    rows = torch.where(columns < k, 1.0, torch.where(columns == k, -k, 0.0))
    basis: Tensor = rows / (k * (k + 1)).sqrt()
    return basis


def keeping_ones(rotation: Float[Tensor, "*lead m m"]) -> Float[Tensor, "*lead m+1 m+1"]:
    """Return the rotation that keeps the vector of ones and acts on zero-sum vectors like the given rotation.

    The given rotation uses the coordinates of `zero_sum_basis`.
    """
    n = rotation.shape[-1] + 1
    basis = zero_sum_basis(n).to(rotation)
    return basis.mT @ rotation @ basis + 1 / n


def without_reflection(matrix: Float[Tensor, "*lead n n"]) -> Float[Tensor, "*lead n n"]:
    """Return an orthogonal matrix in which the last column is negated if the determinant is minus one.

    For `C = U S V^T` with descending singular values, `without_reflection(U) without_reflection(V)^T` is the rotation R
    without reflection that maximizes `<R, C>`. If the best orthogonal matrix contains a reflection, R negates the
    direction of the smallest singular value.

    References:
        Kabsch (1976), A solution for the best rotation to relate two sets of vectors; Umeyama (1991), lemma.
    """
    sign = torch.linalg.det(matrix).sign()
    ones = torch.ones_like(matrix[..., 0, :-1])
    return matrix * torch.cat([ones, sign.unsqueeze(-1)], -1).unsqueeze(-2)
