"""What operator rules write with: a few primitives that tie axes and record their laws.

Every primitive is sound by itself, so a rule is sound if it composes primitives that compute what the
operator computes. Axes that a record does not mention are frozen.
"""

import math
from collections.abc import Hashable, Sequence

from regauge.discover import layout as axis
from regauge.discover import record as law
from regauge.discover.layout import Layout, leaf
from regauge.discover.record import Law, Letter, Record, Spot, Value, Virtual

Operand = Value | float | int | bool | complex


class Stack:
    """Tensors stacked along a new axis whose positions mean different things (query, key, value).

    It stays apart until an operator needs the whole; views, permutations and selections pass through.
    """

    def __init__(self, dim: int, pieces: Sequence[Value]) -> None:
        self.dim = dim
        self.pieces = list(pieces)

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.pieces[0].shape
        return (*inner[: self.dim], len(self.pieces), *inner[self.dim :])


class Builder:
    """The state of one discovery: records so far, and axes that should be taken apart on the next run."""

    def __init__(self, unrolled: frozenset[tuple[str, int]] = frozenset()) -> None:
        self.records: list[Record] = []
        self.unknown: dict[str, None] = {}
        self.unrolled = unrolled
        self.requests: set[tuple[str, int]] = set()
        self.op = ""
        self.node = ""

    # Basics

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
        self.record(*(own(Spot(fresh, (k,))) for k in range(value.ndim)))
        return fresh

    def record(self, *letters: Letter) -> None:
        """Keep the letters of an operator; freeze the axes of its tensors that no letter mentions."""
        letters = tuple(letter for letter in letters if letter.spots)
        mentioned: dict[int, set[int]] = {}
        values: dict[int, Value] = {}
        for letter in letters:
            for spot in letter.spots:
                values[id(spot.value)] = spot.value
                mentioned.setdefault(id(spot.value), set()).update(spot.dims)
        extra = []
        for key, value in values.items():
            for dim in range(value.ndim):
                if dim not in mentioned[key]:
                    if value.shape[dim] > 1:
                        axis.freeze(value.layouts[dim], f"{self.op}: not free to move")
                    extra.append(law.fixed(Spot(value, (dim,)), mixes=True))
        self.records.append(Record(self.op, [*letters, *extra]))

    def tie(self, *layouts: Layout) -> None:
        for other in layouts[1:]:
            axis.unify(layouts[0], other, self.op)

    def freeze(self, value: Value, dims: Sequence[int] | None = None, reason: str | None = None) -> None:
        """Nothing may act on these axes."""
        dims = range(value.ndim) if dims is None else dims
        for dim in dims:
            axis.freeze(value.layouts[dim], reason or self.op)
        spots = [Spot(value, (dim,)) for dim in dims]
        self.records.append(Record(self.op, [law.fixed(spot, mixes=True) for spot in spots]))

    def settle(self, value: Value) -> None:
        """Positions that a tensor holds as numbers keep their meaning only if their axis does not move."""
        if value.index_of is not None:
            axis.freeze(value.index_of, f"{self.op}: uses positions as numbers")

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

    # Products and sums

    def multilinear(
        self,
        operands: Sequence[tuple[Value, Sequence[Hashable]]],
        out: Sequence[Hashable],
        shape: Sequence[int],
    ) -> Value:
        """An Einstein sum: axes with the same label run together, labels missing from `out` are summed over.

        A label of None is an axis of size one that broadcasts.
        """
        operands = list(zip(self._distinct([value for value, _ in operands]), [n for _, n in operands], strict=True))
        spots: dict[Hashable, list[Spot]] = {}
        for value, labels in operands:
            for dim, label in enumerate(labels):
                if label is not None:
                    spots.setdefault(label, []).append(Spot(value, (dim,)))
        for found in spots.values():
            self.tie(*(spot.value.layouts[spot.dims[0]] for spot in found))
        layouts = [
            spots[label][0].value.layouts[spots[label][0].dims[0]] if label in spots else leaf(n)
            for label, n in zip(out, shape, strict=True)
        ]
        result = Value(layouts, shape)
        result.virtual = self._carried([value for value, _ in operands], out, [labels for _, labels in operands])
        letters = []
        for label, found in spots.items():
            target = Spot(result, (list(out).index(label),)) if label in out else None
            if target is not None and len(found) == 1:
                letters.append(law.linear(found[0], target))
            elif target is not None:
                letters.append(law.product(target, found))
            elif len(found) == 2:
                letters.append(law.contracted(*found))
            elif len(found) == 1:
                letters.append(law.fixed(*found))
            else:
                letters.append(law.product(None, found))
        letters.extend(
            law.fixed(Spot(value, (dim,)))
            for value, labels in operands
            for dim, label in enumerate(labels)
            if label is None
        )
        letters.extend(law.fixed(Spot(result, (k,))) for k, label in enumerate(out) if label not in spots)
        self.record(*letters)
        return result

    def add(self, operands: Sequence[Operand], shape: Sequence[int], *, select: Value | None = None) -> Value:
        """A sum with broadcasting; `select` is a mask that chooses among the operands instead (where)."""
        return self._pointwise(operands, shape, "add", select)

    def maximum(self, operands: Sequence[Operand], shape: Sequence[int]) -> Value:
        """Maximum or minimum, entry by entry."""
        return self._pointwise(operands, shape, "maximum")

    def mul(self, operands: Sequence[Operand], shape: Sequence[int], exponents: Sequence[int] | None = None) -> Value:
        """A product (or quotient, with exponent -1) with broadcasting."""
        return self._pointwise(operands, shape, "mul", exponents=exponents)

    def joint(self, operands: Sequence[Operand], shape: Sequence[int]) -> Value:
        """Any function of the entries at the same index: reordering only."""
        return self._pointwise(operands, shape, "joint")

    def unary(self, x: Value, make: Law) -> Value:
        """A function of each entry; `make(spot of x, spot of the result)` is its law."""
        result = Value(x.layouts, x.shape, uniform=x.uniform, virtual=x.virtual)
        self.record(*(make(Spot(x, (k,)), Spot(result, (k,))) for k in range(x.ndim)))
        return result

    def reduce(
        self, x: Value, dims: Sequence[int], keepdim: bool, over: str = "sum", *, along: Law = law.linear
    ) -> Value:
        """A symmetric function over some axes; `along` is the law for the other axes (default: linear).

        `over` is "sum" (units can be reordered) or "norm" (rotations pass as well).
        """
        dims = sorted(d % x.ndim for d in dims)
        kept = [k for k in range(x.ndim) if k not in dims]
        if keepdim:
            shape = [1 if k in dims else n for k, n in enumerate(x.shape)]
            layouts = [leaf(1) if k in dims else x.layouts[k] for k in range(x.ndim)]
            where = {k: k for k in kept}
        else:
            shape, layouts = [x.shape[k] for k in kept], [x.layouts[k] for k in kept]
            where = {k: j for j, k in enumerate(kept)}
        result = Value(layouts, shape)
        if x.virtual is not None and x.virtual.dim in kept:
            result.virtual = x.virtual._replace(dim=where[x.virtual.dim])
        letters = [along(Spot(x, (k,)), Spot(result, (where[k],))) for k in kept]
        reduced = law.normed if over == "norm" and len(dims) == 1 else law.fixed
        letters.extend(reduced(Spot(x, (k,))) for k in dims)
        if keepdim:
            letters.extend(law.fixed(Spot(result, (k,))) for k in dims)
        self.record(*letters)
        return result

    # Views

    def permute(self, x: Value | Stack, order: Sequence[int]) -> Value | Stack:
        if isinstance(x, Stack):
            order = [d % (x.pieces[0].ndim + 1) for d in order]
            inner = [d - (d > x.dim) for d in order if d != x.dim]
            return Stack(order.index(x.dim), [_value(self.permute(piece, inner)) for piece in x.pieces])
        order = [d % x.ndim for d in order]
        result = Value([x.layouts[d] for d in order], [x.shape[d] for d in order])
        result.uniform = frozenset(k for k, d in enumerate(order) if d in x.uniform)
        result.index_of = x.index_of
        if x.virtual is not None:
            result.virtual = x.virtual._replace(dim=order.index(x.virtual.dim))
        self.record(*(law.same(Spot(x, (d,)), Spot(result, (k,))) for k, d in enumerate(order)))
        return result

    def view(self, x: Value | Stack, shape: Sequence[int]) -> Value | Stack:
        """Reinterpret a row-major tensor; axes are split and merged as the sizes say."""
        if isinstance(x, Stack):
            moved = self._view_stack(x, shape)
            if moved is not None:
                return moved
            x = self.whole(x)
        groups = _matching_groups(x.shape, shape)
        for _, outs in groups:
            for k in outs:
                if (self.node, k) in self.unrolled and shape[k] > 1:
                    return self._view_unrolled(x, shape, outs, k)
        layouts: list[Layout] = [[] for _ in shape]
        spots = []
        failed: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for ins, outs in groups:
            merged = [atom for d in ins for atom in x.layouts[d]]
            parts = axis.split(merged, [shape[k] for k in outs])
            if parts is None:
                failed.append((ins, outs))
                reason = f"{self.op}: a view cuts across blocks"
                axis.freeze(merged, reason)
                for k in outs:
                    layouts[k] = leaf(shape[k], reason)
                continue
            for k, part in zip(outs, parts, strict=True):
                layouts[k] = part or leaf(1)
                if len(outs) > 1 and len(part) == 1:
                    part[0].origins |= {(self.node, k)}
            spots.append((ins, outs))
        result = Value(layouts, shape, index_of=x.index_of)
        if x.virtual is not None:
            for ins, outs in groups:
                if ins == (x.virtual.dim,) and len(outs) == 1:
                    result.virtual = x.virtual._replace(dim=outs[0])
        letters = [law.same(Spot(x, ins), Spot(result, outs)) for ins, outs in spots]
        for ins, outs in failed:
            letters.extend(law.fixed(Spot(x, (d,)), mixes=True) for d in ins)
            letters.extend(law.fixed(Spot(result, (k,)), mixes=True) for k in outs)
        self.record(*letters)
        return result

    def slice(self, x: Value | Stack, dim: int, start: int, stop: int) -> Value | Stack:
        """A contiguous range of one axis."""
        ndim = len(x.shape)
        dim %= ndim
        if (start, stop) == (0, x.shape[dim]):
            return x
        if isinstance(x, Stack):
            if dim == x.dim:
                return Stack(x.dim, x.pieces[start:stop])
            inner = dim - (dim > x.dim)
            return Stack(x.dim, [_value(self.slice(piece, inner, start, stop)) for piece in x.pieces])
        pieces = axis.cut(x.layouts[dim], [start, stop])
        piece = pieces[1 if start > 0 else 0]
        result = Value(
            [piece if k == dim else old for k, old in enumerate(x.layouts)],
            [stop - start if k == dim else n for k, n in enumerate(x.shape)],
        )
        own = law.same(Spot(x, (dim,), start, stop - start), Spot(result, (dim,)))
        result.uniform = x.uniform
        result.index_of = x.index_of
        if x.virtual is not None and x.virtual.dim != dim:
            result.virtual = x.virtual
        others = [law.same(Spot(x, (k,)), Spot(result, (k,))) for k in range(x.ndim) if k != dim]
        self.record(own, *others)
        return result

    def select(self, x: Value | Stack, dim: int, index: int) -> Value | Stack:
        """One index of an axis, which disappears."""
        ndim = len(x.shape)
        dim %= ndim
        index %= x.shape[dim]
        if isinstance(x, Stack):
            if dim == x.dim:
                return x.pieces[index]
            inner = dim - (dim > x.dim)
            pieces = [_value(self.select(piece, inner, index)) for piece in x.pieces]
            return Stack(x.dim - (dim < x.dim), pieces)
        expanded = axis.core(x.layouts[dim])
        if len(expanded) == 1 and x.shape[dim] > 1:
            self.requests |= expanded[0].origins
        if x.shape[dim] > 1 and not axis.is_frozen(x.layouts[dim]):
            x = _value(self.slice(x, dim, index, index + 1))
        return self._drop(x, dim)

    def squeeze(self, x: Value | Stack, dim: int) -> Value | Stack:
        """Drop an axis of size one."""
        if isinstance(x, Stack):
            if dim % len(x.shape) == x.dim:
                return x.pieces[0]
            dim %= len(x.shape)
            inner = dim - (dim > x.dim)
            return Stack(x.dim - (dim < x.dim), [_value(self.squeeze(piece, inner)) for piece in x.pieces])
        return self._drop(x, dim % x.ndim)

    def _drop(self, x: Value, dim: int) -> Value:
        kept = [k for k in range(x.ndim) if k != dim]
        result = Value([x.layouts[k] for k in kept], [x.shape[k] for k in kept])
        result.uniform = frozenset(j for j, k in enumerate(kept) if k in x.uniform)
        result.index_of = x.index_of
        if x.virtual is not None and x.virtual.dim != dim:
            result.virtual = x.virtual._replace(dim=kept.index(x.virtual.dim))
        letters = [law.same(Spot(x, (k,)), Spot(result, (j,))) for j, k in enumerate(kept)]
        self.record(*letters, law.fixed(Spot(x, (dim,))))
        return result

    def unsqueeze(self, x: Value | Stack, dim: int) -> Value | Stack:
        """A new axis of size one."""
        if isinstance(x, Stack):
            dim %= len(x.shape) + 1
            inner = dim - (dim > x.dim)
            return Stack(x.dim + (dim <= x.dim), [_value(self.unsqueeze(piece, inner)) for piece in x.pieces])
        dim %= x.ndim + 1
        layouts, shape = list(x.layouts), list(x.shape)
        layouts.insert(dim, leaf(1))
        shape.insert(dim, 1)
        result = Value(layouts, shape)
        result.uniform = frozenset(k + (k >= dim) for k in x.uniform)
        result.index_of = x.index_of
        if x.virtual is not None:
            result.virtual = x.virtual._replace(dim=x.virtual.dim + (x.virtual.dim >= dim))
        letters = [law.same(Spot(x, (k,)), Spot(result, (k + (k >= dim),))) for k in range(x.ndim)]
        self.record(*letters, law.fixed(Spot(result, (dim,))))
        return result

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """Repeat axes of size one; the new axes are uniform."""
        lead = len(shape) - x.ndim
        layouts, uniform, letters, virtual = [], set(), [], None
        for k, n in enumerate(shape):
            if k >= lead and x.shape[k - lead] == n:
                layouts.append(x.layouts[k - lead])
                if k - lead in x.uniform:
                    uniform.add(k)
                if x.virtual is not None and x.virtual.dim == k - lead:
                    virtual = x.virtual._replace(dim=k)
            else:
                layouts.append(leaf(n))
                uniform.add(k)
        result = Value(layouts, shape, uniform=frozenset(uniform), virtual=virtual, index_of=x.index_of)
        for k, n in enumerate(shape):
            if k >= lead and x.shape[k - lead] == n:
                letters.append(law.same(Spot(x, (k - lead,)), Spot(result, (k,))))
            else:
                letters.append(law.fixed(Spot(result, (k,))))
                if k >= lead:
                    letters.append(law.fixed(Spot(x, (k - lead,))))
        self.record(*letters)
        return result

    def cat(self, operands: Sequence[Value], dim: int) -> Value:
        """A direct sum along one axis."""
        operands = [x for x in operands if x.ndim > 1 or x.shape != (0,)]
        dim %= operands[0].ndim
        used = self._distinct([self.use(x) for x in operands])
        shape = list(used[0].shape)
        shape[dim] = sum(x.shape[dim] for x in used)
        live = [x for x in used if not x.is_zero] or used[:1]
        layouts = []
        for k in range(len(shape)):
            if k == dim:
                layouts.append(axis.direct_sum([x.layouts[dim] for x in used if x.shape[dim]]))
            else:
                self.tie(*(x.layouts[k] for x in live))
                layouts.append(live[0].layouts[k])
        result = Value(layouts, shape)
        # Zeros among the others scale and rotate along with them, but they do not move along with a translation.
        along = law.same if len(live) == len(used) else law.linear
        letters = [along(*(Spot(x, (k,)) for x in live), Spot(result, (k,))) for k in range(len(shape)) if k != dim]
        start = 0
        for x in used:
            length = x.shape[dim]
            if length and x in live:
                letters.append(law.same(Spot(x, (dim,)), Spot(result, (dim,), start, length)))
            start += length
        self.record(*letters)
        return result

    def whole(self, x: Value | Stack) -> Value:
        """A stack as one tensor, for operators that treat its pieces alike."""
        if isinstance(x, Value):
            return x
        pieces = self._distinct([self.use(piece) for piece in x.pieces])
        for piece in pieces:
            self.settle(piece)
        for k in range(pieces[0].ndim):
            self.tie(*(piece.layouts[k] for piece in pieces))
        reason = f"{self.op}: treats stacked tensors alike"
        layouts, shape = list(pieces[0].layouts), list(x.shape)
        layouts.insert(x.dim, leaf(len(pieces), reason))
        result = Value(layouts, shape)
        letters = [
            law.same(*(Spot(piece, (k,)) for piece in pieces), Spot(result, (k + (k >= x.dim),)))
            for k in range(pieces[0].ndim)
        ]
        self.record(*letters, law.fixed(Spot(result, (x.dim,)), mixes=True))
        return result

    # Private

    def _pointwise(
        self,
        operands: Sequence[Operand],
        shape: Sequence[int],
        how: str,
        select: Value | None = None,
        exponents: Sequence[int] | None = None,
    ) -> Value:
        tensors = [
            (self.use(x), e)
            for x, e in zip(operands, exponents or [1] * len(operands), strict=True)
            if isinstance(x, Value)
        ]
        numbers = [x for x in operands if not isinstance(x, Value)]
        tensors = list(zip(self._distinct([x for x, _ in tensors]), [e for _, e in tensors], strict=True))
        has_offset = how != "mul" and any(x != 0 for x in numbers)
        live = [(x, e) for x, e in tensors if not (x.is_zero and how in ("add", "maximum"))]
        if how == "mul" and any(x.is_zero for x, _ in tensors):
            live = tensors
        mask = self.use(select) if select is not None else None
        everyone = [x for x, _ in live] + ([mask] if mask is not None else [])
        layouts: list[Layout] = []
        uniform: set[int] = set()
        plans: list[tuple[list[tuple[Value, int, int]], list[Value], Value | None]] = []
        for k, n in enumerate(shape):
            having, lacking, masked = [], [], None
            for x, e in live:
                dim = k - (len(shape) - x.ndim)
                if dim >= 0 and x.shape[dim] == n and dim not in x.uniform:
                    having.append((x, dim, e))
                else:
                    lacking.append(x)
            if mask is not None:
                dim = k - (len(shape) - mask.ndim)
                if dim >= 0 and mask.shape[dim] == n and dim not in mask.uniform:
                    masked = mask
            candidates = [x.layouts[dim] for x, dim, _ in having]
            if masked is not None:
                candidates.append(masked.layouts[k - (len(shape) - masked.ndim)])
            if candidates:
                self.tie(*candidates)
                layouts.append(candidates[0])
            else:
                layouts.append(leaf(n))
                uniform.add(k)
            plans.append((having, lacking, masked))
        result = Value(layouts, shape, uniform=frozenset(uniform))
        labels = [list(range(len(shape) - x.ndim, len(shape))) for x in everyone]
        result.virtual = self._carried(everyone, list(range(len(shape))), labels)
        letters: list[Letter] = []
        covered: set[tuple[int, int]] = set()
        for k, (having, lacking, masked) in enumerate(plans):
            out = Spot(result, (k,))
            spots = [Spot(x, (dim,)) for x, dim, _ in having]
            covered |= {(id(x), dim) for x, dim, _ in having}
            if masked is not None:
                dim = k - (len(shape) - masked.ndim)
                covered.add((id(masked), dim))
                chosen = Spot(masked, (dim,))
                is_plain = bool(spots) and not lacking and not has_offset
                letters.append(law.masked(chosen, *spots, out) if is_plain else law.fixed(chosen, *spots, out))
            elif not spots:
                letters.append(law.fixed(out))
            elif how == "mul":
                if len(spots) == 1 and having[0][2] == 1:
                    letters.append(law.multiplied(spots[0], out, None if lacking else _factor(numbers)))
                else:
                    letters.append(law.product(out, spots, [e for _, _, e in having]))
            elif how == "joint":
                letters.append(law.fixed(*spots, out))
            elif lacking or has_offset:
                letters.append(law.offset(spots, out) if how == "add" and mask is None else law.fixed(*spots, out))
            elif how == "maximum":
                letters.append(law.positive(*spots, out))
            else:
                letters.append(law.added(spots, out) if mask is None else law.linear(*spots, out))
        for x in everyone:
            letters.extend(law.fixed(Spot(x, (d,))) for d in range(x.ndim) if (id(x), d) not in covered)
        self.record(*letters)
        return result

    def _distinct(self, operands: Sequence[Value]) -> list[Value]:
        """The operands with copies in place of repetitions: each use has its own axes."""
        result: list[Value] = []
        for value in operands:
            result.append(self.unary(value, law.same) if any(value is other for other in result) else value)
        return result

    def _carried(
        self, operands: Sequence[Value], out: Sequence[Hashable], labels: Sequence[Sequence[Hashable]]
    ) -> Virtual | None:
        """The virtual axis of a result: kept while the axis that selects from it is kept."""
        found: Virtual | None = None
        for value, names in zip(operands, labels, strict=True):
            if value.virtual is None:
                continue
            label = names[value.virtual.dim]
            if label is None or label not in out:
                continue
            here = value.virtual._replace(dim=list(out).index(label))
            if found is not None and (found.source is not here.source or found.dim != here.dim):
                return None
            found = here
        return found

    def _view_unrolled(self, x: Value, shape: Sequence[int], outs: tuple[int, ...], k: int) -> Stack:
        count = shape[k]
        after = 1
        for j in outs:
            if j > k:
                after *= shape[j]
        lead = [shape[j] for j in range(len(shape)) if j < k]
        tail = [shape[j] for j in range(len(shape)) if j > k and j not in outs]
        node, self.node = self.node, f"{self.node}/unrolled"
        joined = _value(self.view(x, [*lead, count * after, *tail]))
        pieces = []
        for index in range(count):
            piece = _value(self.slice(joined, len(lead), index * after, (index + 1) * after))
            inner = [n for j, n in enumerate(shape) if j != k]
            pieces.append(_value(self.view(piece, inner)))
        self.node = node
        return Stack(k, pieces)

    def _view_stack(self, x: Stack, shape: Sequence[int]) -> Stack | None:
        for ins, outs in _matching_groups(x.shape, shape):
            if ins == (x.dim,) and len(outs) == 1:
                dim = outs[0]
                inner = [n for k, n in enumerate(shape) if k != dim]
                return Stack(dim, [_value(self.view(piece, inner)) for piece in x.pieces])
        return None


def _factor(numbers: Sequence[Operand]) -> float | None:
    factor = 1.0
    for number in numbers:
        if isinstance(number, complex | Value):
            return None
        factor *= float(number)
    return factor if math.isfinite(factor) else None


def _value(x: Value | Stack) -> Value:
    if isinstance(x, Stack):
        raise TypeError("a stacked axis inside a stacked axis")
    return x


def _matching_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Runs of axes with equal products, in order; axes of size one join a neighbor."""
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins, outs = [], []
        p = q = 1
        if i < len(before):
            ins.append(i)
            p *= before[i]
            i += 1
        if j < len(after):
            outs.append(j)
            q *= after[j]
            j += 1
        while p != q:
            if p < q and i < len(before):
                ins.append(i)
                p *= before[i]
                i += 1
            elif j < len(after):
                outs.append(j)
                q *= after[j]
                j += 1
            else:
                break
        groups.append((tuple(ins), tuple(outs)))
    return groups
