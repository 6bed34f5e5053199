"""LSTM, GRU and plain recurrent layers: two steps written out, then the state tied to itself."""

from collections.abc import Callable, Sequence
from typing import Any

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import LawOf, Value
from regauge.discovery.layout import leaf
from regauge.discovery.movement import Stacked
from regauge.discovery.operator_call import Call, NoRuleError, Rule, as_value
from regauge.discovery.rules.products import apply_linear

Cell = Callable[[Builder, Value, list[Value], "list[Value | None]"], list[Value]]


def lstm(b: Builder, call: Call) -> Any:
    return _layers(b, call, _lstm_cell, list(call["hx"]))


def gru(b: Builder, call: Call) -> Any:
    return _layers(b, call, _gru_cell, [call["hx"]])


def rnn(activation: LawOf) -> Rule:
    def rule(b: Builder, call: Call) -> Any:
        def cell(b: Builder, x: Value, state: list[Value], weights: "list[Value | None]") -> list[Value]:
            total = _gates(b, x, state[0], weights)
            return [b.unary(total, activation)]

        return _layers(b, call, cell, [call["hx"]])

    return rule


def lstm_cell(b: Builder, call: Call) -> Any:
    state = [as_value(b, h) for h in call["hx"]]
    return _lstm_cell(b, as_value(b, call["input"]), state, _cell_weights(b, call))


def gru_cell(b: Builder, call: Call) -> Any:
    return _gru_cell(b, as_value(b, call["input"]), [as_value(b, call["hx"])], _cell_weights(b, call))[0]


def rnn_cell(activation: LawOf) -> Rule:
    def rule(b: Builder, call: Call) -> Value:
        total = _gates(b, as_value(b, call["input"]), as_value(b, call["hx"]), _cell_weights(b, call))
        return b.unary(total, activation)

    return rule


def _cell_weights(b: Builder, call: Call) -> "list[Value | None]":
    names = ("w_ih", "w_hh", "b_ih", "b_hh")
    return [as_value(b, call[name]) if call.get(name) is not None else None for name in names]


def _layers(b: Builder, call: Call, cell: Cell, states: Sequence[Any]) -> Any:
    if call.get("data") is not None or "batch_sizes" in call.arguments:
        raise NoRuleError("packed sequences")
    if call.get("train", False) and call.get("dropout", 0.0):
        raise NoRuleError("chance")
    x = as_value(b, call["input"])
    is_batched = x.ndim == 3
    time = (1 if call["batch_first"] else 0) if is_batched else 0
    directions = 2 if call["bidirectional"] else 1
    params = [as_value(b, p) for p in call["params"]]
    per = 4 if call["has_biases"] else 2
    if len(params) != per * directions * call["num_layers"]:
        raise NoRuleError("recurrent layers with projections")
    finals: list[list[Value]] = [[] for _ in states]
    for layer in range(call["num_layers"]):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            weights: list[Value | None] = [*params[per * k : per * (k + 1)], *([None] * (4 - per))]
            start = [_initial(b, s, k) for s in states]
            step = _without_time(b, x, time)
            states_1 = cell(b, step, start, weights)
            states_2 = cell(b, step, states_1, weights)
            for first, one, two in zip(start, states_1, states_2, strict=True):
                _tie(b, first, one, two)
            outputs.append(_with_time(b, states_2[0], time, x.shape[time]))
            for final, state in zip(finals, states_2, strict=True):
                final.append(state)
        x = outputs[0] if directions == 1 else b.cat(outputs, x.ndim - 1)
    # Layers and directions stay apart unless the final states are used as one tensor.
    return [x, *(Stacked(0, final) for final in finals)]


def _initial(b: Builder, states: Any, index: int) -> Value:
    """One layer's initial state; zeros, the usual case, tie nothing together."""
    if isinstance(states, Value) and states.is_zero:
        return b.use(Value.fixed(states.shape[1:], is_zero=True))
    return as_value(b, b.select(as_value(b, states), 0, index))


def _lstm_cell(b: Builder, x: Value, state: list[Value], weights: "list[Value | None]") -> list[Value]:
    hidden, memory = state
    i, f, g, o = _chunks(b, _gates(b, x, hidden, weights), 4)
    shape = memory.shape
    i, f, o = (b.unary(gate, law.fixed) for gate in (i, f, o))
    g = b.unary(g, law.odd)
    memory = b.add([b.mul([f, memory], shape), b.mul([i, g], shape)], shape)
    return [b.mul([o, b.unary(memory, law.odd)], shape), memory]


def _gru_cell(b: Builder, x: Value, state: list[Value], weights: "list[Value | None]") -> list[Value]:
    w_ih, w_hh, b_ih, b_hh = weights
    assert w_ih is not None
    assert w_hh is not None
    hidden = state[0]
    shape = hidden.shape
    r_x, z_x, n_x = _chunks(b, apply_linear(b, x, w_ih, b_ih), 3)
    r_h, z_h, n_h = _chunks(b, apply_linear(b, hidden, w_hh, b_hh), 3)
    r = b.unary(b.add([r_x, r_h], shape), law.fixed)
    z = b.unary(b.add([z_x, z_h], shape), law.fixed)
    n = b.unary(b.add([n_x, b.mul([r, n_h], shape)], shape), law.odd)
    rest = b.unary(z, law.fixed)
    return [b.add([b.mul([rest, n], shape), b.mul([z, hidden], shape)], shape)]


def _gates(b: Builder, x: Value, hidden: Value, weights: "list[Value | None]") -> Value:
    w_ih, w_hh, b_ih, b_hh = weights
    assert w_ih is not None
    assert w_hh is not None
    left, right = apply_linear(b, x, w_ih, b_ih), apply_linear(b, hidden, w_hh, b_hh)
    return b.add([left, right], left.shape)


def _chunks(b: Builder, x: Value, count: int) -> list[Value]:
    size = x.shape[-1] // count
    return [as_value(b, b.slice(x, x.ndim - 1, k * size, (k + 1) * size)) for k in range(count)]


def _without_time(b: Builder, x: Value, time: int) -> Value:
    kept = [k for k in range(x.ndim) if k != time]
    result = Value([x.layouts[k] for k in kept], [x.shape[k] for k in kept])
    b.record(*(law.linear(x.axis(k), result.axis(j)) for j, k in enumerate(kept)))
    b.freeze(x, [time], f"{b.op}: time")
    return result


def _with_time(b: Builder, x: Value, time: int, length: int) -> Value:
    layouts, shape = list(x.layouts), list(x.shape)
    layouts.insert(time, leaf(length, f"{b.op}: time"))
    shape.insert(time, length)
    result = Value(layouts, shape)
    b.record(*(law.linear(x.axis(k), result.axis(k + (k >= time))) for k in range(x.ndim)))
    return result


def _tie(b: Builder, *values: Value) -> None:
    for k in range(values[0].ndim):
        b.tie(*(value.layouts[k] for value in values))
    b.record(*(law.linear(*(value.axis(k) for value in values)) for k in range(values[0].ndim)))


RULES: dict[str, Rule] = {
    "lstm": lstm,
    "gru": gru,
    "rnn_tanh": rnn(law.odd),
    "rnn_relu": rnn(law.positive),
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    "rnn_tanh_cell": rnn_cell(law.odd),
    "rnn_relu_cell": rnn_cell(law.positive),
}
