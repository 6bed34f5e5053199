"""Sums, means, extrema, ranks, cumulative sums and transforms along axes."""

from collections.abc import Sequence
from typing import Any

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder, Over
from regauge.discovery.laws import LawOf, Value
from regauge.discovery.open_orders import OpenOrder
from regauge.discovery.operators import Call, NoRuleError, Rule, as_value, ints, named


def dims_of(call: Call, ndim: int) -> list[int]:
    """Return the axes over which a call reduces a tensor. If the call names no axes, return all axes."""
    dim = call.arguments.get("dim")
    if dim is None or dim in ([], ()):
        return list(range(ndim))
    return [d % ndim for d in ints(dim)]


def reduce(b: Builder, x: Value, call: Call, along: LawOf, over: Over = "sum") -> Value:
    return b.reduce(x, dims_of(call, x.ndim), bool(call.get("keepdim", False)), over, along=along)


def reduction(along: LawOf) -> Rule:
    """Return a rule for a symmetric reduction, given the constraint (law) on the remaining axes."""

    def rule(b: Builder, call: Call) -> Value:
        return reduce(b, as_value(b, call.x), call, along)

    return rule


def sum_of_squares(b: Builder, call: Call) -> Value:
    """Return the sum or mean of x ** 2, which rotations do not change. Many models write RMS norms as a mean of
    squares.
    """
    return reduce(b, call.x.factors[0], call, law.squared, "norm")


def sum_of_products(b: Builder, call: Call) -> Value:
    """Return the sum or mean of x * y over one axis.

    The sum of x * y is an inner product, which does not change if matrices act inversely on the two factors.
    """
    (dim,) = dims_of(call, len(call.x.shape))
    result = inner_product(b, call.x.factors, call.x.shape, dim)
    return b.unsqueeze(result, dim) if call.get("keepdim", False) else result


def inner_product(b: Builder, factors: Sequence[Value], shape: Sequence[int], dim: int) -> Value:
    """Return the product of tensors, broadcast to a shape and summed over one axis."""
    kept = [k for k in range(len(shape)) if k != dim]

    def labels(x: Value) -> list[int | None]:
        own = range(len(shape) - x.ndim, len(shape))
        return [None if x.shape[d] != shape[k] or d in x.uniform else k for d, k in enumerate(own)]

    return b.multilinear([(x, labels(x)) for x in factors], kept, [shape[k] for k in kept])


def vector_norm(b: Builder, call: Call) -> Value:
    x = as_value(b, call.x)
    order = call.first("ord", "p") if "ord" in call.arguments or "p" in call.arguments else 2
    over: Over = "norm" if order in (None, 2, 2.0) and len(dims_of(call, x.ndim)) == 1 else "magnitude"
    # The "norm" of order zero counts what is not zero.
    result = reduce(b, x, call, law.fixed if order == 0 else law.magnitude, over)
    result.is_norm = order != 0
    return result


def variance(b: Builder, call: Call) -> list[Value]:
    x = as_value(b, call.x)
    spread = reduce(b, x, call, law.squared if call.name.startswith("var") else law.magnitude)
    return [spread] if len(call.shapes) == 1 else [spread, reduce(b, x, call, law.linear)]


def extremum(b: Builder, call: Call) -> Any:
    """Return the maximum or minimum of two tensors, of all entries, or along one axis together with its position."""
    if "other" in call.arguments:
        return b.maximum([as_value(b, v) for v in list(call.arguments.values())[:2]], call.shape)
    x = as_value(b, call.x)
    values = reduce(b, x, call, law.positive)
    if len(call.shapes) == 1:
        return [values]
    return [values, _winner(b, x, call) if call.is_used[1] else Value.fixed(call.shapes[1])]


def ranked(b: Builder, call: Call) -> Any:
    """Return an entry of given rank, or the most frequent entry, together with its position.

    Scales of the tensor multiply the selected entry. Signs are not possible, because they reverse the order.
    """
    x = as_value(b, call.x)
    values = reduce(b, x, call, law.positive)
    return [values] if len(call.shapes) == 1 else [values, _winner(b, x, call)]


def histogram(b: Builder, call: Call) -> Value:
    """Return a histogram: the number of entries in each of several ranges."""
    return b.carry(as_value(b, call.x), [None], call.shape, law.fixed, reason=f"{b.op}: ranges")


def order(b: Builder, call: Call) -> list[Value]:
    """Return the sorted or the largest entries, and their positions (sort, topk, argsort).

    The ranks of the results cannot be permuted, unless the operator leaves the order of its results unspecified. The
    returned positions point into the axis along which entries are compared.
    """
    x = as_value(b, call.x)
    is_open = not call.get("sorted", True)
    if is_open and b.node in b.sensitive:
        raise NoRuleError("an order that is left open, and matters")
    dim = call.get("dim", -1) % x.ndim
    results = []
    for k, shape in enumerate(call.shapes):
        is_index = call.name == "argsort" or k == 1
        along = law.compared if is_index else law.positive
        reason = None if is_open else f"{b.op}: ranks"
        result = b.carry(x, _without(x, dim), shape, along, ended=law.shared, reason=reason)
        result.index_of = x.layouts[dim] if is_index else None
        results.append(result)
    if is_open:
        b.tie(*(result.layouts[dim] for result in results))
        b.orders.append(OpenOrder(b.node, results[0], dim))
    return results


def accumulate(b: Builder, call: Call) -> list[Value]:
    """Return cumulative sums or maxima.

    The axis of the cumulation is frozen, and transformations of the other axes also act on the result.
    """
    x = as_value(b, call.x)
    sources = _without(x, call["dim"] % x.ndim)
    along = {"cumsum": law.linear, "cummax": law.positive, "cummin": law.positive}.get(call.name, law.fixed)
    return [
        b.carry(x, sources, shape, along if is_float else law.compared, ended=None, reason=b.op)
        for shape, is_float in zip(call.shapes, call.is_float, strict=True)
    ]


def transform(b: Builder, call: Call) -> Value:
    """Return Fourier transforms.

    The transformed axes are frozen, and transformations of the other axes also act on the result.
    """
    x, dim = as_value(b, call.x), call.arguments.get("dim")
    if dim is None:
        dim = range(-len(call.get("s", x.shape)), 0)
    ended = {d % x.ndim for d in ints(dim)}
    sources = [None if d in ended else d for d in range(x.ndim)]
    return b.carry(x, sources, call.shape, law.linear, ended=None, reason=f"{b.op}: frequencies")


def _without(x: Value, dim: int) -> list[int | None]:
    """Return the indices of all axes of a tensor. None replaces axis `dim`, because the result has a new axis there."""
    return [None if d == dim else d for d in range(x.ndim)]


def _winner(b: Builder, x: Value, call: Call) -> Value:
    dim = call.arguments.get("dim")
    if dim is None:
        return b.opaque([x], [call.shapes[-1]])[0]
    dim %= x.ndim
    sources = _without(x, dim) if call.get("keepdim", False) else [d for d in range(x.ndim) if d != dim]
    result = b.carry(x, sources, call.shapes[-1], law.compared, ended=law.shared)
    result.index_of = x.layouts[dim]
    return result


RULES: dict[str, Rule] = {
    **named(reduction(law.linear), "sum mean nansum nanmean"),
    **named(reduction(law.positive), "amax amin"),
    **named(reduction(law.fixed), "logsumexp any all prod"),
    **named(vector_norm, "linalg_vector_norm norm frobenius_norm"),
    **named(variance, "var std var_mean std_mean"),
    **named(extremum, "max min"),
    **named(lambda b, call: _winner(b, as_value(b, call.x), call), "argmax argmin"),
    **named(ranked, "kthvalue median nanmedian mode"),
    **named(order, "sort topk argsort"),
    "histc": histogram,
    **named(accumulate, "cumsum cumprod logcumsumexp cummax cummin"),
    **named(
        transform, "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2"
    ),
    **named(transform, "fft_fftn fft_ifftn fft_rfftn fft_irfftn _fft_r2c _fft_c2c _fft_c2r"),
}
