"""Matrices that make two Gram matrices equal, for balancing, and exact null spaces of integer matrices."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

FAINT_ENTRY = 1e-100
"""Entries of a Gram matrix below this fraction of its largest entry count as zero."""

Gram = Float64[Tensor, "*lead n n"]


def balancing(forward: Gram, inverse: Gram, zero: float, certain: float) -> tuple[Gram, Bool[Tensor, "*lead"]]:
    """Return the matrix A that makes `A F A'` and `A^-T G A^-1` equal and diagonal, and whether A is certain.

    A is uncertain if the rank of F or G cannot be determined because of rounding.

    F is the Gram matrix of the entries that A multiplies. G is the Gram matrix of the entries that the inverse
    transpose of A multiplies. With `F = L L'` and `L' G L = V D^2 V'`, the matrix A is `sqrt(D) V' L^-1`. A minimizes
    `tr A F A' + tr A^-T G A^-1`.

    If F or G is singular, no A makes `A F A'` and `A^-T G A^-1` equal and diagonal. On a subspace where only one of F
    and G is zero, A makes the other Gram matrix the identity, and makes the subspace orthogonal to the rest of the
    space. On the rest of the space, A makes `A F A'` and `A^-T G A^-1` equal and diagonal. For singular F or G, A is
    unique only up to a rotation.
    """
    n = forward.shape[-1]
    forward, inverse = _flushed(forward), _flushed(inverse)
    values, vectors = torch.linalg.eigh(forward)
    others = torch.linalg.eigvalsh(inverse)
    is_regular = torch.stack([_ratio(values) > certain, _ratio(others) > certain]).all(0)
    is_good, one = is_regular.clone(), torch.eye(n, dtype=forward.dtype)
    roots = values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    left = torch.where(is_regular[..., None, None], vectors * roots.unsqueeze(-2), one)
    # L comes from the eigenvectors of F, because Cholesky's factorization fails if F is singular up to rounding. The
    # eigenvalues of L' G L are D^2, so sqrt(D) is their fourth root.
    squares, turned = torch.linalg.eigh(left.mT @ torch.where(is_regular[..., None, None], inverse, one) @ left)
    undone = (vectors / roots.unsqueeze(-2)).mT
    matrix = squares.clamp_min(torch.finfo(squares.dtype).tiny).pow(0.25).unsqueeze(-1) * (turned.mT @ undone)
    matrix = torch.where(is_regular[..., None, None], matrix, one)
    for index in (~is_regular).nonzero().tolist():
        found = _singular(forward[tuple(index)], inverse[tuple(index)], zero, certain)
        if found is not None:
            matrix[tuple(index)], is_good[tuple(index)] = found, True
    return matrix, is_good


def _singular(forward: Gram, inverse: Gram, zero: float, certain: float) -> Gram | None:
    """Return the balancing matrix for Gram matrices of any rank, or None if a rank is uncertain because of rounding."""
    left, right = (_root(gram, zero, certain) for gram in (forward, inverse))
    if left is None or right is None:
        return None
    squares, turned = torch.linalg.eigh(left.mT @ inverse @ left)
    others, turned_back = torch.linalg.eigh(right.mT @ forward @ right)
    largest = float(forward.diagonal().sum() * inverse.diagonal().sum())
    ranks = [int((each > zero * largest).sum()) for each in (squares, others)]
    if ranks[0] != ranks[1] or bool(((squares > zero * largest) & (squares <= certain * largest)).any()):
        return None
    # Four parts of the space: both Gram matrices are nonzero, only the first is, only the second is, or neither is.
    dead, unread = left.shape[1] - ranks[0], right.shape[1] - ranks[0]
    both, alone = turned[:, dead:], turned[:, :dead]
    size = squares[dead:].sqrt()
    rows = [((left @ both).mT @ inverse) * size.pow(-1.5).unsqueeze(-1), (right @ turned_back[:, :unread]).mT]
    columns = [(left @ both) / size.sqrt(), left @ alone]
    fixed = torch.cat(rows)
    if fixed.shape[0] + columns[1].shape[1] > fixed.shape[1]:
        return None
    _, _, spanned = torch.linalg.svd(fixed)
    free = spanned[len(fixed) :].mT  # The null space of `fixed`. It contains the part where only the first is nonzero.
    rest, _, _ = torch.linalg.svd(free.mT @ columns[1])
    back = torch.linalg.pinv(fixed)[:, ranks[0] :]
    matrix, failed = torch.linalg.inv_ex(torch.cat([*columns, back, free @ rest[:, dead:]], 1))
    return matrix if not failed and bool(matrix.isfinite().all()) else None


def _flushed(gram: Gram) -> Gram:
    """Set tiny entries of a Gram matrix to zero, because LAPACK's eigenvalue solver would not converge otherwise.

    In null spaces, entries shrink with every step of balancing and become tiny.
    """
    return torch.where(gram.abs() > FAINT_ENTRY * gram.abs().amax((-1, -2), keepdim=True), gram, 0.0)


def _root(gram: Gram, zero: float, certain: float) -> Gram | None:
    """Return a matrix L with `gram = L L'`, which has as many columns as the rank of `gram`.

    If the rank is uncertain because of rounding, the result is None.
    """
    values, vectors = torch.linalg.eigh(gram)
    share = values / values[-1].clamp_min(torch.finfo(values.dtype).tiny)
    if bool(((share > zero) & (share <= certain)).any()):
        return None
    root: Tensor = vectors[:, share > zero] * values[share > zero].sqrt()
    return root


def _ratio(values: Float64[Tensor, "*lead n"]) -> Float64[Tensor, "*lead"]:
    """Return the ratio of the smallest to the largest eigenvalue, or zero for a zero matrix."""
    return values[..., 0] / values[..., -1].clamp_min(torch.finfo(values.dtype).tiny)


def root_of(product: Gram, power: float = 0.5) -> Gram:
    """Return the square root (or another power) of a symmetric positive definite matrix."""
    values, vectors = torch.linalg.eigh(product)
    root: Tensor = (vectors * values.clamp_min(0).pow(power).unsqueeze(-2)) @ vectors.mT
    return root


def null_space(rows: Sequence[Sequence[int]], count: int, *, modulus: int | None = None) -> list[tuple[int, ...]]:
    """Return integer vectors that span the null space of a matrix with the given rows.

    If `modulus`, a prime, is given, the computation is modulo this prime.

    Each returned vector has a nonzero entry at a position where all other returned vectors are zero.
    """

    # Rational arithmetic, because a rounded null vector would change entries that must stay the same.
    def wrap(values: Sequence[Fraction]) -> list[Fraction]:
        return list(values) if modulus is None else [Fraction(int(x) % modulus) for x in values]

    def divide(values: Sequence[Fraction], lead: Fraction) -> list[Fraction]:
        if modulus is None:
            return [x / lead for x in values]
        return wrap([x * pow(int(lead), -1, modulus) for x in values])

    reduced: list[tuple[int, list[Fraction]]] = []  # Rows with a leading one, each alone in its column.
    for row in rows:
        rest = wrap([Fraction(x) for x in row])
        for pivot, other in reduced:
            rest = wrap([x - rest[pivot] * y for x, y in zip(rest, other, strict=True)])
        if not any(rest):
            continue
        lead = next(k for k, x in enumerate(rest) if x)
        rest = divide(rest, rest[lead])
        reduced = [
            (pivot, wrap([y - other[lead] * x for x, y in zip(rest, other, strict=True)])) for pivot, other in reduced
        ]
        reduced.append((lead, rest))
    result = []
    for free in sorted(set(range(count)) - {pivot for pivot, _ in reduced}):
        vector = [Fraction(int(k == free)) for k in range(count)]
        for pivot, other in reduced:
            vector[pivot] = -other[free]
        vector = wrap(vector)
        scale = lcm(*(x.denominator for x in vector))
        result.append(tuple(int(x * scale) for x in vector))
    return result
