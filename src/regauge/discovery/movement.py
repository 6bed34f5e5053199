"""Primitives that move values without changing them: views, permutations, slices, repetition, concatenation."""

from collections.abc import Sequence

from regauge.discovery import laws as law
from regauge.discovery import layout as algebra
from regauge.discovery.laws import Axis, Value
from regauge.discovery.layout import Layout, leaf
from regauge.discovery.recorder import Recorder


class Stacked:
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


class Movement(Recorder):
    """A recorder that knows how values move."""

    def permute(self, x: Value | Stacked, order: Sequence[int]) -> Value | Stacked:
        if isinstance(x, Stacked):
            order = [d % (x.pieces[0].ndim + 1) for d in order]
            inner = [d - (d > x.dim) for d in order if d != x.dim]
            return Stacked(order.index(x.dim), [_value(self.permute(piece, inner)) for piece in x.pieces])
        order = [d % x.ndim for d in order]
        result = Value([x.layouts[d] for d in order], [x.shape[d] for d in order])
        result.uniform = frozenset(k for k, d in enumerate(order) if d in x.uniform)
        result.index_of = x.index_of
        if x.virtual is not None:
            result.virtual = x.virtual._replace(dim=order.index(x.virtual.dim))
        self.record(*(law.same(x.axis(d), result.axis(k)) for k, d in enumerate(order)))
        return result

    def view(self, x: Value | Stacked, shape: Sequence[int]) -> Value | Stacked:
        """Reinterpret a row-major tensor; axes are split and merged as the sizes say."""
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
        layouts: list[Layout] = [[] for _ in shape]
        axes = []
        failed: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for ins, outs in groups:
            merged = [atom for d in ins for atom in x.layouts[d]]
            parts = algebra.split(merged, [shape[k] for k in outs])
            if parts is None:
                failed.append((ins, outs))
                reason = f"{self.op}: a view cuts across blocks"
                algebra.freeze(merged, reason)
                for k in outs:
                    layouts[k] = leaf(shape[k], reason)
                continue
            for k, part in zip(outs, parts, strict=True):
                layouts[k] = part or leaf(1)
                if len(outs) > 1 and len(part) == 1:
                    part[0].origins |= {(self.node, k)}
            axes.append((ins, outs))
        result = Value(layouts, shape, index_of=x.index_of)
        if x.virtual is not None:
            for ins, outs in groups:
                if ins == (x.virtual.dim,) and len(outs) == 1:
                    result.virtual = x.virtual._replace(dim=outs[0])
        laws = [law.same(Axis(x, ins), Axis(result, outs)) for ins, outs in axes]
        for ins, outs in failed:
            laws.extend(law.fixed(x.axis(d), mixes=True) for d in ins)
            laws.extend(law.fixed(result.axis(k), mixes=True) for k in outs)
        self.record(*laws)
        return result

    def slice(self, x: Value | Stacked, dim: int, start: int, stop: int) -> Value | Stacked:
        """A contiguous range of one algebra."""
        ndim = len(x.shape)
        dim %= ndim
        if (start, stop) == (0, x.shape[dim]):
            return x
        if isinstance(x, Stacked):
            if dim == x.dim:
                return Stacked(x.dim, x.pieces[start:stop])
            inner = dim - (dim > x.dim)
            return Stacked(x.dim, [_value(self.slice(piece, inner, start, stop)) for piece in x.pieces])
        if start >= stop:  # Of no values at all anything may be said.
            return Value.fixed([0 if k == dim else n for k, n in enumerate(x.shape)], is_zero=True)
        pieces = algebra.cut(x.layouts[dim], [start, stop])
        piece = pieces[1 if start > 0 else 0]
        result = Value(
            [piece if k == dim else old for k, old in enumerate(x.layouts)],
            [stop - start if k == dim else n for k, n in enumerate(x.shape)],
        )
        own = law.same(Axis(x, (dim,), start, stop - start), result.axis(dim))
        result.uniform = x.uniform
        result.index_of = x.index_of
        if x.virtual is not None and x.virtual.dim != dim:
            result.virtual = x.virtual
        others = [law.same(x.axis(k), result.axis(k)) for k in range(x.ndim) if k != dim]
        self.record(own, *others)
        return result

    def select(self, x: Value | Stacked, dim: int, index: int) -> Value | Stacked:
        """One index of an axis, which disappears."""
        ndim = len(x.shape)
        dim %= ndim
        index %= x.shape[dim]
        if isinstance(x, Stacked):
            if dim == x.dim:
                return x.pieces[index]
            inner = dim - (dim > x.dim)
            pieces = [_value(self.select(piece, inner, index)) for piece in x.pieces]
            return Stacked(x.dim - (dim < x.dim), pieces)
        expanded = algebra.without_units(x.layouts[dim])
        if len(expanded) == 1 and x.shape[dim] > 1:
            self.requests |= expanded[0].origins
        if x.shape[dim] > 1 and not algebra.is_frozen(x.layouts[dim]):
            x = _value(self.slice(x, dim, index, index + 1))
        return self._drop(x, dim)

    def squeeze(self, x: Value | Stacked, dim: int) -> Value | Stacked:
        """Drop an axis of size one."""
        if isinstance(x, Stacked):
            if dim % len(x.shape) == x.dim:
                return x.pieces[0]
            dim %= len(x.shape)
            inner = dim - (dim > x.dim)
            return Stacked(x.dim - (dim < x.dim), [_value(self.squeeze(piece, inner)) for piece in x.pieces])
        return self._drop(x, dim % x.ndim)

    def _drop(self, x: Value, dim: int) -> Value:
        kept = [k for k in range(x.ndim) if k != dim]
        result = Value([x.layouts[k] for k in kept], [x.shape[k] for k in kept])
        result.uniform = frozenset(j for j, k in enumerate(kept) if k in x.uniform)
        result.index_of = x.index_of
        if x.virtual is not None and x.virtual.dim != dim:
            result.virtual = x.virtual._replace(dim=kept.index(x.virtual.dim))
        laws = [law.same(x.axis(k), result.axis(j)) for j, k in enumerate(kept)]
        self.record(*laws, law.fixed(x.axis(dim)))
        return result

    def unsqueeze(self, x: Value | Stacked, dim: int) -> Value | Stacked:
        """A new axis of size one."""
        if isinstance(x, Stacked):
            dim %= len(x.shape) + 1
            inner = dim - (dim > x.dim)
            return Stacked(x.dim + (dim <= x.dim), [_value(self.unsqueeze(piece, inner)) for piece in x.pieces])
        dim %= x.ndim + 1
        layouts, shape = list(x.layouts), list(x.shape)
        layouts.insert(dim, leaf(1))
        shape.insert(dim, 1)
        result = Value(layouts, shape)
        result.uniform = frozenset(k + (k >= dim) for k in x.uniform)
        result.index_of = x.index_of
        if x.virtual is not None:
            result.virtual = x.virtual._replace(dim=x.virtual.dim + (x.virtual.dim >= dim))
        laws = [law.same(x.axis(k), result.axis(k + (k >= dim))) for k in range(x.ndim)]
        self.record(*laws, law.fixed(result.axis(dim)))
        return result

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """Repeat axes of size one; the new axes are uniform."""
        lead = len(shape) - x.ndim
        layouts, uniform, laws, virtual = [], set(), [], None
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
                laws.append(law.same(x.axis(k - lead), result.axis(k)))
            else:
                laws.append(law.fixed(result.axis(k)))
                if k >= lead:
                    laws.append(law.fixed(x.axis(k - lead)))
        self.record(*laws)
        return result

    def cat(self, operands: Sequence[Value], dim: int) -> Value:
        """A direct sum along one algebra."""
        operands = [x for x in operands if x.ndim > 1 or x.shape != (0,)]
        dim %= operands[0].ndim
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
        result = Value(layouts, shape)
        # Zeros among the others scale and rotate along with them, but they do not move along with a translation.
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
        """A stack as one tensor, for operators that treat its pieces alike."""
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
        self.record(*laws, law.fixed(result.axis(x.dim), mixes=True))
        return result

    def _view_unrolled(self, x: Value, shape: Sequence[int], outs: tuple[int, ...], k: int) -> Stacked:
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
        return Stacked(k, pieces)

    def _view_stack(self, x: Stacked, shape: Sequence[int]) -> Stacked | None:
        for ins, outs in _matching_groups(x.shape, shape):
            if ins == (x.dim,) and len(outs) == 1:
                dim = outs[0]
                inner = [n for k, n in enumerate(shape) if k != dim]
                return Stacked(dim, [_value(self.view(piece, inner)) for piece in x.pieces])
        return None


def _value(x: Value | Stacked) -> Value:
    if isinstance(x, Stacked):
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
