"""Balancing matrices for groups whose product has less than full rank, in as many coordinates as the rank."""

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

SINGULAR = 1e-10
"""Singular values below this share of the largest are taken for zero."""
ROUNDING = 1e-14
"""Singular values of a product below this share of the norms of its factors are taken for zero."""


def is_regular(root: Float64[Tensor, "*lead k n"]) -> Bool[Tensor, "*lead"]:
    """Return whether the values `X' = Q R` of a group have full rank, by their triangular R."""
    if root.shape[-2] < root.shape[-1]:
        return torch.zeros(root.shape[:-2], dtype=torch.bool)
    singular = torch.linalg.svdvals(root)
    found: Tensor = singular[..., -1] > SINGULAR * singular[..., 0]
    return found


def balance_by_rank(first: Float64[Tensor, "k n"], second: Float64[Tensor, "l n"]) -> Float64[Tensor, "n n"]:
    """Return the matrix A for which A X and A^-T Y have the same diagonal Gram matrix D in the first coordinates.

    Let `X' = Q R`, `Y' = P S` and `R S' = U D W'`, cut to the rank of the product. The first rows of A are `D^-1/2 W'
    S`. The first rows of its inverse transpose are `D^-1/2 U' R`. The other rows of A are orthogonal to the latter. If
    X and Y span the same space, as after `without_null_spaces`, the other coordinates are zero.

    Args:
        first: R.
        second: S.
    """
    u, d, wh = torch.linalg.svd(first @ second.mT, full_matrices=False)
    is_there = d > ROUNDING * torch.linalg.matrix_norm(first) * torch.linalg.matrix_norm(second)
    rank = min(_rank(first), _rank(second), int(is_there.sum()))
    sizes = d[:rank].sqrt().unsqueeze(-1)
    rows, others = wh[:rank] @ second / sizes, u.mT[:rank] @ first / sizes
    _, _, spanned = torch.linalg.svd(others, full_matrices=True)
    return torch.cat([rows, spanned[rank:]])


def whiten_by_rank(root: Float64[Tensor, "k n"], *, is_forward: bool) -> Float64[Tensor, "n n"]:
    """Return the matrix A such that the Gram matrix of A X, or A^-T X, is the identity in `rank` coordinates."""
    _, singular, rows = torch.linalg.svd(root, full_matrices=True)
    sizes = singular[: _rank(root)].unsqueeze(-1)
    matrix: Tensor = rows.clone()
    matrix[: len(sizes)] *= 1 / sizes if is_forward else sizes
    return matrix


def _rank(root: Float64[Tensor, "k n"]) -> int:
    singular = torch.linalg.svdvals(root)
    return int((singular > SINGULAR * singular[0]).sum())
