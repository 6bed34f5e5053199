"""Sums, means, extrema and pooling."""

from typing import Any

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import Axis, Law, LawOf, Value
from regauge.discovery.layout import leaf
from regauge.discovery.operator_call import Call, NoRuleError, Rule, as_value, ints, named


def dims_of(call: Call, ndim: int) -> list[int]:
    """The axes that a reduction runs over; all of them where none is named."""
    dim = call.arguments.get("dim")
    if dim is None or dim in ([], ()):
        return list(range(ndim))
    return [d % ndim for d in ints(dim)]


def reduction(along: LawOf) -> Rule:
    """A rule for a symmetric reduction with the given law for the axes that stay."""

    def rule(b: Builder, call: Call) -> Value:
        x = as_value(b, call.x)
        return b.reduce(x, dims_of(call, x.ndim), bool(call.get("keepdim", False)), along=along)

    return rule


def sum_of_squares(b: Builder, call: Call) -> Value:
    """sum or mean of x ** 2: the rotation-invariant form in which RMS norms are written."""
    x: Value = call.x.base
    return b.reduce(x, dims_of(call, x.ndim), bool(call.get("keepdim", False)), "norm", along=_square)


def variance(b: Builder, call: Call) -> Any:
    x = as_value(b, call.x)
    exponent = 2 if call.name.startswith("var") else 1
    spread = b.reduce(
        x, dims_of(call, x.ndim), bool(call.get("keepdim", False)),
        along=lambda i, o: law.power(i, o, exponent, is_even=True),
    )  # fmt: skip
    if len(call.shapes) == 1:
        return spread
    return [spread, b.reduce(x, dims_of(call, x.ndim), bool(call.get("keepdim", False)))]


def extremum(b: Builder, call: Call) -> Any:
    """max and min: of two tensors, over everything, or over one axis with the index of the winner."""
    if "other" in call.arguments:
        return b.maximum([as_value(b, v) for v in list(call.arguments.values())[:2]], call.shape)
    x = as_value(b, call.x)
    values = b.reduce(x, dims_of(call, x.ndim), bool(call.get("keepdim", False)), along=law.positive)
    return values if len(call.shapes) == 1 else [values, _winner(b, x, call)]


def index_of_extremum(b: Builder, call: Call) -> Value:
    return _winner(b, as_value(b, call.x), call)


def ordered(b: Builder, call: Call) -> Any:
    """sort and topk: ranks have a fixed meaning, and the indices point into the axis that was sorted."""
    x = as_value(b, call.x)
    if not call.get("sorted", True):
        raise NoRuleError("an order that is left open")
    dim = call.get("dim", -1) % x.ndim
    reason = f"{b.op}: ranks"
    results = []
    for k, shape in enumerate(call.shapes):
        is_index = call.name == "argsort" or k == 1
        layouts = [leaf(shape[d], reason) if d == dim else x.layouts[d] for d in range(x.ndim)]
        along = law.compared if is_index else law.positive
        result = Value(layouts, shape, index_of=x.layouts[dim] if is_index else None)
        laws = [along(x.axis(d), result.axis(d)) for d in range(x.ndim) if d != dim]
        b.record(*laws, Law((x.axis(dim),), is_shared=True), law.fixed(result.axis(dim), mixes=True))
        results.append(result)
    return results if len(results) > 1 else results[0]


def cumulative(b: Builder, call: Call) -> Any:
    """Running sums and maxima: the order of that axis counts, the others pass."""
    x = as_value(b, call.x)
    dim = call["dim"] % x.ndim
    along = {"cumsum": law.linear, "cummax": law.positive, "cummin": law.positive}.get(call.name, law.fixed)
    results = []
    for shape, is_float in zip(call.shapes, call.is_float, strict=True):
        result = Value(x.layouts, shape)
        law_here = along if is_float else law.compared
        laws = [law_here(x.axis(d), result.axis(d)) for d in range(x.ndim) if d != dim]
        b.record(*laws, law.fixed(x.axis(dim), result.axis(dim), mixes=True))
        b.freeze(result, [dim])
        results.append(result)
    return results if len(results) > 1 else results[0]


def pool(along: LawOf) -> Rule:
    """A rule for pooling and resampling: spatial axes are frozen, channels have the given law."""

    def rule(b: Builder, call: Call) -> Any:
        x = as_value(b, call.x)
        digits = [c for c in call.name if c.isdigit()]
        space = int(digits[-1]) if digits else x.ndim - 2
        lead = x.ndim - space
        results = []
        for k, shape in enumerate(call.shapes):
            reason = f"{b.op}: spatial axis"
            is_global = all(n == 1 for n in shape[lead:]) and "adaptive" in call.name and k == 0
            layouts = [*x.layouts[:lead], *(leaf(n, reason) for n in shape[lead:])]
            result = Value(layouts, shape)
            law_here = law.compared if k else along
            laws = [law_here(x.axis(d), result.axis(d)) for d in range(lead)]
            if is_global:
                laws.extend(law.fixed(x.axis(d)) for d in range(lead, x.ndim))
            b.record(*laws, *(law.fixed(result.axis(d), mixes=True) for d in range(lead, x.ndim)))
            results.append(result)
        return results if len(results) > 1 else results[0]

    return rule


def _winner(b: Builder, x: Value, call: Call) -> Value:
    dim = call.arguments.get("dim")
    if dim is None:
        return b.opaque([x], [call.shapes[-1]])[0]
    dim %= x.ndim
    keepdim = bool(call.get("keepdim", False))
    kept = [k for k in range(x.ndim) if k != dim]
    layouts = [leaf(1) if k == dim else x.layouts[k] for k in (range(x.ndim) if keepdim else kept)]
    result = Value(layouts, call.shapes[-1], index_of=x.layouts[dim])
    where = {k: k if keepdim else j for j, k in enumerate(kept)}
    laws = [law.compared(x.axis(k), result.axis(where[k])) for k in kept]
    b.record(*laws, Law((x.axis(dim),), is_shared=True))
    return result


def _square(i: Axis, o: Axis) -> Law:
    return law.power(i, o, 2, is_even=True)


RULES: dict[str, Rule] = {
    **named(reduction(law.linear), "sum mean nansum nanmean"),
    **named(reduction(law.positive), "amax amin"),
    **named(reduction(law.fixed), "logsumexp any all prod"),
    **named(variance, "var std var_mean std_mean"),
    **named(extremum, "max min"),
    **named(index_of_extremum, "argmax argmin"),
    **named(ordered, "sort topk argsort"),
    **named(cumulative, "cumsum cumprod logcumsumexp cummax cummin"),
    **named(pool(law.positive), "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d"),
    **named(pool(law.positive), "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool3d"),
    **named(pool(law.linear), "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d"),
    **named(pool(law.linear), "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d"),
    **named(pool(law.linear), "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d"),
    **named(pool(law.linear), "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"),
    **named(pool(law.linear), "_upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
}
