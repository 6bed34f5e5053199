"""Products of matrices, by the faster of the two libraries that torch brings.

Torch multiplies matrices in single precision by its BLAS, which on x86 is MKL. On processors that are not Intel's MKL
leaves half of the vector registers unused, and oneDNN, which torch multiplies convolutions with, takes half the time.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

LARGE = 2**21
"""Multiplications of one product from which on oneDNN's overhead of some microseconds pays."""
GAIN = 1.3
"""How much faster oneDNN must be to be used. It is twice as fast, or no faster."""
TRIED = 256
"""Width of the matrices with which that is found out, once in a process."""


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, for two matrices or two stacks of equally many."""
    if not _is_for_onednn(a, b):
        return a @ b
    return scaled_matmul(a, b, buffer=a.new_empty(len(a), a.shape[1], b.shape[2]) if a.ndim == 3 else a.new_empty(0))


def scaled_matmul(a: Tensor, b: Tensor, *, buffer: Tensor, shift: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """`factor * (a @ b + shift)`, without new memory where that can be.

    Args:
        a: A matrix `[rows, terms]` or a stack of them `[n, rows, terms]`.
        b: `[terms, columns]` or `[n, terms, columns]`.
        buffer: Where the result may be written, `[rows, columns]` or `[n, rows, columns]`; it shares no memory with the
            others.
        shift: What is added, of as many axes, or one for each column.
        factor: A number.

    Returns:
        The result, in the buffer or where oneDNN wrote it.
    """
    if not _is_for_onednn(a, b):
        multiply = torch.addmm if a.ndim == 2 else torch.baddbmm
        if shift is None:
            return multiply(buffer, a, b, beta=0, alpha=factor, out=buffer)
        return multiply(shift, a, b, beta=factor, alpha=factor, out=buffer)
    if a.ndim == 2:
        found = _by_onednn(a, b)
    elif len(a) == 1:
        found = _by_onednn(a[0], b[0]).unsqueeze(0)
    else:
        for one, other, into in zip(a, b, buffer, strict=True):
            into.copy_(_by_onednn(one, other))
        found = buffer
    if shift is not None:
        return torch.add(shift if factor == 1 else shift * factor, found, alpha=factor, out=buffer)
    return found if factor == 1 else found.mul_(factor)


def add_matmul(total: Tensor, a: Tensor, b: Tensor, *, factor: float = 1.0) -> None:
    """`total += factor * (a @ b)`, of matrices."""
    if _is_for_onednn(a, b):
        total.add_(_by_onednn(a, b), alpha=factor)
    else:
        total.addmm_(a, b, alpha=factor)


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    is_single = a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"
    is_large = is_single and a.ndim == b.ndim and a.shape[-2] * a.shape[-1] * b.shape[-1] >= LARGE
    return is_large and a.ndim in (2, 3) and not (a.requires_grad or b.requires_grad) and onednn_is_faster()


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.mT, None, "none", [], "")
    return found


def has_onednn() -> bool:
    """Whether torch was built with oneDNN and has its product of matrices where this module looks for it."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies large matrices faster than torch's BLAS here; tried once, in milliseconds."""
    if not has_onednn():
        return False
    a, b = torch.ones(2, TRIED, TRIED).unbind()
    return GAIN * _seconds(lambda: _by_onednn(a, b)) < _seconds(lambda: a @ b)


def _seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """The shortest of some runs."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
