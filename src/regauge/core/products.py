"""Matrix products, computed by one of the two libraries that torch contains.

In single precision, torch multiplies matrices with its BLAS, which is MKL on x86 processors. With the setting
`"onednn"`, oneDNN multiplies large matrices. Torch uses oneDNN for convolutions. MKL and oneDNN round differently, and
rounding differences grow during long training. If measured speeds determined the library, results would depend on the
measurement. Therefore the default library depends only on the processor. The environment variable `REGAUGE_PRODUCTS`
and the function `set_library` override the default. If an output is computed in several runs, the library is recorded
in the output. The training of convolutional networks uses the same setting (`training/chains/image_chain.py`).

MKL does not use AVX-512 on processors of other makers than Intel. On an AMD EPYC, MKL reached 98 GFLOP/s with 1,024 x
1,024 matrices, and oneDNN 209 (`benchmarks/README.md`). On an Intel Xeon with AVX-512, oneDNN is slower. On the Xeon,
oneDNN reached 0.91 of MKL's throughput with 1,024 x 1,024 matrices, and 0.48 to 1.01 with other shapes. Therefore the
default on Intel processors is torch's BLAS.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from os import environ
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

Library = Literal["blas", "onednn"]
VARIABLE = "REGAUGE_PRODUCTS"
"""The environment variable that chooses the library for matrix products."""
LARGE_PRODUCT = 2**21
"""The number of multiplications above which oneDNN computes one product faster, in spite of its overhead."""

_chosen: Library | None = None
_used: ContextVar[Library | None] = ContextVar("used library", default=None)


def library() -> Library:
    """Return the library used for matrix products: the chosen one, or the default for this processor."""
    return chosen_library() or default_library()


def chosen_library() -> Library | None:
    """Return the library chosen by `use_library`, `set_library` or the environment, or None if none was chosen."""
    known = _used.get() or _chosen
    if known is not None:
        return known
    name = environ.get(VARIABLE)
    return require_library(name, f"the environment variable {VARIABLE}") if name else None


def set_library(name: Library | None) -> None:
    """Use the named library for matrix products in this process from now on.

    The name None restores the library that the environment names, or the default.
    """
    global _chosen
    _chosen = None if name is None else require_library(name, "the library of matrix products")


@contextmanager
def use_library(name: Library | None) -> Iterator[None]:
    """Use the named library for matrix products within a `with` block, in this thread.

    If the name is None, the library is not changed.
    """
    found = _used.get() if name is None else require_library(name, "the library of matrix products")
    token = _used.set(found)
    try:
        yield
    finally:
        _used.reset(token)


@cache
def default_library() -> Library:
    """Return oneDNN for x86 processors with AVX-512 that Intel did not make, and the BLAS for all others."""
    find = getattr(torch.cpu, "get_capabilities", None)
    found = find() if find is not None else {}
    is_intel = str(found.get("cpu_name", "Intel")).startswith("Intel")
    return "onednn" if found.get("avx512_f") and not is_intel and has_onednn() else "blas"


def require_library(name: str, what: str) -> Library:
    """Return the name of a library for matrix products if torch has this library.

    Raise a ValueError if the name is unknown or this build of torch lacks the library.
    """
    for known in get_args(Library):
        if known == name and (known == "blas" or has_onednn()):
            return cast(Library, known)
    reason = "this torch was built without it" if name in get_args(Library) else "the libraries are blas and onednn"
    raise ValueError(f"{what} is {name!r}, but {reason}")


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` for two matrices, or for two stacks with the same number of matrices."""
    if not _is_for_onednn(a, b):
        return a @ b
    return scaled_matmul(a, b, buffer=a.new_empty(len(a), a.shape[1], b.shape[2]) if a.ndim == 3 else a.new_empty(0))


def scaled_matmul(a: Tensor, b: Tensor, *, buffer: Tensor, shift: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Return `factor * (a @ b + shift)` for matrices or stacks of matrices, without allocating memory if possible.

    The result is stored in `buffer`, or in memory that oneDNN allocated. `buffer` must not share memory with the other
    arguments. The argument `shift` must have as many axes as the product, or one entry for each column.
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
    """Compute `total += factor * (a @ b)` in place, for matrices."""
    if _is_for_onednn(a, b):
        total.add_(_by_onednn(a, b), alpha=factor)
    else:
        total.addmm_(a, b, alpha=factor)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, with gradients, as `torch.nn.functional.linear` does.

    Args:
        x: The input rows, `[..., inputs]`.
        weight: The matrix, `[outputs, inputs]`.
        bias: The bias, `[outputs]`.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    is_large = x.numel() * len(weight) >= LARGE_PRODUCT
    if not is_large or not all(map(_is_plain, given)) or _is_rewritten() or library() != "onednn":
        return torch.nn.functional.linear(x, weight, bias)
    made: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
    return made.reshape(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    """A linear map of rows as an autograd function.

    The gradients of the map use the same library for matrix products, and can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        return _by_onednn(x, weight.mT, bias)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = tangents
        parts = [
            None if of_x is None else linear(of_x, weight),
            None if of_weight is None else linear(x, of_weight),
            None if of_bias is None else of_bias.expand(len(x), -1),
        ]
        return torch.stack([part for part in parts if part is not None]).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (given,) = gradients
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            linear(given, weight.mT) if needs_x else None,
            # The longer factor first: oneDNN copies the second one.
            (linear(given.mT, x.mT) if x.shape[1] <= given.shape[1] else linear(x.mT, given.mT).mT)
            if needs_weight
            else None,
            given.sum(0) if needs_bias else None,
        )


def _is_rewritten() -> bool:
    """Return whether torch is compiling the operators or choosing their precision (autocast)."""
    return torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")


def _is_plain(tensor: Tensor) -> bool:
    """Return whether oneDNN can multiply a tensor without copying, and no function transform tracks this tensor."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    is_large = a.ndim == b.ndim and a.ndim in (2, 3) and a.shape[-2] * a.shape[-1] * b.shape[-1] >= LARGE_PRODUCT
    return is_large and all(_is_plain(t) and not t.requires_grad for t in (a, b)) and library() == "onednn"


def _by_onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.mT, bias, "none", [], "")
    return found


def has_onednn() -> bool:
    """Return whether torch was built with oneDNN and has the operator for its matrix product."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")
