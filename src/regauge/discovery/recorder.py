"""The ground that operator rules stand on: tying axes, recording laws, freezing what is not known.

Axes that a record does not mention are frozen, so that a rule which forgets something is still sound.
"""

from collections.abc import Sequence

from regauge.discovery import laws as law
from regauge.discovery import layout as algebra
from regauge.discovery.laws import Law, LawOf, Record, Value
from regauge.discovery.layout import Layout, leaf


class Recorder:
    """The state of one discovery: records so far, and axes that should be taken apart on the next run."""

    def __init__(self, unrolled: frozenset[tuple[str, int]] = frozenset()) -> None:
        self.records: list[Record] = []
        self.unknown: dict[str, None] = {}
        self.unrolled = unrolled
        self.requests: set[tuple[str, int]] = set()
        self.op = ""
        self.node = ""

    def use(self, value: Value) -> Value:
        """A tensor as an operand. Fixed ones come with new axes at each use, so that they tie nothing together."""
        if not value.is_fixed:
            return value
        reason = f"{self.op}: tied to an input or a constant"
        layouts = [leaf(n, None if k in value.uniform else reason) for k, n in enumerate(value.shape)]
        # Zeros satisfy every law; other constants have the axes along which they vary frozen.
        uniform = frozenset() if value.is_zero else value.uniform
        fresh = Value(layouts, value.shape, is_zero=value.is_zero, uniform=uniform)
        own = law.zero if value.is_zero else law.fixed
        self.record(*(own(fresh.axis(k)) for k in range(value.ndim)))
        return fresh

    def record(self, *laws: Law) -> None:
        """Keep the laws of an operator; freeze the axes of its tensors that no one mentions."""
        laws = tuple(one for one in laws if one.axes)
        mentioned: dict[int, set[int]] = {}
        values: dict[int, Value] = {}
        for one in laws:
            for axis in one.axes:
                values[id(axis.value)] = axis.value
                mentioned.setdefault(id(axis.value), set()).update(axis.dims)
        extra = []
        for key, value in values.items():
            for dim in range(value.ndim):
                if dim not in mentioned[key]:
                    if value.shape[dim] > 1:
                        algebra.freeze(value.layouts[dim], f"{self.op}: not free to move")
                    extra.append(law.fixed(value.axis(dim), mixes=True))
        self.records.append(Record(self.op, [*laws, *extra]))

    def tie(self, *layouts: Layout) -> None:
        for other in layouts[1:]:
            algebra.unify(layouts[0], other, self.op)

    def freeze(self, value: Value, dims: Sequence[int] | None = None, reason: str | None = None) -> None:
        """Nothing may act on these axes."""
        dims = range(value.ndim) if dims is None else dims
        for dim in dims:
            algebra.freeze(value.layouts[dim], reason or self.op)
        axes = [value.axis(dim) for dim in dims]
        self.records.append(Record(self.op, [law.fixed(axis, mixes=True) for axis in axes]))

    def settle(self, value: Value) -> None:
        """Positions that a tensor holds as numbers keep their meaning only if their axis does not move."""
        if value.index_of is not None:
            algebra.freeze(value.index_of, f"{self.op}: uses positions as numbers")

    def opaque(self, operands: Sequence[Value], shapes: Sequence[Sequence[int]]) -> list[Value]:
        """An operator that nothing is known of: freeze what goes in and what comes out."""
        for value in operands:
            self.settle(value)
            if not value.is_fixed:
                self.freeze(value)
        results = []
        for shape in shapes:
            value = Value([leaf(n, self.op) for n in shape], shape)
            self.freeze(value)
            results.append(value)
        return results

    def unary(self, x: Value, make: LawOf) -> Value:
        """A function of each entry; `make(axis of x, axis of the result)` is its law."""
        result = Value(x.layouts, x.shape, uniform=x.uniform, virtual=x.virtual)
        self.record(*(make(x.axis(k), result.axis(k)) for k in range(x.ndim)))
        return result

    def distinct(self, operands: Sequence[Value]) -> list[Value]:
        """The operands with copies in place of repetitions: each use has its own axes."""
        result: list[Value] = []
        for value in operands:
            result.append(self.unary(value, law.same) if any(value is other for other in result) else value)
        return result
