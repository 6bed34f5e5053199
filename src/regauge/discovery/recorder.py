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
                    extra.append(law.mixed(value.axis(dim)))
        self.records.append([*laws, *extra])

    def tie(self, *layouts: Layout) -> None:
        for other in layouts[1:]:
            algebra.unify(layouts[0], other, self.op)

    def equate(self, *values: Value) -> None:
        """Tie tensors of one shape axis by axis: what acts on one acts on all."""
        for k in range(values[0].ndim):
            self.tie(*(value.layouts[k] for value in values))
        self.record(*(law.linear(*(value.axis(k) for value in values)) for k in range(values[0].ndim)))

    def freeze(self, value: Value, dims: Sequence[int] | None = None, reason: str | None = None) -> None:
        """Nothing may act on these axes."""
        dims = range(value.ndim) if dims is None else dims
        for dim in dims:
            algebra.freeze(value.layouts[dim], reason or self.op)
        self.records.append([law.mixed(value.axis(dim)) for dim in dims])

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

    def carry(
        self,
        x: Value,
        sources: Sequence[int | None],
        shape: Sequence[int],
        along: LawOf = law.same,
        *,
        ended: LawOf | None = law.fixed,
        reason: str | None = None,
    ) -> Value:
        """A function that treats all slices of x alike along the axes that go on.

        Args:
            x: The operand.
            sources: For each axis of the result the axis of x that goes on there; None for a new axis.
            shape: Sizes of the axes of the result.
            along: The law of an axis of x and the axis of the result.
            ended: The law of an axis of x that ends; None freezes it.
            reason: Why new axes, and those that end without a law, are frozen; new axes are free if there is none.
        """
        layouts = [leaf(n, reason) if d is None else x.layouts[d] for d, n in zip(sources, shape, strict=True)]
        result = Value(layouts, shape, index_of=x.index_of if along is law.same else None)
        where = {d: k for k, d in enumerate(sources) if d is not None}
        result.uniform = frozenset(where[d] for d in x.uniform if d in where)
        if x.virtual is not None and x.virtual.dim in where:
            result.virtual = x.virtual._replace(dim=where[x.virtual.dim])
        laws = [along(x.axis(d), result.axis(k)) for d, k in where.items()]
        for d in (d for d in range(x.ndim) if d not in where):
            if ended is None:
                algebra.freeze(x.layouts[d], reason or self.op)
            laws.append(law.mixed(x.axis(d)) if ended is None else ended(x.axis(d)))
        laws += [law.fixed(result.axis(k), mixes=reason is not None) for k, d in enumerate(sources) if d is None]
        self.record(*laws)
        return result

    def unary(self, x: Value, along: LawOf) -> Value:
        """A function of each entry; `along(axis of x, axis of the result)` is its law."""
        return self.carry(x, range(x.ndim), x.shape, along)

    def distinct(self, operands: Sequence[Value]) -> list[Value]:
        """The operands with copies in place of repetitions: each use has its own axes."""
        result: list[Value] = []
        for value in operands:
            result.append(self.unary(value, law.same) if any(value is other for other in result) else value)
        return result
