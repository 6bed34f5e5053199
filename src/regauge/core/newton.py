"""Newton's method for the smallest norm of networks under scales and matrices."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool

from regauge.core.squared_norm import Array, Limits, SquaredNorm, Steps

STEPS = 60
"""Most steps; where the norm has no smallest value they would go on for ever."""
PRODUCTS = 500
"""Most products with the Hessian in a step."""
ALL_PRODUCTS = 1500
"""Most of them in all steps. Chains of 256 layers take 1,150; values that nobody initialized would take any number."""
LONGEST_STEP = 2.0
"""The largest change of a logarithm in one step."""
FAR = 0.1
"""A longer step begins with exact steps of singular matrices."""
LARGEST_SHARE, SMALLEST_SHARE = 0.25, 1e-5
"""Shares of the slopes that a step leaves at most and at least."""
FLOOR = 1e-14
"""Changes of logarithms that are lost in rounding."""
FLAT = 1e-9
"""Curvature, as a share of the preconditioner's, at which a direction is flat."""
HALVINGS = 30
"""Most halvings of a step that makes the norm larger."""


def minimize(
    norm: SquaredNorm, rigid: Mapping[str, Bool[np.ndarray, " batch"]], tolerance: float, limits: Limits
) -> None:
    """Move scales and matrices to the smallest norm.

    An exact step of each group alone comes first, which also tells which matrices are singular. Newton's steps follow
    until what one leaves, its square, is below the tolerance.

    Args:
        norm: The norm.
        rigid: For each group of matrices the networks in which it keeps the identity. Networks are added if the matrix
            may be singular, or if the norm has no smallest value.
        tolerance: The logarithms of factors are found to about this.
        limits: Which eigenvalues of Gram matrices are zero, and which are not.

    References:
        Cohen, Madry, Tsipras and Vladu (2017), Matrix scaling and balancing via box constrained Newton's method;
        Burgisser, Franks, Garg, Oliveira, Walter and Wigderson (2019), Towards a theory of non-commutative
        optimization; Eisenstat and Walker (1996), Choosing the forcing terms in an inexact Newton method.
    """
    is_left = np.ones(len(norm.logs), dtype=bool)
    norm.sweep()
    for group, flags in rigid.items():
        norm.balance(group, flags, is_left, limits)
    norm.sweep()
    step, length, products = norm.slopes()[0], np.full((len(is_left), 1), np.inf), 0
    for _ in range(STEPS if step.size else 0):
        if products >= ALL_PRODUCTS:
            break
        for group in norm.singular:
            # Far away these may curve downwards; their rank is known.
            norm.balance(group, rigid[group], is_left & (length[:, 0] > FAR), (limits[1], limits[1]))
        objective = norm.objective()
        gradient, diagonal = norm.slopes()
        step, count = _solve(norm, -gradient * is_left[:, None], diagonal)
        products += count
        length = _longest(step)
        taken = step * np.minimum(1.0, LONGEST_STEP / np.maximum(length, LONGEST_STEP))
        norm.move(taken)
        for _ in range(HALVINGS):
            is_worse = norm.objective() > objective + 1e-12 * norm.norm
            if not is_worse.any():
                break
            taken = taken / 2 * is_worse[:, None]
            norm.move(-taken)
        is_left &= (length * np.maximum(length, SMALLEST_SHARE))[:, 0] > tolerance
        if not is_left.any():
            return
    for group, matrices in norm.matrices(step).items():
        rigid[group][...] |= np.abs(matrices).reshape(len(matrices), -1).max(1) ** 2 > tolerance


def _solve(norm: SquaredNorm, right: Steps, diagonal: Steps) -> tuple[Steps, int]:
    """Return the x with `H x = right` by conjugate gradients, with the diagonal of the Hessian as preconditioner.

    The second result is the number of products with H that it took.

    Where singular matrices make a direction curve downwards, or hardly at all, it ends with what it has.
    """
    inverse = np.divide(1.0, diagonal, out=np.zeros_like(diagonal), where=diagonal > 0)
    x, residual, scaled = np.zeros_like(right), right, inverse * right
    direction, square, length = scaled, _dot(right, scaled), _longest(scaled)
    limit = np.maximum(length * np.clip(length, SMALLEST_SHARE, LARGEST_SHARE), FLOOR)
    is_done = length <= FLOOR
    for k in range(PRODUCTS):
        product = norm.product(direction)
        curvature = _dot(direction, product)
        is_flat = curvature <= FLAT * _dot(direction, diagonal * direction)
        if k == 0:
            x = np.where(is_flat, direction, x)
        is_done |= is_flat
        share = np.divide(square, curvature, out=np.zeros_like(square), where=~is_done)
        x, residual = x + share * direction, residual - share * product
        scaled = inverse * residual
        is_done |= _longest(scaled) <= limit
        if is_done.all():
            break
        before, square = square, _dot(residual, scaled)
        direction = scaled + np.divide(square, before, out=np.zeros_like(square), where=~is_done) * direction
    return x, 1 + k


def _dot(x: Steps, y: Steps) -> Array:
    found: Array = np.einsum("bk,bk->b", x, y)[:, None]
    return found


def _longest(x: Steps) -> Array:
    found: Array = np.abs(x).max(1, keepdims=True)
    return found
