"""Lookups: embeddings, gathers, and indices that point into an axis that can be permuted."""

from typing import Any

from regauge.discovery import layout as axis
from regauge.discovery import record as law
from regauge.discovery.builder import Builder
from regauge.discovery.call import Call, NoRuleError, Rule, as_value
from regauge.discovery.layout import leaf
from regauge.discovery.record import Letter, Spot, Value, Virtual
from regauge.discovery.views import Stack


def embedding(b: Builder, call: Call) -> Value:
    return look_up(b, as_value(b, call["weight"]), 0, call["indices"])


def index_select(b: Builder, call: Call) -> Value:
    return look_up(b, as_value(b, call["self"]), call["dim"], call["index"])


def index(b: Builder, call: Call) -> Value:
    """x[i, :, j]: one index tensor is a lookup along its axis; several freeze the axes that they address."""
    x, indices = as_value(b, call["self"]), list(call["indices"])
    indices += [None] * (x.ndim - len(indices))
    used = [k for k, i in enumerate(indices) if i is not None]
    if len(used) == 1 and isinstance(indices[used[0]], Value | Stack):
        return look_up(b, x, used[0], indices[used[0]])
    return _many(b, x, indices, call)


def look_up(b: Builder, x: Value, dim: int, indices: Any) -> Value:
    """Replace one axis by the axes of an index tensor."""
    dim %= x.ndim
    positions = as_value(b, indices)
    layouts = [*x.layouts[:dim], *positions.layouts, *x.layouts[dim + 1 :]]
    shape = [*x.shape[:dim], *positions.shape, *x.shape[dim + 1 :]]
    result = Value(layouts, shape, index_of=x.index_of)
    points = positions.index_of
    if points is not None and axis.size_of(points) == x.shape[dim]:
        b.tie(x.layouts[dim], points)
        own = Letter((Spot(x, (dim,)),), is_virtual=True)
        if positions.ndim == 1:
            result.virtual = Virtual(dim, x.layouts[dim], positions)
    else:
        b.settle(positions)
        reason = f"{b.op}: positions are addressed by index"
        axis.freeze(x.layouts[dim], reason)
        own = law.fixed(Spot(x, (dim,)), mixes=True)
    letters = [law.linear(Spot(x, (k,)), Spot(result, (k,))) for k in range(dim)]
    letters += [law.linear(Spot(x, (k,)), Spot(result, (k + positions.ndim - 1,))) for k in range(dim + 1, x.ndim)]
    letters += [law.fixed(Spot(positions, (k,)), Spot(result, (dim + k,))) for k in range(positions.ndim)]
    b.record(own, *letters)
    return result


def gather(b: Builder, call: Call) -> Value:
    """result[i, j] = x[i, index[i, j]] along one axis."""
    x, positions = as_value(b, call["self"]), as_value(b, call["index"])
    dim = call["dim"] % x.ndim
    layouts = list(positions.layouts)
    letters: list[Letter] = []
    result = Value(layouts, positions.shape, index_of=x.index_of)
    for k in range(x.ndim):
        if k == dim:
            continue
        if x.shape[k] != positions.shape[k]:
            raise NoRuleError("a gather that reads part of another axis")
        b.tie(x.layouts[k], positions.layouts[k])
        spots = (Spot(positions, (k,)), Spot(x, (k,)), Spot(result, (k,)))
        letters.append(law.masked(*spots))
    points = positions.index_of
    if points is not None and axis.size_of(points) == x.shape[dim]:
        b.tie(x.layouts[dim], points)
        letters.append(Letter((Spot(x, (dim,)),), is_shared=True))
    else:
        b.settle(positions)
        axis.freeze(x.layouts[dim], f"{b.op}: positions are addressed by index")
        letters.append(law.fixed(Spot(x, (dim,)), mixes=True))
    letters.append(law.fixed(Spot(positions, (dim,)), Spot(result, (dim,))))
    b.record(*letters)
    return result


def scatter(b: Builder, call: Call) -> Value:
    """zeros with src written at index, along one axis that the indices point into."""
    base, positions = call["self"], as_value(b, call["index"])
    dim = call["dim"] % positions.ndim
    source = call.arguments.get("src", call.arguments.get("value"))
    points = positions.index_of
    is_blank = isinstance(base, Value) and base.is_fixed and len(base.uniform) == base.ndim
    if not is_blank or points is None or axis.size_of(points) != call.shape[dim]:
        raise NoRuleError("a scatter into a tensor that is not constant, or at positions that are no choice of units")
    if any(call.shape[k] != positions.shape[k] for k in range(positions.ndim) if k != dim):
        raise NoRuleError("a scatter that writes part of another axis")
    layouts = [points if k == dim else positions.layouts[k] for k in range(positions.ndim)]
    result = Value(layouts, call.shape)
    letters = [Letter((Spot(result, (dim,)),), is_shared=True), law.fixed(Spot(positions, (dim,)), mixes=True)]
    others = [k for k in range(positions.ndim) if k != dim]
    if isinstance(source, Value | Stack):
        values = as_value(b, source)
        b.settle(values)
        if values.shape != positions.shape:
            raise NoRuleError("a scatter that reads part of its source")
        for k in range(values.ndim):
            b.tie(values.layouts[k], positions.layouts[k])
        letters.extend(law.fixed(Spot(positions, (k,)), Spot(values, (k,)), Spot(result, (k,))) for k in others)
        letters.append(law.fixed(Spot(values, (dim,)), mixes=True))
        axis.freeze(values.layouts[dim], f"{b.op}: ranks")
    else:
        letters.extend(law.fixed(Spot(positions, (k,)), Spot(result, (k,))) for k in others)
    b.record(*letters)
    return result


def one_hot(b: Builder, call: Call) -> Value:
    x = as_value(b, call.x)
    points = x.index_of
    is_choice = points is not None and axis.size_of(points) == call.shape[-1]
    last = points if is_choice and points is not None else leaf(call.shape[-1], b.op)
    if not is_choice:
        b.settle(x)
    result = Value([*x.layouts, last], call.shape)
    own = Letter((Spot(result, (x.ndim,)),), is_shared=True)
    b.record(own, *(law.fixed(Spot(x, (k,)), Spot(result, (k,))) for k in range(x.ndim)))
    return result


def _many(b: Builder, x: Value, indices: list[Any], call: Call) -> Value:
    """Everything that is addressed, and every axis of the index tensors, is frozen; the rest passes."""
    used = [k for k, i in enumerate(indices) if i is not None]
    tensors = [as_value(b, indices[k]) for k in used]
    kept = [k for k in range(x.ndim) if k not in used]
    wide = len(call.shape) - len(kept)
    is_together = used == list(range(used[0], used[-1] + 1))
    at = used[0] if is_together else 0
    reason = f"{b.op}: positions are addressed by index"
    spots = {k: (k if k < at else k + wide - len(used)) if is_together else wide + kept.index(k) for k in kept}
    if any(x.shape[k] != call.shape[j] for k, j in spots.items()):
        raise NoRuleError("an index that is not understood")
    for value in [x, *tensors]:
        b.settle(value)
    layouts = [leaf(n, reason) for n in call.shape]
    for k, j in spots.items():
        layouts[j] = x.layouts[k]
    result = Value(layouts, call.shape)
    letters = [law.linear(Spot(x, (k,)), Spot(result, (j,))) for k, j in spots.items()]
    letters += [law.fixed(Spot(result, (j,)), mixes=True) for j in range(len(call.shape)) if j not in spots.values()]
    b.record(*letters)
    for k in used:
        b.freeze(x, [k], reason)
    for tensor in tensors:
        b.freeze(tensor, reason=reason)
    return result


RULES: dict[str, Rule] = {
    "embedding": embedding,
    "index_select": index_select,
    "index": index,
    "gather": gather,
    "scatter": scatter,
    "one_hot": one_hot,
}
