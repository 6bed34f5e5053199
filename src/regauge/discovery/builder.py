"""What operator rules write with: primitives that tie axes and record their laws.

Every primitive is sound by itself, so a rule is sound if it composes primitives that compute what the
operator computes. Those that move values are in `views.py`, the ground below them in `recorder.py`.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Literal

from regauge.discovery import record as law
from regauge.discovery.layout import Layout, leaf
from regauge.discovery.record import Law, Letter, Spot, Value, Virtual
from regauge.discovery.views import Views

Over = Literal["sum", "magnitude", "norm"]
Operand = Value | float | int | bool | complex


class Builder(Views):
    """Everything that a rule may use: moving values, sums and products, functions of entries, reductions."""

    def multilinear(
        self,
        operands: Sequence[tuple[Value, Sequence[Hashable]]],
        out: Sequence[Hashable],
        shape: Sequence[int],
    ) -> Value:
        """An Einstein sum: axes with the same label run together, labels missing from `out` are summed over.

        A label of None is an axis of size one that broadcasts.
        """
        operands = list(zip(self.distinct([value for value, _ in operands]), [n for _, n in operands], strict=True))
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

    def reduce(
        self, x: Value, dims: Sequence[int], keepdim: bool, over: Over = "sum", *, along: Law = law.linear
    ) -> Value:
        """A symmetric function over some axes; `along` is the law for the other axes (default: linear).

        `over` is "sum" (units can be reordered), "magnitude" (signs pass as well) or "norm" (rotations, over one axis).
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
        one: dict[Over, Law] = {"sum": law.fixed, "magnitude": law.even, "norm": law.normed}
        reduced = one["magnitude" if over == "norm" and len(dims) > 1 else over]
        letters.extend(reduced(Spot(x, (k,))) for k in dims)
        if keepdim:
            letters.extend(law.fixed(Spot(result, (k,))) for k in dims)
        self.record(*letters)
        return result

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
        tensors = list(zip(self.distinct([x for x, _ in tensors]), [e for _, e in tensors], strict=True))
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


def _factor(numbers: Sequence[Operand]) -> float | None:
    factor = 1.0
    for number in numbers:
        if isinstance(number, complex | Value):
            return None
        factor *= float(number)
    return factor if math.isfinite(factor) else None
