"""Rules for attention (written as matrix products), and for recurrent layers (written as two steps)."""

from collections.abc import Callable, Sequence
from typing import Any

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import LawOf, Value
from regauge.discovery.movement import Stacked
from regauge.discovery.operators import Call, NoRuleError, Rule, as_value
from regauge.discovery.rules.linear_maps import apply_linear, apply_matmul
from regauge.discovery.rules.norms import normalize

Cell = Callable[[Builder, Value, Sequence[Value], Sequence[Any]], list[Value]]
"""One step of a recurrent layer: a function that maps the input, the state and the weights to the next state.

The step takes the weights of the input and of the state, the two biases, and (for some LSTMs) an output projection.
"""


def attention(b: Builder, call: Call) -> Value:
    """Return softmax(q k^T + mask) v. With grouped queries, each key-value head serves several query heads."""
    if call.get("dropout_p", 0.0):
        raise NoRuleError("chance")
    q, k, v = (as_value(b, call[key]) for key in ("query", "key", "value"))
    if call.get("enable_gqa", False) and q.shape[-3] != k.shape[-3]:
        k, v = (b.repeat(x, x.ndim - 3, q.shape[-3] // x.shape[-3], is_inner=True) for x in (k, v))
    shape = [*call.shape[:-2], q.shape[-2], k.shape[-2]]
    scores = apply_matmul(b, q, b.permute(k, [*range(k.ndim - 2), -1, -2]), shape)
    mask = Value.fixed(shape[-2:]) if call.get("is_causal", False) else call.get("attn_mask")
    if mask is not None:
        scores = b.add([scores, as_value(b, mask)], shape)
    return apply_matmul(b, normalize(b, scores, [-1]), v, [*shape[:-1], v.shape[-1]])


def one_step(cell: Cell) -> Rule:
    """Return the rule for an operator that takes a single step of a recurrent cell."""

    def rule(b: Builder, call: Call) -> list[Value]:
        state = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
        weights = [call.get(name) for name in ("w_ih", "w_hh", "b_ih", "b_hh")]
        return cell(b, as_value(b, call["input"]), [as_value(b, h) for h in state], weights)

    return rule


def all_steps(cell: Cell) -> Rule:
    """Return the rule for a recurrent layer, which applies a cell at all time steps."""

    def rule(b: Builder, call: Call) -> Any:
        if call.get("data") is not None or "batch_sizes" in call.arguments:
            raise NoRuleError("packed sequences")
        if call.get("train", False) and call.get("dropout", 0.0):
            raise NoRuleError("chance")
        x, hx = as_value(b, call["input"]), call["hx"]
        states = hx if isinstance(hx, list | tuple) else [hx]
        time = 1 if x.ndim == 3 and call["batch_first"] else 0
        directions, per = 2 if call["bidirectional"] else 1, 4 if call["has_biases"] else 2
        params, count = list(call["params"]), directions * call["num_layers"]
        has_projection = len(params) == (per + 1) * count
        per += has_projection
        if len(params) != per * count:
            raise NoRuleError("recurrent layers with other weights than these")
        ends: list[list[Value]] = []
        for layer in range(call["num_layers"]):
            outputs = []
            for k in range(layer * directions, (layer + 1) * directions):
                own = params[per * k : per * (k + 1)]
                plain, last = (own[:-1], own[-1:]) if has_projection else (own, [])
                weights = [*[*plain, None, None][:4], *last]
                ends.append(_two_steps(b, cell, x, time, [_initial(b, s, k) for s in states], weights))
                sources = [*range(time), None, *range(time, x.ndim - 1)]
                shape = [*x.shape[:-1], ends[-1][0].shape[-1]]
                outputs.append(b.carry(ends[-1][0], sources, shape, law.linear, reason=f"{b.op}: time"))
            x = outputs[0] if directions == 1 else b.cat(outputs, x.ndim - 1)
        # Layers and directions stay apart unless the final states are used as one tensor.
        return [x, *(Stacked(0, final) for final in zip(*ends, strict=True))]

    return rule


def _two_steps(
    b: Builder, cell: Cell, x: Value, time: int, start: Sequence[Value], weights: Sequence[Any]
) -> list[Value]:
    """Return the state of a recurrent layer after two steps.

    All transformations must act in the same way on the states before and after a step.
    """
    kept = [k for k in range(x.ndim) if k != time]
    now = b.carry(x, kept, [x.shape[k] for k in kept], law.linear, ended=None, reason=f"{b.op}: time")
    first = cell(b, now, start, weights)
    second = cell(b, now, first, weights)
    for values in zip(start, first, second, strict=True):
        b.equate(*values)
    return second


def _initial(b: Builder, states: Any, index: int) -> Value:
    """Return the initial state of one recurrent layer. Zeros, the usual initial state, do not constrain any axis."""
    if isinstance(states, Value) and states.is_zero:
        return b.use(Value.fixed(states.shape[1:], is_zero=True))
    return as_value(b, b.select(as_value(b, states), 0, index))


def _lstm(b: Builder, x: Value, state: Sequence[Value], weights: Sequence[Any]) -> list[Value]:
    hidden, memory = state
    i, f, g, o = _split(b, _sum_of_both(b, x, hidden, weights[:4]), 4)
    shape = memory.shape
    i, f, o = (b.unary(gate, law.fixed) for gate in (i, f, o))
    memory = b.add([b.mul([f, memory], shape), b.mul([i, b.unary(g, law.odd)], shape)], shape)
    hidden = b.mul([o, b.unary(memory, law.odd)], shape)
    return [_linear(b, hidden, weights[4], None) if len(weights) > 4 else hidden, memory]


def _gru(b: Builder, x: Value, state: Sequence[Value], weights: Sequence[Any]) -> list[Value]:
    (hidden,) = state
    shape = hidden.shape
    r_x, z_x, n_x = _split(b, _linear(b, x, *weights[::2]), 3)
    r_h, z_h, n_h = _split(b, _linear(b, hidden, *weights[1::2]), 3)
    r = b.unary(b.add([r_x, r_h], shape), law.fixed)
    z = b.unary(b.add([z_x, z_h], shape), law.fixed)
    n = b.unary(b.add([n_x, b.mul([r, n_h], shape)], shape), law.odd)
    rest = b.unary(z, law.fixed)
    return [b.add([b.mul([rest, n], shape), b.mul([z, hidden], shape)], shape)]


def _rnn(activation: LawOf) -> Cell:
    def cell(b: Builder, x: Value, state: Sequence[Value], weights: Sequence[Any]) -> list[Value]:
        return [b.unary(_sum_of_both(b, x, state[0], weights), activation)]

    return cell


def _sum_of_both(b: Builder, x: Value, hidden: Value, weights: Sequence[Any]) -> Value:
    left, right = _linear(b, x, *weights[::2]), _linear(b, hidden, *weights[1::2])
    return b.add([left, right], left.shape)


def _linear(b: Builder, x: Value, weight: Any, bias: Any) -> Value:
    return apply_linear(b, x, as_value(b, weight), bias)


def _split(b: Builder, x: Value, count: int) -> list[Value]:
    size = x.shape[-1] // count
    return [b.slice(x, -1, k * size, (k + 1) * size) for k in range(count)]


CELLS: dict[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn(law.odd), "rnn_relu": _rnn(law.positive)}
RULES: dict[str, Rule] = {
    "scaled_dot_product_attention": attention,
    **{name: all_steps(cell) for name, cell in CELLS.items()},
    **{f"{name}_cell": one_step(cell) for name, cell in CELLS.items()},
}
