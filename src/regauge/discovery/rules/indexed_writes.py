"""Writes of entries into a tensor, at positions given by an index or a mask."""

from collections.abc import Sequence
from typing import Any

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import LawOf, Value
from regauge.discovery.layout import leaf
from regauge.discovery.movement import Stacked
from regauge.discovery.operators import Call, NoRuleError, Rule, as_value, named

REDUCED: dict[str | None, LawOf] = {
    None: law.linear,
    "add": law.linear,
    "sum": law.linear,
    "mean": law.linear,
    "amax": law.positive,
    "amin": law.positive,
    "max": law.positive,
    "min": law.positive,
    "prod": law.fixed,
    "multiply": law.fixed,
}
"""The constraint (law) on the remaining axes, for each way of combining entries at the same position.

If entries are multiplied, only permutations are possible, because the number of factors at a position is unknown.
"""


def index_into(b: Builder, call: Call) -> Value:
    """Return x after slices of a source are written, added or reduced into x at positions along one axis."""
    x, source, positions = (as_value(b, call[key]) for key in ("self", "source", "index"))
    dim = call["dim"] % x.ndim
    kept = {k: k for k in range(x.ndim) if k != dim}
    return _put(b, x, source, kept, call.shape, [positions], _along(call))


def index_fill(b: Builder, call: Call) -> Value:
    """Return x after a number is written at positions along one axis."""
    x, positions, value = as_value(b, call["self"]), as_value(b, call["index"]), call["value"]
    source = as_value(b, value) if isinstance(value, Value | Stacked) else Value.fixed((), is_zero=value == 0)
    dim = call["dim"] % x.ndim
    return _put(b, x, source, {k: -1 for k in range(x.ndim) if k != dim}, call.shape, [positions])


def scatter_into(b: Builder, call: Call) -> Value:
    """Return x after entries of a source, or a number, are written at positions along one axis."""
    x, positions = as_value(b, call["self"]), as_value(b, call["index"])
    given = call.arguments.get("src", call.arguments.get("value"))
    is_number = not isinstance(given, Value | Stacked)
    source = Value.fixed((), is_zero=given == 0) if is_number else as_value(b, given)
    if not x.ndim or any(value.ndim != x.ndim for value in (positions, *([] if is_number else [source]))):
        raise NoRuleError("a scatter of numbers")
    dim, along = call["dim"] % x.ndim, _along(call)
    kept = {k: -1 if is_number else k for k in range(x.ndim) if k != dim}
    if any(value.shape[k] != x.shape[k] for k in kept for value in (positions, *([] if is_number else [source]))):
        raise NoRuleError("a scatter that reads or writes part of another axis")
    # Along an axis on which the positions are constant, whole slices are moved.
    apart = {k: d for k, d in kept.items() if k in positions.uniform or positions.shape[k] == 1}
    return _put(b, x, source, apart, call.shape, [positions], along)


def segment_reduce(b: Builder, call: Call) -> Value:
    """Return sums, means, extrema or products over consecutive segments of one axis."""
    x, axis, initial = as_value(b, call["data"]), call["axis"] % call["data"].ndim, call["initial"]
    along = law.fixed if initial is not None else REDUCED[call["reduce"]]
    for key in ("lengths", "indices", "offsets"):
        if isinstance(call[key], Value) and not call[key].is_fixed:
            raise NoRuleError("segments that depend on parameters")
    sources = [None if k == axis else k for k in range(x.ndim)]
    return b.carry(x, sources, call.shape, along, ended=None, reason=f"{b.op}: segments")


def index_put(b: Builder, call: Call) -> Value:
    """Return x after x[i, j] = values, or x[i, j] += values.

    Transformations may act on the axes after the indexed axes.
    """
    x, values = as_value(b, call["self"]), as_value(b, call["values"])
    indices = list(call["indices"])
    addressed = len(indices)
    while addressed and indices[addressed - 1] is None:
        addressed -= 1
    if not addressed or any(not isinstance(one, Value | Stacked) for one in indices[:addressed]):
        raise NoRuleError("a write that leaves out an axis before those that it addresses")
    positions = [as_value(b, one) for one in indices[:addressed]]
    # An index tensor addresses one axis, and a mask addresses as many axes as it has.
    reached = max(addressed, sum(one.ndim for one in positions))
    kept = {k: k - x.ndim + values.ndim for k in range(reached, x.ndim)}
    return _put(b, x, values, kept, call.shape, positions)


def masked_scatter(b: Builder, call: Call) -> Value:
    """Return x after entries of a source are written, in their order, to the positions that a mask selects.

    If the mask is constant along the last axes, whole slices are written.
    """
    x, source, mask = as_value(b, call["self"]), as_value(b, call["source"]), call["mask"]
    if not isinstance(mask, Value) or not mask.is_fixed or x.shape != call.shape:
        raise NoRuleError("a mask that depends on parameters")
    kept: dict[int, int] = {}
    for k in reversed(range(x.ndim)):
        own, theirs = k - x.ndim + mask.ndim, k - x.ndim + source.ndim
        if theirs < 0 or source.shape[theirs] != x.shape[k] or not _is_same_along(mask, own):
            break
        kept[k] = theirs
    return _put(b, x, source, kept, call.shape, [])


def _put(
    b: Builder,
    x: Value,
    source: Value,
    kept: dict[int, int],
    shape: Sequence[int],
    positions: Sequence[Value],
    along: LawOf = law.linear,
) -> Value:
    """Return x after entries of a source are written to it.

    `kept` maps axes of x to the corresponding axes of the source. The positions index all axes of x that are not in
    `kept`.
    """
    reason = f"{b.op}: positions are addressed by index"
    for value in (x, source, *positions):
        b.settle(value)
    wide = {k: d for k, d in kept.items() if d >= 0 and source.shape[d] == x.shape[k] and d not in source.uniform}
    layouts = [x.layouts[k] if k in kept else leaf(n, reason) for k, n in enumerate(shape)]
    for k, d in wide.items():
        b.tie(x.layouts[k], source.layouts[d])
    result = Value(layouts, shape)
    laws = [along(x.axis(k), source.axis(d), result.axis(k)) for k, d in wide.items()]
    rest = [k for k in kept if k not in wide]
    laws += [(along if source.is_zero else law.fixed)(x.axis(k), result.axis(k)) for k in rest]
    laws += [law.mixed(result.axis(k)) for k in range(len(shape)) if k not in kept]
    b.record(*laws)
    b.freeze(x, [k for k in range(x.ndim) if k not in kept], reason)
    b.freeze(source, [d for d in range(source.ndim) if d not in wide.values()], reason)
    for one in positions:
        b.freeze(one, reason=reason)
    return result


def _along(call: Call) -> LawOf:
    how: Any = call.arguments.get("reduce")
    return REDUCED[how]


def _is_same_along(mask: Value, dim: int) -> bool:
    return dim < 0 or dim in mask.uniform or mask.shape[dim] == 1


RULES: dict[str, Rule] = {
    **named(index_into, "index_add index_copy index_reduce"),
    **named(index_put, "index_put _unsafe_index_put"),
    "index_fill": index_fill,
    "masked_scatter": masked_scatter,
    "segment_reduce": segment_reduce,
}
