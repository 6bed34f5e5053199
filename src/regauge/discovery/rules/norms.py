"""Normalization layers and softmax."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import Axis, Law, LawOf, Value
from regauge.discovery.operators import Call, NoRuleError, Rule, as_value, ints, named
from regauge.discovery.rules.reductions import inner_product


def normalize(
    b: Builder, x: Value, dims: Sequence[int], odd_dims: Sequence[int] = (), *, over: LawOf = law.mixed
) -> Value:
    """Return the result of a function that treats the entries along the axes `dims` jointly and symmetrically.

    The argument `over` is the constraint (law) on the axes `dims`. The function is odd along the axes `odd_dims`: if
    the input changes its sign, so does the output.
    """
    dims = [d % x.ndim for d in dims]

    def along(i: Axis, o: Axis) -> Law:
        own = over if i.dims[0] in dims else law.odd if i.dims[0] in odd_dims else law.fixed
        return own(i, o)

    result = b.unary(x, along)
    if result.virtual is not None and result.virtual.dim in dims:
        result.virtual = None
    return result


def layer_norm(b: Builder, call: Call) -> list[Value]:
    """Return LayerNorm or RMSNorm. RMSNorm is an odd function and does not subtract the mean."""
    x = as_value(b, call["input"])
    dims = range(x.ndim - len(ints(call["normalized_shape"])), x.ndim)
    if "rms" in call.name:
        result = normalize(b, x, dims, range(dims[0]), over=law.normed if len(dims) == 1 else _odd_jointly)
    else:
        result = normalize(b, x, dims, over=law.centered if len(dims) == 1 else law.mixed)
    return _with_statistics(b, call, x, _affine(b, result, call, dims))


def group_norm(b: Builder, call: Call) -> list[Value]:
    """Return group normalization, which treats all channels and positions of a group jointly."""
    x = as_value(b, call["input"])
    n, c, *space = x.shape
    groups = call.first("num_groups", "group")
    wide = as_value(b, b.view(x, [n, groups, c // groups, *space]))
    result = as_value(b, b.view(normalize(b, wide, range(2, wide.ndim), odd_dims=(1,)), x.shape))
    return _with_statistics(b, call, x, _affine(b, result, call, [1]))


def channel_norm(b: Builder, call: Call) -> list[Value]:
    """Return batch or instance normalization, by statistics of the input or by running statistics."""
    x = as_value(b, call["input"])
    if call.name == "instance_norm":
        has_own, dims = call["use_input_stats"], list(range(2, x.ndim))
    else:
        has_own, dims = call.get("training", False), [k for k in range(x.ndim) if k != 1]
    running = [as_value(b, call[key]) for key in ("running_mean", "running_var") if isinstance(call.get(key), Value)]
    if has_own or not running:
        result = normalize(b, x, dims, odd_dims=(1,))
        for value in running:
            b.freeze(value)
    else:
        result = _standardize(b, x, *running)
    return _with_statistics(b, call, x, _affine(b, result, call, [1]))


def _standardize(b: Builder, x: Value, mean: Value, var: Value) -> Value:
    """Return (x - mean) / sqrt(var + eps). Because of eps, the variance cannot be scaled."""
    b.tie(x.layouts[1], mean.layouts[0], var.layouts[0])
    result = Value(x.layouts, x.shape)
    rows = ((1, -1, 0, 0), (1, 0, 0, -1), (0, 0, 1, 0))
    signs = ((1, 1, 0, 0), (1, 0, 0, 1), (0, 0, 1, 0))
    # A shift of the running mean could compensate for a translation of x, but this rule allows no translations.
    own = Law((x.axis(1), mean.axis(0), var.axis(0), result.axis(1)), rows, signs)
    b.record(own, *(law.fixed(x.axis(k), result.axis(k)) for k in range(x.ndim) if k != 1))
    return result


def weight_norm(b: Builder, call: Call) -> Value:
    """Return g * v / |v|, where the norm of v is over all axes or over all axes but one."""
    v, g, dim = as_value(b, call["v"]), as_value(b, call["g"]), call.get("dim", 0)
    if dim == -1:
        # Only a scale that all entries share cancels.
        along = law.normed if v.ndim <= 2 else _odd_jointly
        return b.mul([b.unary(v, along), g], call.shape)
    own = law.entrywise((0, 1), (1, 1))  # A scale of v cancels exactly: there is no epsilon.
    others = law.normed if v.ndim == 2 else _odd_jointly
    direction = b.unary(v, lambda i, o: (own if i.dims[0] == dim % v.ndim else others)(i, o))
    return b.mul([direction, g], call.shape)


def cosine_similarity(b: Builder, call: Call) -> Value:
    """Return x y / (|x| |y|), summed over one axis. A scale of x cancels as long as the norm of x exceeds eps."""
    x, y = as_value(b, call["x1"]), as_value(b, call["x2"])
    shape = np.broadcast_shapes(x.shape, y.shape)
    dim = call.get("dim", 1) % len(shape)
    if x.shape[dim - len(shape)] != y.shape[dim - len(shape)]:
        raise NoRuleError("a cosine along an axis that one of the tensors lacks")
    cancels = law.entrywise((0, 1), (1, 1))

    def direction(v: Value) -> Value:
        own = dim - len(shape) + v.ndim
        return b.unary(v, lambda i, o: (law.normed if i.dims[0] == own else cancels)(i, o))

    return inner_product(b, [direction(v) for v in b.distinct([x, y])], shape, dim)


def _odd_jointly(i: Axis, o: Axis) -> Law:
    return law.odd(i, o, mixes=True)


def _affine(b: Builder, x: Value, call: Call, dims: Sequence[int]) -> Value:
    """Return x times a gain, plus a bias. Gain and bias vary along consecutive axes."""
    for name, combine in (("weight", b.mul), ("bias", b.add)):
        if call.get(name) is not None:
            value = as_value(b, call[name])
            for _ in range(x.ndim - 1 - max(dims)):
                value = b.unsqueeze(value, value.ndim)
            x = combine([x, value], x.shape)
    return x


def _with_statistics(b: Builder, call: Call, x: Value, result: Value) -> list[Any]:
    """Return the result of a norm, and the statistics that torch's native norms also return.

    Only training uses the statistics of norms.
    """
    return [result, *b.opaque([x] if any(call.is_used[1:]) else [], call.shapes[1:])]


RULES: dict[str, Rule] = {
    **named(
        lambda b, call: normalize(b, as_value(b, call.x), [call.get("dim", -1)]),
        "softmax _softmax log_softmax _log_softmax _safe_softmax",
    ),
    **named(layer_norm, "layer_norm native_layer_norm rms_norm _fused_rms_norm"),
    **named(group_norm, "group_norm native_group_norm"),
    **named(channel_norm, "batch_norm _native_batch_norm_legit_no_training native_batch_norm instance_norm"),
    "_weight_norm": weight_norm,
    "cosine_similarity": cosine_similarity,
}
