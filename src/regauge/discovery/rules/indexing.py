"""Lookups: embeddings, gathers, and positions along an axis that may be permuted."""

from typing import Any

from regauge.discovery import laws as law
from regauge.discovery import layout as algebra
from regauge.discovery.builder import Builder
from regauge.discovery.laws import Law, Value, Virtual
from regauge.discovery.layout import Layout, leaf
from regauge.discovery.movement import Stacked
from regauge.discovery.operators import Call, NoRuleError, Rule, as_value, named
from regauge.discovery.rules.indexed_writes import scatter_into


def index(b: Builder, call: Call) -> Value:
    """Return the entries of a tensor at the positions in index tensors, such as x[i, :, j].

    A single index tensor looks up entries along one axis. If there are several index tensors, the axes that they index
    are frozen.
    """
    x, indices = as_value(b, call["self"]), list(call["indices"])
    indices += [None] * (x.ndim - len(indices))
    used = [k for k, i in enumerate(indices) if i is not None]
    if len(used) == 1 and isinstance(indices[used[0]], Value | Stacked):
        return look_up(b, x, used[0], indices[used[0]])
    return _many(b, x, indices, call)


def look_up(b: Builder, x: Value, dim: int, indices: Any) -> Value:
    """Look up entries along one axis of a tensor. In the result, the axes of the index tensor replace the axis of the
    lookup.
    """
    dim %= x.ndim
    positions = as_value(b, indices)
    layouts = [*x.layouts[:dim], *positions.layouts, *x.layouts[dim + 1 :]]
    shape = [*x.shape[:dim], *positions.shape, *x.shape[dim + 1 :]]
    result = Value(layouts, shape, index_of=x.index_of)
    points = _points_into(positions, x.shape[dim])
    if points is not None:
        b.tie(x.layouts[dim], points)
        own = Law((x.axis(dim),), is_virtual=True)
        if positions.ndim == 1:
            result.virtual = Virtual(dim, x.layouts[dim], positions)
    else:
        own = _address(b, x, dim, positions)
    laws = [law.linear(x.axis(k), result.axis(k)) for k in range(dim)]
    laws += [law.linear(x.axis(k), result.axis(k + positions.ndim - 1)) for k in range(dim + 1, x.ndim)]
    laws += [law.fixed(positions.axis(k), result.axis(dim + k)) for k in range(positions.ndim)]
    b.record(own, *laws)
    return result


def embedding_bag(b: Builder, call: Call) -> list[Value]:
    """Return sums, means or maxima of the table rows with the given indices.

    If weights are given, each table row is multiplied by its weight.
    """
    weight, bags = as_value(b, call["weight"]), call.shape[0]
    reason = f"{b.op}: positions are addressed by index"
    for key in ("indices", "offsets"):
        b.freeze(as_value(b, call[key]), reason=reason)
    if isinstance(call["per_sample_weights"], Value | Stacked):
        b.freeze(as_value(b, call["per_sample_weights"]), reason=reason)
    along = law.positive if call["mode"] == 2 else law.linear
    result = b.carry(weight, [None, 1], [bags, weight.shape[1]], along, ended=None, reason=reason)
    return [result, *b.opaque([weight] if any(call.is_used[1:]) else [], call.shapes[1:])]


def gather(b: Builder, call: Call) -> Value:
    """Return result[i, j] = x[i, index[i, j]] along one axis."""
    x, positions = as_value(b, call["self"]), as_value(b, call["index"])
    dim = call["dim"] % x.ndim
    others = [k for k in range(x.ndim) if k != dim]
    if any(x.shape[k] != positions.shape[k] for k in others):
        raise NoRuleError("a gather that reads part of another axis")
    for k in others:
        b.tie(x.layouts[k], positions.layouts[k])
    result = Value(positions.layouts, positions.shape, index_of=x.index_of)
    laws = [law.masked(positions.axis(k), x.axis(k), result.axis(k)) for k in others]
    points = _points_into(positions, x.shape[dim])
    if points is not None:
        b.tie(x.layouts[dim], points)
        laws.append(law.shared(x.axis(dim)))
    else:
        laws.append(_address(b, x, dim, positions))
    b.record(*laws, law.fixed(positions.axis(dim), result.axis(dim)))
    return result


def scatter(b: Builder, call: Call) -> Value:
    """Write a source to positions along one axis of a tensor, if the positions point into the same axis.

    If a source is written to zeros, or a number to any tensor, the axis may be permuted together with the positions. In
    all other cases, positions are treated as numbers, and the axis is frozen.
    """
    base, positions = call["self"], call["index"]
    if not isinstance(positions, Value) or positions.index_of is None:
        return scatter_into(b, call)
    dim = call["dim"] % positions.ndim
    source = call.arguments.get("src", call.arguments.get("value"))
    if isinstance(base, Value) and not base.is_fixed and isinstance(source, int | float):
        return _overwrite(b, base, positions, dim)
    is_blank = isinstance(base, Value) and base.is_fixed and len(base.uniform) == base.ndim
    points = _points_into(positions, call.shape[dim])
    if not is_blank or points is None:
        return scatter_into(b, call)
    others = [k for k in range(positions.ndim) if k != dim]
    if any(call.shape[k] != positions.shape[k] for k in others):
        raise NoRuleError("a scatter that writes part of another axis")
    layouts = list(positions.layouts)
    layouts[dim] = points
    result = Value(layouts, call.shape)
    laws, ranks = [law.shared(result.axis(dim))], [positions.axis(dim)]
    tensors = [positions]
    if isinstance(source, Value | Stacked):
        values = as_value(b, source)
        b.settle(values)
        if values.shape != positions.shape:
            raise NoRuleError("a scatter that reads part of its source")
        for mine, theirs in zip(values.layouts, positions.layouts, strict=True):
            b.tie(mine, theirs)
        ranks.append(values.axis(dim))
        if not _is_any_order_of_one(b, positions, dim):
            algebra.freeze(values.layouts[dim], f"{b.op}: ranks")
        tensors.append(values)
    b.record(*laws, law.fixed(*ranks), *(law.fixed(*(t.axis(k) for t in tensors), result.axis(k)) for k in others))
    return result


def _is_any_order_of_one(b: Builder, positions: Value, dim: int) -> bool:
    """Return whether positions along an axis have an unspecified order, such as those of an unsorted `topk`.

    Positions of unspecified order are distinct. Therefore the result of a write stays the same if positions and written
    values are permuted together.
    """
    ranks = list(algebra.leaves(positions.layouts[dim]))
    return any(list(algebra.leaves(order.value.layouts[order.dim])) == ranks for order in b.orders)


def _overwrite(b: Builder, x: Value, positions: Value, dim: int) -> Value:
    """Return x after a number is written at given positions along one axis. The positions must point into the same
    axis.
    """
    points = _points_into(positions, x.shape[dim])
    others = [k for k in range(x.ndim) if k != dim]
    if points is None or any(x.shape[k] != positions.shape[k] for k in others):
        raise NoRuleError("a scatter at positions that are no choice of units")
    b.settle(x)
    b.tie(x.layouts[dim], points)
    for k in others:
        b.tie(x.layouts[k], positions.layouts[k])
    result = Value(x.layouts, x.shape)
    laws = [law.fixed(positions.axis(k), x.axis(k), result.axis(k)) for k in others]
    b.record(law.shared(x.axis(dim), result.axis(dim)), law.mixed(positions.axis(dim)), *laws)
    return result


def one_hot(b: Builder, call: Call) -> Value:
    x, size = as_value(b, call.x), call.shape[-1]
    points = _points_into(x, size)
    if points is None:
        b.settle(x)
    result = Value([*x.layouts, points or leaf(size, b.op)], call.shape)
    b.record(law.shared(result.axis(x.ndim)), *(law.fixed(x.axis(k), result.axis(k)) for k in range(x.ndim)))
    return result


def _points_into(positions: Value, size: int) -> Layout | None:
    """Return the axis into which positions point, if this axis has the given size.

    Return None for axes of other sizes, and for positions that are plain numbers.
    """
    points = positions.index_of
    return points if points is not None and algebra.size_of(points) == size else None


def _address(b: Builder, x: Value, dim: int, positions: Value) -> Law:
    """Freeze an axis whose indices are plain numbers, and return the constraint (law) on this axis."""
    b.settle(positions)
    algebra.freeze(x.layouts[dim], f"{b.op}: positions are addressed by index")
    return law.mixed(x.axis(dim))


def _many(b: Builder, x: Value, indices: list[Any], call: Call) -> Value:
    """Return the result of indexing a tensor with several index tensors.

    The indexed axes and the axes of the index tensors are frozen. Transformations of all other axes act on the result.
    """
    used = [k for k, i in enumerate(indices) if i is not None]
    tensors = [as_value(b, indices[k]) for k in used]
    kept = [k for k in range(x.ndim) if k not in used]
    wide = len(call.shape) - len(kept)
    is_together = used == list(range(used[0], used[-1] + 1))
    at = used[0] if is_together else 0
    reason = f"{b.op}: positions are addressed by index"
    axes = {k: (k if k < at else k + wide - len(used)) if is_together else wide + kept.index(k) for k in kept}
    if any(x.shape[k] != call.shape[j] for k, j in axes.items()):
        raise NoRuleError("an index that is not understood")
    for value in [x, *tensors]:
        b.settle(value)
    layouts = [leaf(n, reason) for n in call.shape]
    for k, j in axes.items():
        layouts[j] = x.layouts[k]
    result = Value(layouts, call.shape)
    laws = [law.linear(x.axis(k), result.axis(j)) for k, j in axes.items()]
    laws += [law.mixed(result.axis(j)) for j in range(len(call.shape)) if j not in axes.values()]
    b.record(*laws)
    for k in used:
        b.freeze(x, [k], reason)
    for tensor in tensors:
        b.freeze(tensor, reason=reason)
    return result


RULES: dict[str, Rule] = {
    "embedding_bag": embedding_bag,
    "embedding": lambda b, call: look_up(b, as_value(b, call["weight"]), 0, call["indices"]),
    "index_select": lambda b, call: look_up(b, as_value(b, call["self"]), call["dim"], call["index"]),
    "index": index,
    "gather": gather,
    **named(scatter, "scatter scatter_add scatter_reduce"),
    "one_hot": one_hot,
}
