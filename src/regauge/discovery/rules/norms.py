"""Normalization layers, softmax, and vector norms."""

from collections.abc import Sequence
from typing import Any

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder, Over
from regauge.discovery.laws import Axis, Law, LawOf, Value
from regauge.discovery.operator_call import Call, NoRuleError, Rule, as_value, ints, named
from regauge.discovery.rules.reductions import dims_of


def softmax(b: Builder, call: Call) -> Value:
    return normalized(b, as_value(b, call.x), [call.get("dim", -1)])


def layer_norm(b: Builder, call: Call) -> Any:
    x = as_value(b, call["input"])
    axes = len(ints(call["normalized_shape"]))
    result = normalized(b, x, range(x.ndim - axes, x.ndim), over=law.centered if axes == 1 else _jointly)
    result = _affine(b, result, call.get("weight"), call.get("bias"), range(x.ndim - axes, x.ndim))
    return _with_statistics(b, call, result, [x])


def rms_norm(b: Builder, call: Call) -> Any:
    x = as_value(b, call["input"])
    axes = list(range(x.ndim - len(ints(call["normalized_shape"])), x.ndim))
    result = Value(x.layouts, x.shape)
    laws = []
    for k in range(x.ndim):
        i, o = x.axis(k), result.axis(k)
        if k in axes:
            laws.append(law.normed(i, o) if len(axes) == 1 else law.odd(i, o, mixes=True))
        else:
            laws.append(law.odd(i, o))
    b.record(*laws)
    return _with_statistics(b, call, _affine(b, result, call.get("weight"), None, axes), [x])


def group_norm(b: Builder, call: Call) -> Any:
    """Channels fall into groups; within a group all channels and positions are treated jointly."""
    x = as_value(b, call["input"])
    groups = call.first("num_groups", "group")
    n, c, *space = x.shape
    wide = as_value(b, b.view(x, [n, groups, c // groups, *space]))
    result = normalized(b, wide, range(2, wide.ndim), odd_dims=(1,))
    result = as_value(b, b.view(result, x.shape))
    result = _affine(b, result, call.get("weight"), call.get("bias"), [1])
    return _with_statistics(b, call, result, [x])


def instance_norm(b: Builder, call: Call) -> Value:
    x = as_value(b, call["input"])
    if not call["use_input_stats"]:
        return _batch_norm(b, x, call)
    result = normalized(b, x, range(2, x.ndim), odd_dims=(1,))
    return _affine(b, result, call.get("weight"), call.get("bias"), [1])


def batch_norm(b: Builder, call: Call) -> Any:
    x = as_value(b, call["input"])
    is_training = call.get("training", False) or call.get("running_mean") is None
    if is_training:
        others = [k for k in range(x.ndim) if k != 1]
        result = normalized(b, x, others, odd_dims=(1,))
        result = _affine(b, result, call.get("weight"), call.get("bias"), [1])
        for name in ("running_mean", "running_var"):
            if isinstance(call.get(name), Value):
                b.freeze(as_value(b, call[name]))
    else:
        result = _batch_norm(b, x, call)
    return _with_statistics(b, call, result, [x])


def _batch_norm(b: Builder, x: Value, call: Call) -> Value:
    """(x - mean) / sqrt(var + eps) * gain + bias: the variance admits no scale because of eps."""
    mean, var = as_value(b, call["running_mean"]), as_value(b, call["running_var"])
    b.tie(x.layouts[1], mean.layouts[0], var.layouts[0])
    result = Value(x.layouts, x.shape)
    i, m, v, o = x.axis(1), mean.axis(0), var.axis(0), result.axis(1)
    rows = ((1, -1, 0, 0), (1, 0, 0, -1), (0, 0, 1, 0))
    signs = ((1, 1, 0, 0), (1, 0, 0, 1), (0, 0, 1, 0))
    others = [law.fixed(x.axis(k), result.axis(k)) for k in range(x.ndim) if k != 1]
    # The shift of the running mean could take up a translation of x; translations end here instead.
    b.record(Law((i, m, v, o), rows, signs), *others)
    return _affine(b, result, call.get("weight"), call.get("bias"), [1])


def _jointly(i: Axis, o: Axis) -> Law:
    return law.fixed(i, o, mixes=True)


def normalized(
    b: Builder, x: Value, dims: Sequence[int], odd_dims: Sequence[int] = (), *, over: LawOf = _jointly
) -> Value:
    """A symmetric function of the entries along `dims`, jointly, with the law `over`; odd along `odd_dims`."""
    dims = [d % x.ndim for d in dims]
    result = Value(x.layouts, x.shape, virtual=x.virtual if x.virtual and x.virtual.dim not in dims else None)
    laws = []
    for k in range(x.ndim):
        i, o = x.axis(k), result.axis(k)
        if k in dims:
            laws.append(over(i, o))
        else:
            laws.append(law.odd(i, o) if k in odd_dims else law.fixed(i, o))
    b.record(*laws)
    return result


def vector_norm(b: Builder, call: Call) -> Value:
    x = as_value(b, call.x)
    dims = dims_of(call, x.ndim)
    order = call.first("ord", "p") if "ord" in call.arguments or "p" in call.arguments else 2
    over: Over = "norm" if order in (None, 2, 2.0) and len(dims) == 1 else "magnitude"
    # The "norm" of order zero counts what is not zero.
    return b.reduce(x, dims, bool(call.get("keepdim", False)), over, along=law.fixed if order == 0 else _absolute)


def weight_norm(b: Builder, call: Call) -> Value:
    """g * v / |v|, with the norm over all axes but one."""
    v, g, dim = as_value(b, call["v"]), as_value(b, call["g"]), call.get("dim", 0)
    if dim == -1:
        raise NoRuleError("weight norm over the whole tensor")
    dim %= v.ndim
    direction = Value(v.layouts, v.shape)
    normed = law.normed if v.ndim == 2 else lambda i, o: law.odd(i, o, mixes=True)
    b.record(
        # A scale of v cancels exactly: there is no epsilon.
        *(
            Law((v.axis(k), direction.axis(k)), ((0, 1),), ((1, 1),))
            if k == dim
            else normed(v.axis(k), direction.axis(k))
            for k in range(v.ndim)
        )
    )
    result = b.mul([direction, g], call.shape)
    return result


def _absolute(i: Axis, o: Axis) -> Law:
    return law.power(i, o, 1, is_even=True)


def _affine(b: Builder, x: Value, weight: Any, bias: Any, dims: Sequence[int]) -> Value:
    """Gain and bias along consecutive axes of x."""
    after = x.ndim - 1 - max(dims)
    for operand, combine in ((weight, b.mul), (bias, b.add)):
        if operand is not None:
            value = as_value(b, operand)
            for _ in range(after):
                value = as_value(b, b.unsqueeze(value, value.ndim))
            x = combine([x, value], x.shape)
    return x


def _with_statistics(b: Builder, call: Call, result: Value, operands: Sequence[Value]) -> Any:
    """Native norms also return statistics, which only training uses."""
    if len(call.shapes) == 1:
        return result
    return [result, *b.opaque(operands if any(call.is_used[1:]) else [], call.shapes[1:])]


RULES: dict[str, Rule] = {
    **named(softmax, "softmax _softmax log_softmax _log_softmax _safe_softmax"),
    **named(layer_norm, "layer_norm native_layer_norm"),
    **named(rms_norm, "rms_norm _fused_rms_norm"),
    **named(group_norm, "group_norm native_group_norm"),
    **named(batch_norm, "batch_norm _native_batch_norm_legit_no_training native_batch_norm"),
    **named(vector_norm, "linalg_vector_norm norm frobenius_norm"),
    "instance_norm": instance_norm,
    "_weight_norm": weight_norm,
}
