"""Functions of single entries, and of the entries of several tensors at the same index."""

from collections.abc import Callable
from typing import Any

import numpy as np

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import Axis, Law, LawOf, Value
from regauge.discovery.movement import Stacked
from regauge.discovery.operator_call import Call, NoRuleError, Rule, as_value, named


def unary(make: LawOf) -> Rule:
    """A rule for a function of each entry with the given law."""

    def rule(b: Builder, call: Call) -> Value:
        return b.unary(as_value(b, call.x), make)

    return rule


def copy(b: Builder, call: Call) -> Value | Stacked:
    """The same values: clone, contiguous, dropout in evaluation mode."""
    x = call.x
    if call.get("train", call.get("training", False)):
        raise NoRuleError("chance")
    if isinstance(x, Stacked):
        return x
    return _with_meaning(x, b.unary(x, law.same))


def native_dropout(b: Builder, call: Call) -> Any:
    """Values and mask; in evaluation mode the mask is all ones."""
    return [copy(b, call), Value.fixed(call.shapes[1], uniform=frozenset(range(len(call.shapes[1]))))]


def cast(b: Builder, call: Call) -> Value | Stacked:
    """A conversion: floating point to floating point keeps everything, anything else keeps the order only."""
    if all(call.is_float) and isinstance(call.x, Value | Stacked) and not _holds_positions(call.x):
        return copy(b, call)
    x = as_value(b, call.x)
    result = b.unary(x, law.fixed)
    if any(call.is_float):
        b.settle(x)
        return result
    return _with_meaning(x, result)


def add(b: Builder, call: Call) -> Value:
    x, y = _operands(b, call)
    y = _times(b, y, call.get("alpha", 1))
    return b.add([x, y], call.shape)


def subtract(b: Builder, call: Call) -> Value:
    x, y = _operands(b, call)
    if call.name == "rsub":
        x, y = y, x
    return b.add([x, _times(b, y, -call.get("alpha", 1))], call.shape)


def multiply(b: Builder, call: Call) -> Value:
    return b.mul(_operands(b, call), call.shape)


def divide(b: Builder, call: Call) -> Value:
    x, y = _operands(b, call)
    if call.get("rounding_mode"):
        return b.joint([x, y], call.shape)
    if not isinstance(y, Value):
        return b.mul([x, 1 / y if y else 0.0], call.shape)
    return b.mul([x, y], call.shape, exponents=[1, -1])


def addcmul(b: Builder, call: Call) -> Value:
    """x + value * y * z, and x + value * y / z."""
    x, y, z = (as_value(b, call[key]) for key in ("self", "tensor1", "tensor2"))
    exponents = [1, 1 if call.name == "addcmul" else -1]
    shape = _broadcast(y.shape, z.shape)
    return b.add([x, _times(b, b.mul([y, z], shape, exponents=exponents), call.get("value", 1))], call.shape)


def lerp(b: Builder, call: Call) -> Value:
    x, y, weight = as_value(b, call["self"]), as_value(b, call["end"]), call["weight"]
    if not isinstance(weight, Value):
        return b.add([_times(b, x, 1 - weight), _times(b, y, weight)], call.shape)
    difference = b.add([y, _times(b, x, -1)], _broadcast(x.shape, y.shape))
    return b.add([x, b.mul([difference, as_value(b, weight)], call.shape)], call.shape)


def maximum(b: Builder, call: Call) -> Value:
    return b.maximum(_operands(b, call), call.shape)


def joint(b: Builder, call: Call) -> Value:
    """Comparisons, logic, and other functions of the entries at one index."""
    operands = [as_value(b, v) for v in call.arguments.values() if isinstance(v, Value | Stacked)]
    return b.joint(operands, call.shape)


def compare(b: Builder, call: Call) -> Value:
    """Comparison with a number: with zero, positive scales of the input do not matter."""
    x, other = _operands(b, call)
    if not isinstance(other, Value) and isinstance(x, Value) and other == 0:
        return b.unary(x, _tested if call.name in ("eq", "ne", "not_equal") else law.compared)
    return joint(b, call)


def where(b: Builder, call: Call) -> Value:
    mask = as_value(b, call["condition"])
    return b.add([_scalar(b, call["self"]), _scalar(b, call["other"])], call.shape, select=mask)


def masked_fill(b: Builder, call: Call) -> Value:
    x, mask = as_value(b, call["self"]), as_value(b, call["mask"])
    return b.add([x, _scalar(b, call["value"])], call.shape, select=mask)


def power(b: Builder, call: Call) -> Value:
    x, exponent = call.first("self"), call["exponent"]
    if not isinstance(x, Value | Stacked):
        return b.unary(as_value(b, exponent), law.fixed)
    if isinstance(exponent, Value | Stacked):
        return joint(b, call)
    x = as_value(b, x)
    if float(exponent).is_integer() and exponent != 0:
        return b.unary(x, lambda i, o: law.power(i, o, int(exponent), is_even=int(exponent) % 2 == 0))
    if exponent == 0.5:
        return b.unary(x, _root)
    if exponent == -0.5:
        return b.unary(x, _inverse_root)
    return b.unary(x, law.fixed)


def square(b: Builder, call: Call) -> Value:
    return b.unary(as_value(b, call.x), lambda i, o: law.power(i, o, 2, is_even=True))


def clamp(b: Builder, call: Call) -> Value:
    low, high = call.first("min", "min_val"), call.arguments.get("max", call.arguments.get("max_val"))
    x = as_value(b, call.x)
    if isinstance(low, Value) or isinstance(high, Value):
        return joint(b, call)
    return b.unary(x, _clamp_law(low, high))


def clamp_min(b: Builder, call: Call) -> Value:
    bound = call["min"]
    return joint(b, call) if isinstance(bound, Value) else b.unary(as_value(b, call.x), _clamp_law(bound, None))


def clamp_max(b: Builder, call: Call) -> Value:
    bound = call["max"]
    return joint(b, call) if isinstance(bound, Value) else b.unary(as_value(b, call.x), _clamp_law(None, bound))


def random_leaky_relu(b: Builder, call: Call) -> Value:
    if call.get("training", False):
        raise NoRuleError("chance")
    return b.unary(as_value(b, call.x), law.positive)


def threshold(b: Builder, call: Call) -> Value:
    is_relu = call["threshold"] == 0 and call["value"] == 0
    return b.unary(as_value(b, call.x), law.positive if is_relu else law.fixed)


def prelu(b: Builder, call: Call) -> Value:
    """max(x, 0) + w * min(x, 0): x and the result scale alike, the slopes follow the order of the channels."""
    x, weight = as_value(b, call["self"]), as_value(b, call["weight"])
    dim = 1 if x.ndim > 1 else 0
    if weight.ndim > 1:  # The kernel behind it broadcasts.
        slopes = [k for k, n in enumerate(weight.shape) if n > 1]
        weight = as_value(b, b.view(weight, [weight.shape[dim]]))
        if slopes not in ([], [dim]):
            raise NoRuleError("slopes along another axis")
    result = Value(x.layouts, x.shape)
    laws: list[Law] = []
    for k in range(x.ndim):
        i, o = x.axis(k), result.axis(k)
        if k == dim and weight.shape[0] == x.shape[k]:
            b.tie(x.layouts[k], weight.layouts[0])
            laws.append(Law((i, weight.axis(0), o), ((1, 0, -1), (0, 1, 0)), None))
        else:
            laws.append(law.positive(i, o))
    if weight.shape[0] != x.shape[dim]:
        laws.append(law.fixed(weight.axis(0)))
    b.record(*laws)
    return result


def glu(b: Builder, call: Call) -> Value:
    """First half times the sigmoid of the second half."""
    x, dim = as_value(b, call.x), call["dim"]
    half = x.shape[dim] // 2
    left, right = as_value(b, b.slice(x, dim, 0, half)), as_value(b, b.slice(x, dim, half, 2 * half))
    return b.mul([left, b.unary(right, law.fixed)], call.shape)


def sine(b: Builder, call: Call) -> Value:
    return b.unary(as_value(b, call.x), lambda i, o: law.periodic(i, o, "even" if call.name == "cos" else "odd"))


def _tested(i: Axis, o: Axis) -> Law:
    return Law((i, o), ((0, 1),), ((0, 1),))


def _even(i: Axis, o: Axis) -> Law:
    return Law((i, o), None, ((0, 1),))


def _absolute(i: Axis, o: Axis) -> Law:
    return law.power(i, o, 1, is_even=True)


def _sign(i: Axis, o: Axis) -> Law:
    return Law((i, o), ((0, 1),), ((1, 1),))


def _root(i: Axis, o: Axis) -> Law:
    return Law((i, o), ((1, -2),), None)


def _inverse_root(i: Axis, o: Axis) -> Law:
    return Law((i, o), ((1, 2),), None)


def _reciprocal(i: Axis, o: Axis) -> Law:
    return Law((i, o), ((1, 1),), ((1, 1),))


def _negated(i: Axis, o: Axis) -> Law:
    return law.multiplied(i, o, -1.0)


def _clamp_law(low: float | None, high: float | None) -> LawOf:
    if (low, high) in ((0, None), (None, 0)):
        return law.positive
    if low is not None and high is not None and low == -high <= 0:
        return law.odd
    return law.fixed


def _operands(b: Builder, call: Call) -> list[Any]:
    values = list(call.arguments.values())[:2]
    return [_scalar(b, v) for v in values]


def _scalar(b: Builder, x: Any) -> Any:
    return as_value(b, x) if isinstance(x, Value | Stacked) else x


def _times(b: Builder, x: Any, factor: Any) -> Any:
    if factor == 1:
        return x
    return b.mul([x, factor], x.shape) if isinstance(x, Value) else x * factor


def _broadcast(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.broadcast_shapes(x, y))


def _holds_positions(x: Value | Stacked) -> bool:
    return any(piece.index_of is not None for piece in (x.pieces if isinstance(x, Stacked) else [x]))


def _with_meaning(x: Value, result: Value) -> Value:
    result.index_of = x.index_of
    return result


Table = dict[str, Callable[[Builder, Call], Any]]

RULES: Table = {
    **named(copy, "clone contiguous alias detach lift_fresh_copy dropout feature_dropout alpha_dropout"),
    **named(copy, "positive"),
    **named(cast, "_to_copy to type_as"),
    **named(add, "add"),
    **named(subtract, "sub subtract rsub"),
    **named(multiply, "mul multiply"),
    **named(divide, "div divide true_divide"),
    **named(addcmul, "addcmul addcdiv"),
    **named(maximum, "maximum minimum fmax fmin"),
    **named(compare, "gt lt ge le eq ne greater less greater_equal less_equal not_equal"),
    **named(joint, "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__"),
    **named(joint, "atan2 remainder fmod floor_divide hypot isclose logaddexp logaddexp2 xlogy"),
    **named(unary(law.positive), "relu leaky_relu"),
    **named(unary(law.odd), "tanh erf asinh arcsinh atan arctan sinh tan asin atanh round trunc erfinv softshrink"),
    **named(unary(law.odd), "hardshrink frac special_i1"),
    **named(unary(_even), "cosh i0 sinc"),
    **named(unary(_absolute), "abs absolute"),
    **named(unary(_sign), "sign sgn"),
    **named(unary(_root), "sqrt"),
    **named(unary(_inverse_root), "rsqrt"),
    **named(unary(_reciprocal), "reciprocal"),
    **named(unary(_negated), "neg negative"),
    **named(unary(law.fixed), "gelu silu sigmoid exp exp2 expm1 log log2 log10 log1p softplus elu selu celu mish"),
    **named(unary(law.fixed), "hardsigmoid hardswish relu6 log_sigmoid log_sigmoid_forward logit floor ceil erfc"),
    **named(unary(law.fixed), "logical_not bitwise_not acos acosh lgamma digamma nan_to_num"),
    **named(unary(_tested), "isnan isinf isfinite"),
    **named(sine, "sin cos"),
    **named(power, "pow"),
    **named(clamp, "clamp clip hardtanh"),
    "native_dropout": native_dropout,
    "lerp": lerp,
    "where": where,
    "masked_fill": masked_fill,
    "square": square,
    "clamp_min": clamp_min,
    "clamp_max": clamp_max,
    "rrelu": random_leaky_relu,
    "threshold": threshold,
    "prelu": prelu,
    "_prelu_kernel": prelu,
    "glu": glu,
}
