"""Rules for functions of single entries, and of entries at the same index of several tensors."""

import math
from functools import partial
from typing import Any

import numpy as np

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import Law, LawOf, Value
from regauge.discovery.movement import Stacked
from regauge.discovery.operators import Call, NoRuleError, Rule, as_value, named, require_evaluation


def unary(along: LawOf) -> Rule:
    """Return a rule for a function that is applied to each entry, given the constraint (law) of the function."""

    def rule(b: Builder, call: Call) -> Value:
        require_evaluation(call)
        return b.unary(as_value(b, call.x), along)

    return rule


def copy(b: Builder, call: Call) -> Value | Stacked:
    """Return a copy of a tensor, as clone, contiguous and (in evaluation mode) dropout do."""
    require_evaluation(call)
    return call.x if isinstance(call.x, Stacked) else b.unary(call.x, law.same)


def native_dropout(b: Builder, call: Call) -> Any:
    """Return the tensor and the mask of dropout. In evaluation mode, the mask consists of ones."""
    return [copy(b, call), Value.fixed(call.shapes[1], uniform=frozenset(range(len(call.shapes[1]))))]


def cast(b: Builder, call: Call) -> Value | Stacked:
    """Return the tensor converted to another dtype.

    Every transformation commutes with a conversion between floating-point dtypes. Only permutations commute with other
    conversions.
    """
    pieces = call.x.pieces if isinstance(call.x, Stacked) else [call.x]
    if all(call.is_float) and all(isinstance(x, Value) and x.index_of is None for x in pieces):
        return copy(b, call)
    x = as_value(b, call.x)
    result = b.unary(x, law.fixed)
    if any(call.is_float):
        b.settle(x)
    else:
        result.index_of = x.index_of
    return result


def add(b: Builder, call: Call) -> Value:
    """Return a sum or difference with an optional factor, such as x + alpha * y (add, sub, rsub)."""
    x, y = _operands(b, call)
    alpha = call.get("alpha", 1)
    if call.name == "rsub":
        x, y = y, x
    return b.add([x, _times(b, y, alpha if call.name == "add" else -alpha)], call.shape)


def divide(b: Builder, call: Call) -> Value:
    x, y = _operands(b, call)
    if call.get("rounding_mode"):
        return b.joint([x, y], call.shape)
    if not isinstance(y, Value):
        return b.mul([x, 1 / y if y else math.inf], call.shape)
    return b.mul([x, y], call.shape, exponents=[1, -1])


def addcmul(b: Builder, call: Call) -> Value:
    """Return x + value * y * z (addcmul), or x + value * y / z (addcdiv)."""
    x, y, z = (as_value(b, call[key]) for key in ("self", "tensor1", "tensor2"))
    exponents = [1, 1 if call.name == "addcmul" else -1]
    product = b.mul([y, z], np.broadcast_shapes(y.shape, z.shape), exponents=exponents)
    return b.add([x, _times(b, product, call.get("value", 1))], call.shape)


def lerp(b: Builder, call: Call) -> Value:
    x, y, weight = as_value(b, call["self"]), as_value(b, call["end"]), call["weight"]
    if not isinstance(weight, Value):
        return b.add([_times(b, x, 1 - weight), _times(b, y, weight)], call.shape)
    difference = b.add([y, _times(b, x, -1)], np.broadcast_shapes(x.shape, y.shape))
    return b.add([x, b.mul([difference, as_value(b, weight)], call.shape)], call.shape)


def joint(b: Builder, call: Call) -> Value:
    """Return a function of the entries at each index, such as a comparison or a logical function."""
    operands = [as_value(b, v) for v in call.arguments.values() if isinstance(v, Value | Stacked)]
    return b.joint(operands, call.shape)


def compare(b: Builder, call: Call) -> Value:
    """Return a comparison of a tensor with a number.

    Positive scales of the tensor do not change a comparison with zero.
    """
    x, other = _operands(b, call)
    if not isinstance(other, Value) and isinstance(x, Value) and other == 0:
        return b.unary(x, ZERO_OR_NOT if call.name in ("eq", "ne", "not_equal") else law.compared)
    return joint(b, call)


def choose(b: Builder, call: Call) -> Value:
    """Return entries that a mask selects from two tensors, or from a tensor and a number (where, masked_fill)."""
    mask = as_value(b, call.first("condition", "mask"))
    return b.add([_operand(b, call["self"]), _operand(b, call.first("other", "value"))], call.shape, select=mask)


def power(b: Builder, call: Call) -> Value:
    x, exponent = call.first("self"), call["exponent"]
    if not isinstance(x, Value | Stacked):
        return b.unary(as_value(b, exponent), law.fixed)
    if isinstance(exponent, Value | Stacked):
        return joint(b, call)
    if float(exponent).is_integer() and exponent != 0:
        return b.unary(as_value(b, x), law.power(int(exponent), is_even=int(exponent) % 2 == 0))
    return b.unary(as_value(b, x), {0.5: ROOT, -0.5: INVERSE_ROOT}.get(exponent, law.fixed))


def clamp(b: Builder, call: Call) -> Value:
    low, high = (call.arguments.get(key, call.arguments.get(f"{key}_val")) for key in ("min", "max"))
    if isinstance(low, Value) or isinstance(high, Value):
        return joint(b, call)
    along: LawOf = law.fixed
    if (
        getattr(call.x, "is_norm", False)
        and call.is_divisor
        and high is None
        and low is not None
        and 0 < low <= LARGEST_LOWER_BOUND
    ):
        along = law.positive  # If the norm is zero, the divided entries are zero too.
    elif (low, high) in ((0, None), (None, 0)):
        along = law.positive
    elif low is not None and high is not None and low == -high <= 0:
        along = law.odd
    return b.unary(as_value(b, call.x), along)


def threshold(b: Builder, call: Call) -> Value:
    is_relu = call["threshold"] == 0 and call["value"] == 0
    return b.unary(as_value(b, call.x), law.positive if is_relu else law.fixed)


def prelu(b: Builder, call: Call) -> Value:
    """Return max(x, 0) + w * min(x, 0). Scales of x multiply the result, and w is permuted with the channels."""
    x, weight = as_value(b, call["self"]), as_value(b, call["weight"])
    dim = 1 if x.ndim > 1 else 0
    if weight.ndim > 1:  # The weight of the internal operator broadcasts.
        slopes = [k for k, n in enumerate(weight.shape) if n > 1]
        weight = as_value(b, b.view(weight, [weight.shape[dim]]))
        if slopes not in ([], [dim]):
            raise NoRuleError("slopes along another axis")
    result = Value(x.layouts, x.shape)
    laws = [law.positive(x.axis(k), result.axis(k)) for k in range(x.ndim)]
    if weight.shape[0] == x.shape[dim]:
        b.tie(x.layouts[dim], weight.layouts[0])
        laws[dim] = Law((x.axis(dim), weight.axis(0), result.axis(dim)), ((1, 0, -1), (0, 1, 0)), None)
    else:
        laws.append(law.fixed(weight.axis(0)))
    b.record(*laws)
    return result


def copy_sign(b: Builder, call: Call) -> Value:
    """Return the magnitudes of one tensor, combined with the signs of a second tensor or of a number (copysign)."""
    x, other = _operands(b, call)
    magnitude = b.unary(x, law.magnitude)
    return b.mul([magnitude, b.unary(other, SIGN) if isinstance(other, Value) else 1.0], call.shape)


def power_of_two(b: Builder, call: Call) -> Value:
    """Return x multiplied by a power of two (ldexp)."""
    x, exponent = _operands(b, call)
    return b.mul([x, b.unary(exponent, law.fixed)], call.shape)


def find_range(b: Builder, call: Call) -> Value:
    """Return the index of the range that contains each entry (bucketize, searchsorted)."""
    x, bounds = call["self"], call.first("boundaries", "sorted_sequence")
    if not isinstance(x, Value) or not isinstance(bounds, Value) or len(bounds.shape) != 1:
        raise NoRuleError("bounds of each row")
    bounds = as_value(b, bounds)
    b.freeze(bounds, reason=f"{b.op}: bounds in their order")
    return b.unary(as_value(b, x), law.fixed)


def glu(b: Builder, call: Call) -> Value:
    """Return the first half of an axis multiplied by the sigmoid of the second half."""
    x, dim = as_value(b, call.x), call["dim"]
    half = x.shape[dim] // 2
    gate = b.unary(b.slice(x, dim, half, 2 * half), law.fixed)
    return b.mul([b.slice(x, dim, 0, half), gate], call.shape)


def _operands(b: Builder, call: Call) -> list[Any]:
    return [_operand(b, x) for x in list(call.arguments.values())[:2]]


def _operand(b: Builder, x: Any) -> Any:
    """Return a tensor in the form in which the builder uses it. A number is returned unchanged."""
    return as_value(b, x) if isinstance(x, Value | Stacked) else x


def _times(b: Builder, x: Any, factor: Any) -> Any:
    if factor == 1:
        return x
    return b.mul([x, factor], x.shape) if isinstance(x, Value) else x * factor


LARGEST_LOWER_BOUND = 1e-6
"""The largest lower bound on norms that is treated as a protection against division by zero.

Nonzero norms are assumed to exceed the bound."""
SIGN = law.entrywise((0, 1), (1, 1))
ZERO_OR_NOT = law.entrywise((0, 1), (0, 1))
ROOT = law.entrywise((1, -2), None)
INVERSE_ROOT = law.entrywise((1, 2), None)

RULES: dict[str, Rule] = {
    **named(copy, "clone contiguous alias detach lift_fresh_copy dropout feature_dropout alpha_dropout"),
    **named(copy, "positive"),
    **named(cast, "_to_copy to type_as"),
    **named(add, "add sub subtract rsub"),
    **named(lambda b, call: b.mul(_operands(b, call), call.shape), "mul multiply"),
    **named(divide, "div divide true_divide"),
    **named(addcmul, "addcmul addcdiv"),
    **named(lambda b, call: b.maximum(_operands(b, call), call.shape), "maximum minimum fmax fmin"),
    **named(compare, "gt lt ge le eq ne greater less greater_equal less_equal not_equal"),
    **named(joint, "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__"),
    **named(joint, "atan2 remainder fmod floor_divide hypot isclose logaddexp logaddexp2 xlogy"),
    **named(unary(law.positive), "relu leaky_relu rrelu"),
    **named(unary(law.odd), "tanh erf asinh arcsinh atan arctan sinh tan asin atanh round trunc erfinv softshrink"),
    **named(unary(law.odd), "hardshrink frac special_i1"),
    **named(unary(law.entrywise(None, (0, 1))), "cosh i0 sinc special_i0e"),
    **named(unary(law.magnitude), "abs absolute"),
    **named(unary(SIGN), "sign sgn"),
    **named(unary(law.compared), "signbit"),
    **named(find_range, "bucketize searchsorted"),
    **named(unary(law.squared), "square"),
    **named(unary(ROOT), "sqrt"),
    **named(unary(INVERSE_ROOT), "rsqrt"),
    **named(unary(law.entrywise((1, 1), (1, 1))), "reciprocal"),
    **named(unary(partial(law.multiplied, factor=-1.0)), "neg negative"),
    **named(unary(partial(law.periodic, period="odd")), "sin"),
    **named(unary(partial(law.periodic, period="even")), "cos"),
    **named(unary(law.fixed), "gelu silu sigmoid exp exp2 expm1 log log2 log10 log1p softplus elu selu celu mish"),
    **named(unary(law.fixed), "hardsigmoid hardswish relu6 log_sigmoid log_sigmoid_forward logit floor ceil erfc"),
    **named(unary(law.fixed), "logical_not bitwise_not acos acosh lgamma digamma nan_to_num special_erfcx"),
    **named(unary(ZERO_OR_NOT), "isnan isinf isfinite"),
    **named(choose, "where masked_fill"),
    **named(clamp, "clamp clip clamp_min clamp_max hardtanh"),
    **named(prelu, "prelu _prelu_kernel"),
    "copysign": copy_sign,
    "ldexp": power_of_two,
    "native_dropout": native_dropout,
    "lerp": lerp,
    "pow": power,
    "threshold": threshold,
    "glu": glu,
}
