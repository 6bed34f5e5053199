"""The functions on which all operator rules build. These functions tie axes, record laws, freeze unknown axes and
rearrange entries.

Views, permutations, slices, repetitions and concatenations rearrange entries without changing them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from regauge.discovery import laws as law
from regauge.discovery import layout as algebra
from regauge.discovery.laws import Axis, Law, LawOf, Record, Value
from regauge.discovery.layout import Layout, leaf
from regauge.discovery.open_orders import OpenOrder

COMPLEX = "complex numbers, which are not moved; hold pairs of real ones and read them by torch.view_as_complex"


class Stacked:
    """Tensors stacked along a new axis whose indices have different meanings (query, key, value).

    Stacked tensors stay separate until an operator needs the whole stack. Views, permutations and selections keep
    stacked tensors separate.
    """

    def __init__(self, dim: int, pieces: Sequence[Value]) -> None:
        self.dim = dim
        self.pieces = list(pieces)

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.pieces[0].shape
        return (*inner[: self.dim], len(self.pieces), *inner[self.dim :])

    def map(self, dim: int, move: Callable[[Value], Value]) -> "Stacked":
        """Apply the function `move` to each stacked tensor, and stack the results along `dim`."""
        return Stacked(dim, [move(piece) for piece in self.pieces])


Moved = TypeVar("Moved", Value, Stacked)


class Movement:
    """The state of one pass of discovery.

    The state contains the recorded laws of operators, the axes to split in the next pass, and the results whose order
    is unspecified.

    Axes that no record mentions are frozen. Therefore even a rule that omits an axis allows no wrong transformation.
    """

    def __init__(
        self, unrolled: frozenset[tuple[str, int]] = frozenset(), sensitive: frozenset[str] = frozenset()
    ) -> None:
        self.records: list[Record] = []
        self.unknown: dict[str, None] = {}
        self.unrolled = unrolled
        self.requests: set[tuple[str, int]] = set()
        self.sensitive = sensitive
        self.orders: list[OpenOrder] = []
        self.op = ""
        self.node = ""

    def use(self, value: Value) -> Value:
        """Return a tensor in the form in which an operator uses it.

        Each operator that uses a fixed tensor gets a copy with new axes. Therefore a fixed tensor does not tie other
        tensors to one another.
        """
        if not value.is_fixed:
            return value
        made = None if value.made is None else value.made()
        if made is not None:
            return made
        reason = f"{self.op}: tied to {COMPLEX if value.is_complex else 'an input or a constant'}"
        layouts = [leaf(n, None if k in value.uniform else reason) for k, n in enumerate(value.shape)]
        # Zeros satisfy every law. The axes along which other constants vary are frozen.
        uniform = frozenset() if value.is_zero else value.uniform
        fresh = Value(layouts, value.shape, is_zero=value.is_zero, uniform=uniform, has_inputs=value.has_inputs)
        own = law.zero if value.is_zero else law.fixed
        self.record(*map(own, _axes(fresh)))
        return fresh

    def record(self, *laws: Law) -> None:
        """Store the laws of an operator, and freeze the axes of its tensors that no law mentions."""
        laws = tuple(one for one in laws if one.axes)
        mentioned: dict[Value, set[int]] = defaultdict(set)
        for one in laws:
            for axis in one.axes:
                mentioned[axis.value].update(axis.dims)
        extra = []
        for value, dims in mentioned.items():
            for dim in range(value.ndim):
                if dim not in dims:
                    if value.shape[dim] > 1:
                        algebra.freeze(value.layouts[dim], f"{self.op}: not free to move")
                    extra.append(law.mixed(value.axis(dim)))
        self.records.append([*laws, *extra])

    def tie(self, *layouts: Layout) -> None:
        for other in layouts[1:]:
            algebra.unify(layouts[0], other, self.op)

    def equate(self, *values: Value) -> None:
        """Tie corresponding axes of tensors of one shape. Each transformation then acts on all tied tensors."""
        for k in range(values[0].ndim):
            self.tie(*(value.layouts[k] for value in values))
        self.record(*(law.linear(*axes) for axes in zip(*map(_axes, values), strict=True)))

    def freeze(self, value: Value, dims: Sequence[int] | None = None, reason: str | None = None) -> None:
        """Freeze axes of a tensor, which means that no transformation acts on them."""
        axes = _axes(value) if dims is None else [value.axis(dim) for dim in dims]
        for dim in (dim for axis in axes for dim in axis.dims):
            algebra.freeze(value.layouts[dim], reason or self.op)
        rest = [law.zero(value.whole())] if len(axes) < value.ndim else []  # Scales along the other axes are possible.
        self.records.append([*map(law.mixed, axes), *rest])

    def keep_unread(self, operands: Sequence[Any], results: Sequence[Any], start: int) -> None:
        """Forbid scales of operands and results that no record from number `start` on mentions, such as numbers without
        axes.

        If an operand is returned unchanged, the operand can still be scaled, even if no record mentions it.
        """
        mentioned = {axis.value for record in self.records[start:] for one in record for axis in one.axes}
        given = {x for x in operands if isinstance(x, Value)}
        made = {x for one in results for x in (one.pieces if isinstance(one, Stacked) else [one])}
        for value in (given ^ made) - mentioned:
            if isinstance(value, Value) and not value.is_fixed:
                self.records.append([law.mixed(value.whole())])

    def settle(self, value: Value) -> None:
        """Freeze the axis into which a tensor of indices points, because an operator uses the indices as numbers."""
        if value.index_of is not None:
            algebra.freeze(value.index_of, f"{self.op}: uses positions as numbers")

    def opaque(self, operands: Sequence[Value], shapes: Sequence[Sequence[int]]) -> list[Value]:
        """Return the results of an unknown operator.

        All axes of the operands and results of an unknown operator are frozen.
        """
        for value in operands:
            self.settle(value)
            if not value.is_fixed:
                self.freeze(value)
        results = []
        for shape in shapes:
            value = Value([leaf(n, self.op) for n in shape], shape, has_inputs=True)
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
        """Return the result of an operator that acts in the same way on every slice of x along the kept axes.

        Args:
            x: The operand.
            sources: For each axis of the result, the corresponding axis of x, or None for a new axis.
            shape: The sizes of the result's axes.
            along: The law that relates an axis of x to the corresponding axis of the result.
            ended: The law of axes of x that the result lacks. If `ended` is None, axes that the result lacks are
                frozen.
            reason: The reason that is recorded for frozen axes: new axes of the result, and axes of x that the result
                lacks. If `reason` is None, new axes are not frozen.
        """
        layouts = [leaf(n, reason) if d is None else x.layouts[d] for d, n in zip(sources, shape, strict=True)]
        result = Value(layouts, shape, index_of=x.index_of if along is law.same else None)
        where = {d: k for k, d in enumerate(sources) if d is not None}
        result.uniform = frozenset(where[d] for d in x.uniform if d in where)
        result.is_norm = x.is_norm and along is law.same
        if x.virtual is not None and x.virtual.dim in where:
            result.virtual = x.virtual._replace(dim=where[x.virtual.dim])
        laws = [along(x.axis(d), result.axis(k)) for d, k in where.items()]
        for d in (d for d in range(x.ndim) if d not in where):
            if ended is None:
                algebra.freeze(x.layouts[d], reason or self.op)
            laws.append(law.mixed(x.axis(d)) if ended is None else ended(x.axis(d)))
        laws += [law.fixed(result.axis(k), mixes=reason is not None) for k, d in enumerate(sources) if d is None]
        self.record(*laws, *([] if where else [along(x.whole(), result.whole())]))
        return result

    def unary(self, x: Value, along: LawOf) -> Value:
        """Return the result of a function of each entry, whose law is `along(axis of x, axis of the result)`."""
        return self.carry(x, range(x.ndim), x.shape, along)

    def distinct(self, operands: Sequence[Value]) -> list[Value]:
        """Return the operands. If one operand occurs several times, copies replace it.

        Each occurrence of the operand then has separate axes.
        """
        result: list[Value] = []
        for value in operands:
            result.append(self.unary(value, law.same) if any(value is other for other in result) else value)
        return result

    def permute(self, x: Moved, order: Sequence[int]) -> Moved:
        order = [d % len(x.shape) for d in order]
        if isinstance(x, Stacked):
            inner = [d - (d > x.dim) for d in order if d != x.dim]
            return x.map(order.index(x.dim), lambda piece: self.permute(piece, inner))
        return self.carry(x, order, [x.shape[d] for d in order])

    def view(self, x: Value | Stacked, shape: Sequence[int]) -> Value | Stacked:
        """Reshape a row-major tensor by splitting and merging axes to match the sizes."""
        if isinstance(x, Stacked):
            moved = self._view_stack(x, shape)
            if moved is not None:
                return moved
            x = self.whole(x)
        groups = _matching_groups(x.shape, shape)
        for _, outs in groups:
            for k in outs:
                if (self.node, k) in self.unrolled and shape[k] > 1:
                    return self._view_unrolled(x, shape, outs, k)
        result = Value([leaf(n) for n in shape], shape, index_of=x.index_of)
        laws = []
        for ins, outs in groups:
            merged = [atom for d in ins for atom in x.layouts[d]]
            parts = algebra.split(merged, [shape[k] for k in outs])
            if parts is None:
                for layout in (merged, *(result.layouts[k] for k in outs)):
                    algebra.freeze(layout, f"{self.op}: a view cuts across blocks")
                laws += [law.mixed(axis) for axis in (*map(x.axis, ins), *map(result.axis, outs))]
                continue
            for k, part in zip(outs, parts, strict=True):
                result.layouts[k] = part or leaf(1)
                if shape[k] < algebra.size_of(merged) and len(part) == 1:
                    part[0].origins |= {(self.node, k)}
            if x.virtual is not None and ins == (x.virtual.dim,) and len(outs) == 1:
                result.virtual = x.virtual._replace(dim=outs[0])
            laws.append(law.same(Axis(x, ins), Axis(result, outs)))
        self.record(*laws, law.same(x.whole(), result.whole()))
        return result

    def slice(self, x: Moved, dim: int, start: int, stop: int) -> Moved:
        """Return a contiguous range of one axis of a tensor, as `x[..., start:stop, ...]` does."""
        dim %= len(x.shape)
        if (start, stop) == (0, x.shape[dim]):
            return x
        if isinstance(x, Stacked):
            if dim == x.dim:
                return Stacked(dim, x.pieces[start:stop])
            return x.map(x.dim, lambda piece: self.slice(piece, dim - (dim > x.dim), start, stop))
        if start >= stop:  # Every statement about an empty tensor is true.
            return Value.fixed([0 if k == dim else n for k, n in enumerate(x.shape)], is_zero=True)
        layouts, shape = list(x.layouts), list(x.shape)
        layouts[dim] = algebra.cut(x.layouts[dim], [start, stop])[1 if start > 0 else 0]
        shape[dim] = stop - start
        result = Value(layouts, shape, uniform=x.uniform, index_of=x.index_of)
        if x.virtual is not None and x.virtual.dim != dim:
            result.virtual = x.virtual
        own = law.same(Axis(x, (dim,), start, stop - start), result.axis(dim))
        self.record(own, *(law.same(x.axis(k), result.axis(k)) for k in range(x.ndim) if k != dim))
        return result

    def select(self, x: Value | Stacked, dim: int, index: int) -> Value | Stacked:
        """Return a tensor at one index of an axis; the result lacks this axis."""
        dim %= len(x.shape)
        index %= x.shape[dim]
        if isinstance(x, Stacked):
            if dim == x.dim:
                return x.pieces[index]
            inner = dim - (dim > x.dim)
            return x.map(x.dim - (dim < x.dim), lambda piece: _value(self.select(piece, inner, index)))
        if x.shape[dim] > 1:
            expanded = algebra.without_units(x.layouts[dim])
            if len(expanded) == 1:
                self.requests |= expanded[0].origins
            if not algebra.is_frozen(x.layouts[dim]):
                x = self.slice(x, dim, index, index + 1)
        kept = [k for k in range(x.ndim) if k != dim]
        return self.carry(x, kept, [x.shape[k] for k in kept])

    def unsqueeze(self, x: Moved, dim: int) -> Moved:
        """Return the tensor with a new axis of size one."""
        dim %= len(x.shape) + 1
        if isinstance(x, Stacked):
            return x.map(x.dim + (dim <= x.dim), lambda piece: self.unsqueeze(piece, dim - (dim > x.dim)))
        sources = [*range(dim), None, *range(dim, x.ndim)]
        return self.carry(x, sources, [*x.shape[:dim], 1, *x.shape[dim:]])

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """Repeat axes of size one. The repeated axes are uniform: the tensor is constant along them."""
        own = [k - len(shape) + x.ndim for k in range(len(shape))]
        sources = [d if d >= 0 and x.shape[d] == n else None for d, n in zip(own, shape, strict=True)]
        result = self.carry(x, sources, shape)
        result.uniform |= {k for k, d in enumerate(sources) if d is None}
        return result

    def repeat(self, x: Value, dim: int, count: int, *, is_inner: bool) -> Value:
        """Repeat an axis as a whole, as `torch.Tensor.repeat` does.

        If `is_inner`, repeat each index of the axis in place instead, as `torch.repeat_interleave` does.

        The copies are first put along a new axis, which is then merged with the repeated axis.
        """
        new = dim + is_inner
        wide = self.expand(self.unsqueeze(x, new), [*x.shape[:new], count, *x.shape[new:]])
        return _value(self.view(wide, [*x.shape[:dim], count * x.shape[dim], *x.shape[dim + 1 :]]))

    def cat(self, operands: Sequence[Value], dim: int) -> Value:
        """Concatenate tensors along one axis. The axis of the result is a direct sum of the operands' axes."""
        operands = [x for x in operands if x.ndim > 1 or x.shape != (0,)]
        dim %= operands[0].ndim
        points = [x.index_of for x in operands]
        sizes = {None if one is None else algebra.size_of(one) for one in points}
        if None in sizes or len(sizes) > 1:
            for x in operands:
                self.settle(x)
            index_of = None
        else:
            index_of = points[0]
            self.tie(*(one for one in points if one is not None))
        used = self.distinct([self.use(x) for x in operands])
        shape = list(used[0].shape)
        shape[dim] = sum(x.shape[dim] for x in used)
        live = [x for x in used if not x.is_zero] or used[:1]
        layouts = []
        for k in range(len(shape)):
            if k == dim:
                layouts.append(algebra.direct_sum([x.layouts[dim] for x in used if x.shape[dim]]))
            else:
                self.tie(*(x.layouts[k] for x in live))
                layouts.append(live[0].layouts[k])
        result = Value(layouts, shape, index_of=index_of)
        # Scales and rotations leave concatenated zeros unchanged, but a translation would change them.
        along = law.same if len(live) == len(used) else law.linear
        laws = [along(*(x.axis(k) for x in live), result.axis(k)) for k in range(len(shape)) if k != dim]
        start = 0
        for x in used:
            length = x.shape[dim]
            if length and x in live:
                laws.append(law.same(x.axis(dim), Axis(result, (dim,), start, length)))
            start += length
        self.record(*laws)
        return result

    def whole(self, x: Value | Stacked) -> Value:
        """Join stacked tensors into one tensor, for operators that treat all stacked tensors in the same way."""
        if isinstance(x, Value):
            return x
        pieces = self.distinct([self.use(piece) for piece in x.pieces])
        for piece in pieces:
            self.settle(piece)
        for k in range(pieces[0].ndim):
            self.tie(*(piece.layouts[k] for piece in pieces))
        reason = f"{self.op}: treats stacked tensors alike"
        layouts, shape = list(pieces[0].layouts), list(x.shape)
        layouts.insert(x.dim, leaf(len(pieces), reason))
        result = Value(layouts, shape)
        laws = [
            law.same(*(piece.axis(k) for piece in pieces), result.axis(k + (k >= x.dim))) for k in range(pieces[0].ndim)
        ]
        all_alike = law.same(*(piece.whole() for piece in pieces), result.whole())
        self.record(*laws, law.mixed(result.axis(x.dim)), all_alike)
        return result

    def _view_unrolled(self, x: Value, shape: Sequence[int], outs: tuple[int, ...], k: int) -> Stacked:
        """Return a view whose axis `k` is split into stacked tensors."""
        after = math.prod(shape[j] for j in outs if j > k)
        tail = [n for j, n in enumerate(shape) if j > k and j not in outs]
        inner = [*shape[:k], *shape[k + 1 :]]
        node, self.node = self.node, f"{self.node}/unrolled"
        joined = _value(self.view(x, [*shape[:k], shape[k] * after, *tail]))
        pieces = [self.slice(joined, k, index * after, (index + 1) * after) for index in range(shape[k])]
        result = Stacked(k, [_value(self.view(piece, inner)) for piece in pieces])
        self.node = node
        return result

    def _view_stack(self, x: Stacked, shape: Sequence[int]) -> Stacked | None:
        for ins, outs in _matching_groups(x.shape, shape):
            if ins == (x.dim,) and len(outs) == 1:
                inner = [n for k, n in enumerate(shape) if k != outs[0]]
                return Stacked(outs[0], [_value(self.view(piece, inner)) for piece in x.pieces])
        return None


def _axes(value: Value) -> list[Axis]:
    """Return each axis of a tensor as an `Axis`. For a number, which has no axes, return one `Axis` that represents the
    whole tensor.
    """
    return [value.axis(k) for k in range(value.ndim)] or [value.whole()]


def _value(x: Value | Stacked) -> Value:
    if isinstance(x, Stacked):
        raise TypeError("a stacked axis inside a stacked axis")
    return x


def _matching_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return pairs of axis groups: consecutive axes before a view, and consecutive axes after it with the same product
    of sizes.

    Axes of size one join the group of a neighbor.
    """
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        first, start = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (p := math.prod(before[first:i])) != (q := math.prod(after[start:j])):
            if p < q and i < len(before):
                i += 1
            elif j < len(after):
                j += 1
            else:
                break
        groups.append((tuple(range(first, i)), tuple(range(start, j))))
    return groups
