"""Values put among those of another tensor, at positions that are addressed by index or by a mask."""

from collections.abc import Sequence

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import Value
from regauge.discovery.layout import leaf
from regauge.discovery.movement import Stacked
from regauge.discovery.operators import Call, NoRuleError, Rule, as_value


def index_add(b: Builder, call: Call) -> Value:
    """x with slices of a source added at positions along one axis."""
    x, source, positions = (as_value(b, call[key]) for key in ("self", "source", "index"))
    dim = call["dim"] % x.ndim
    kept = {k: k for k in range(x.ndim) if k != dim}
    return _put(b, x, source, kept, call.shape, [positions])


def index_put(b: Builder, call: Call) -> Value:
    """x[i, j] = values, or += values: the axes behind those that are addressed run along."""
    x, values = as_value(b, call["self"]), as_value(b, call["values"])
    indices = list(call["indices"])
    addressed = len(indices)
    while addressed and indices[addressed - 1] is None:
        addressed -= 1
    if not addressed or any(not isinstance(one, Value | Stacked) for one in indices[:addressed]):
        raise NoRuleError("a write that leaves out an axis before those that it addresses")
    positions = [as_value(b, one) for one in indices[:addressed]]
    # A number addresses one axis, a mask as many as it has; both are tensors here.
    reached = max(addressed, sum(one.ndim for one in positions))
    kept = {k: k - x.ndim + values.ndim for k in range(reached, x.ndim)}
    return _put(b, x, values, kept, call.shape, positions)


def masked_scatter(b: Builder, call: Call) -> Value:
    """Entries of a source, in their order, where a mask says so: whole slices where the mask is the same along axes."""
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
) -> Value:
    """x with values of a source, along the axes in `kept`, each with that of the source; all others are addressed."""
    reason = f"{b.op}: positions are addressed by index"
    for value in (x, source, *positions):
        b.settle(value)
    wide = {k: d for k, d in kept.items() if d >= 0 and source.shape[d] == x.shape[k] and d not in source.uniform}
    layouts = [x.layouts[k] if k in kept else leaf(n, reason) for k, n in enumerate(shape)]
    for k, d in wide.items():
        b.tie(x.layouts[k], source.layouts[d])
    result = Value(layouts, shape)
    laws = [law.linear(x.axis(k), source.axis(d), result.axis(k)) for k, d in wide.items()]
    rest = [k for k in kept if k not in wide]
    laws += [(law.linear if source.is_zero else law.fixed)(x.axis(k), result.axis(k)) for k in rest]
    laws += [law.mixed(result.axis(k)) for k in range(len(shape)) if k not in kept]
    b.record(*laws)
    b.freeze(x, [k for k in range(x.ndim) if k not in kept], reason)
    b.freeze(source, [d for d in range(source.ndim) if d not in wide.values()], reason)
    for one in positions:
        b.freeze(one, reason=reason)
    return result


def _is_same_along(mask: Value, dim: int) -> bool:
    return dim < 0 or dim in mask.uniform or mask.shape[dim] == 1


RULES: dict[str, Rule] = {"index_add": index_add, "index_put": index_put, "masked_scatter": masked_scatter}
