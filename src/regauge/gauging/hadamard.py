"""Orthogonal matrices with entries of about equal magnitude: Hadamard matrices, or otherwise Hartley matrices."""

from functools import cache, reduce

import torch
from jaxtyping import Float64
from scipy.linalg import hadamard
from torch import Tensor

Square = Float64[Tensor, "n n"]
"""An orthogonal matrix."""


SYLVESTER = 32
"""The largest size of a Sylvester matrix that is stored. Larger Sylvester matrices are Kronecker products of smaller
matrices."""


@cache
def flat_rotation(n: int) -> Square:
    """Return an orthogonal matrix with entries of about equal magnitude, and with a constant first row and column.

    All entries are `± n^-1/2` if a Hadamard matrix of the size is known. Known matrices are Sylvester's for powers of
    two, Paley's for 12, 20, 28, 36, 44 and other sizes, and Kronecker products of known matrices. Matrices of other
    sizes need a further Kronecker factor, the matrix of the discrete Hartley transform. The entries of a Hartley matrix
    of size n are at most `(2 / n)^1/2`.

    References:
        Paley (1933), On orthogonal matrices; Bracewell (1983), Discrete Hartley transform.
    """
    product: Square = reduce(torch.kron, flat_factors(n))
    return product


@cache
def flat_factors(n: int) -> tuple[Square, ...]:
    """Return orthogonal matrices, as small as possible, whose Kronecker product is `flat_rotation(n)`."""
    if n < 1:
        raise ValueError(f"there is no rotation of {n} units; give one or more")
    order = max((k for k in range(1, n + 1) if n % k == 0 and _hadamard(k) is not None), default=1)
    first = _hadamard(order) or ()
    return (*(one / len(one) ** 0.5 for one in first), *((_hartley(n // order),) if order < n or n == 1 else ()))


def _hartley(n: int) -> Square:
    k = torch.arange(n, dtype=torch.float64)
    angles = 2 * torch.pi * (k.unsqueeze(1) * k % n) / n
    matrix: Tensor = (angles.cos() + angles.sin()) / n**0.5
    return matrix


@cache
def _hadamard(n: int) -> tuple[Square, ...] | None:
    """Return factors of a Hadamard matrix with ones in its first row and column, or None if no such matrix is known."""
    odd = n
    while odd % 2 == 0:
        odd //= 2
    if odd == 1:
        return _sylvester(n)
    base = 4 * odd
    while n % base == 0:
        found = _paley(base)
        if found is not None:
            return (found, *_sylvester(n // base))
        base *= 2
    for k in range(2, int(n**0.5) + 1):
        if n % k == 0:
            left, right = _hadamard(k), _hadamard(n // k)
            if left is not None and right is not None:
                return (*left, *right)
    return None


def _sylvester(n: int) -> tuple[Square, ...]:
    """Return Kronecker factors of Sylvester's matrix, whose size is a power of two; the factors have about
    equal sizes.
    """
    exponent, count = n.bit_length() - 1, -(-(n.bit_length() - 1) // (SYLVESTER.bit_length() - 1))
    sizes = [2 ** ((exponent + k) // count) for k in range(count)]
    return tuple(torch.from_numpy(hadamard(size)).double() for size in sizes)


def _paley(n: int) -> Square | None:
    """Return Paley's first construction if n - 1 is a prime, or the second construction if n / 2 - 1 is a prime."""
    if _is_prime(n - 1):
        core = _conference(n - 1)  # skew, because n - 1 is 3 modulo 4
        return _normalize(torch.eye(n, dtype=torch.float64) + core)
    q = n // 2 - 1
    if q % 4 == 1 and _is_prime(q):
        core = _conference(q)
        ones = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        others = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return _normalize(torch.kron(core, ones) + torch.kron(torch.eye(q + 1, dtype=torch.float64), others))
    return None


def _conference(q: int) -> Square:
    """Return Jacobsthal's matrix of quadratic residues modulo a prime, bordered by ones."""
    squares = {k * k % q for k in range(1, q)}
    character = torch.tensor([0.0, *(1.0 if k in squares else -1.0 for k in range(1, q))], dtype=torch.float64)
    k = torch.arange(q)
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = 1.0 if q % 4 == 1 else -1.0
    matrix[1:, 1:] = character[(k.unsqueeze(1) - k) % q]
    return matrix


def _normalize(matrix: Square) -> Square:
    matrix = matrix * matrix[:, :1]
    return matrix * matrix[:1]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))
