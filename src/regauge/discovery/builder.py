"""Primitives: the functions from which the rules of operators are composed. Primitives tie axes and record constraints
(laws).

Every primitive is sound: it never allows a transformation that changes the function. A rule is sound if it composes
primitives that together compute the same function as the operator. The primitives that record constraints and rearrange
entries are in `movement.py`.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

from regauge.discovery import laws as law
from regauge.discovery.laws import Axis, Law, LawOf, Value, Virtual
from regauge.discovery.layout import Layout, leaf
from regauge.discovery.movement import Movement

Over = Literal["sum", "magnitude", "norm"]
Entrywise = Literal["add", "maximum", "mul", "joint"]
Operand = Value | float | int | bool | complex


class Builder(Movement):
    """The primitives that a rule may use: rearrangements, sums and products, functions of entries, reductions."""

    def multilinear(
        self,
        operands: Sequence[tuple[Value, Sequence[Hashable]]],
        out: Sequence[Hashable],
        shape: Sequence[int],
    ) -> Value:
        """Return an Einstein sum of tensors.

        Axes with the same label share an index, and labels missing from `out` are summed over. A label of None marks an
        axis of size one that broadcasts.
        """
        operands = list(zip(self.distinct([value for value, _ in operands]), [n for _, n in operands], strict=True))
        axes: dict[Hashable, list[Axis]] = {}
        for value, labels in operands:
            for dim, label in enumerate(labels):
                if label is not None:
                    axes.setdefault(label, []).append(value.axis(dim))
        for found in axes.values():
            self.tie(*(axis.value.layouts[axis.dims[0]] for axis in found))
        layouts = [
            axes[label][0].value.layouts[axes[label][0].dims[0]] if label in axes else leaf(n)
            for label, n in zip(out, shape, strict=True)
        ]
        result = Value(layouts, shape)
        result.virtual = self._carry_virtual([value for value, _ in operands], out, [labels for _, labels in operands])
        laws = []
        for label, found in axes.items():
            target = Axis(result, (list(out).index(label),)) if label in out else None
            if target is not None and len(found) == 1:
                laws.append(law.linear(found[0], target))
            elif target is not None:
                laws.append(law.product(target, found))
            elif len(found) == 2:
                laws.append(law.contracted(*found))
            elif len(found) == 1:
                laws.append(law.fixed(*found))
            else:
                laws.append(law.product(None, found))
        laws.extend(
            law.fixed(value.axis(dim))
            for value, labels in operands
            for dim, label in enumerate(labels)
            if label is None
        )
        laws.extend(law.fixed(result.axis(k)) for k, label in enumerate(out) if label not in axes)
        self.record(*laws, law.product(result.whole(), [value.whole() for value, _ in operands]))
        return result

    def add(self, operands: Sequence[Operand], shape: Sequence[int], *, select: Value | None = None) -> Value:
        """Return a sum with broadcasting.

        If a mask `select` is given, select each entry from one of the operands instead, as in `torch.where`.
        """
        return self._pointwise(operands, shape, "add", select)

    def maximum(self, operands: Sequence[Operand], shape: Sequence[int]) -> Value:
        """Return the maximum or minimum, entry by entry."""
        return self._pointwise(operands, shape, "maximum")

    def mul(self, operands: Sequence[Operand], shape: Sequence[int], exponents: Sequence[int] | None = None) -> Value:
        """Return a product, or a quotient if an exponent is -1, with broadcasting."""
        return self._pointwise(operands, shape, "mul", exponents=exponents)

    def joint(self, operands: Sequence[Operand], shape: Sequence[int]) -> Value:
        """Return an arbitrary function of the operands, applied to their entries at each index.

        An arbitrary function of entries commutes only with permutations.
        """
        return self._pointwise(operands, shape, "joint")

    def reduce(
        self, x: Value, dims: Sequence[int], keepdim: bool, over: Over = "sum", *, along: LawOf = law.linear
    ) -> Value:
        """Return a symmetric function over some axes, such as a sum or norm.

        The argument `along` is the constraint (law) on the remaining axes. The default is the constraint of a linear
        function.

        The argument `over` states which transformations of the reduced axes do not change the result. With "sum", only
        permutations are possible, and with "magnitude" permutations and signs. For "norm", rotations of a single axis
        are also possible.
        """
        dims = sorted(d % x.ndim for d in dims)
        sources = [None if k in dims else k for k in range(x.ndim) if keepdim or k not in dims]
        shape = [1 if d is None else x.shape[d] for d in sources]
        laws: dict[Over, LawOf] = {"sum": law.fixed, "magnitude": law.even, "norm": law.normed}
        ended = laws["magnitude" if over == "norm" and len(dims) > 1 else over]
        return self.carry(x, sources, shape, along, ended=ended)

    def _pointwise(
        self,
        operands: Sequence[Operand],
        shape: Sequence[int],
        how: Entrywise,
        select: Value | None = None,
        exponents: Sequence[int] | None = None,
    ) -> Value:
        """Combine operands entry by entry.

        For each axis of the result, tie the corresponding axes of the operands, and record the constraint (law).
        """
        given = zip(operands, exponents or [1] * len(operands), strict=True)
        tensors = [(self.use(x), e) for x, e in given if isinstance(x, Value)]
        tensors = list(zip(self.distinct([x for x, _ in tensors]), [e for _, e in tensors], strict=True))
        numbers = [x for x in operands if not isinstance(x, Value)]
        if how == "mul" and (0 in numbers or any(x.is_zero and e > 0 for x, e in tensors)):
            self.record(*(law.zero(x.axis(k)) for x, _ in tensors for k in range(x.ndim)))
            return Value.fixed(shape, is_zero=True)
        # Zeros satisfy every law of a sum.
        live = [(x, e) for x, e in tensors if not (x.is_zero and how in ("add", "maximum"))]
        mask = self.use(select) if select is not None else None
        along = [_participants(k, shape, live, mask) for k in range(len(shape))]
        layouts: list[Layout] = []
        for found, n in zip(along, shape, strict=True):
            candidates = [axis.value.layouts[axis.dims[0]] for axis in found.all]
            self.tie(*candidates)
            layouts.append(candidates[0] if candidates else leaf(n))
        result = Value(layouts, shape, uniform=frozenset(k for k, found in enumerate(along) if not found.all))
        everyone = [x for x, _ in live] + ([mask] if mask is not None else [])
        labels = [list(range(len(shape) - x.ndim, len(shape))) for x in everyone]
        result.virtual = self._carry_virtual(everyone, list(range(len(shape))), labels)
        laws = [
            _entrywise_law(how, found, result.axis(k), numbers, selects=mask is not None)
            for k, found in enumerate(along)
        ]
        covered = {(axis.value, axis.dims[0]) for found in along for axis in found.all}
        laws += [law.fixed(x.axis(d)) for x in everyone for d in range(x.ndim) if (x, d) not in covered]
        if not any(found.has_all and found.axes for found in along):  # No axis relates the scales of all operands.
            exponents = tuple(e for _, e in live)
            each = _Participants(tuple(x.whole() for x, _ in live), exponents, mask and mask.whole(), True)
            laws.append(_entrywise_law(how, each, result.whole(), numbers, selects=mask is not None))
        self.record(*laws)
        return result

    def _carry_virtual(
        self, operands: Sequence[Value], out: Sequence[Hashable], labels: Sequence[Sequence[Hashable]]
    ) -> Virtual | None:
        """Return the virtual axis of a result: an axis of which the result contains only selected indices.

        The result inherits the virtual axis of an operand, if the result has the axis that selects the indices. If the
        virtual axes of two operands differ, the result has none.
        """
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


class _Participants(NamedTuple):
    """The operands that vary along one axis of a result. The fields contain the axes of the varying operands, the
    operands' exponents in a product, and the axis of a mask (if any). The field `has_all` states whether all operands
    vary along the axis.
    """

    axes: tuple[Axis, ...]
    exponents: tuple[int, ...]
    mask: Axis | None
    has_all: bool

    @property
    def all(self) -> tuple[Axis, ...]:
        return self.axes if self.mask is None else (*self.axes, self.mask)


def _participants(
    k: int, shape: Sequence[int], operands: Sequence[tuple[Value, int]], mask: Value | None
) -> _Participants:
    """Return the axes of operands that broadcasting aligns with axis `k` of a result of a given shape. Axes along which
    an operand is constant are left out.
    """

    def own(x: Value) -> Axis | None:
        dim = k - (len(shape) - x.ndim)
        return x.axis(dim) if dim >= 0 and x.shape[dim] == shape[k] and dim not in x.uniform else None

    found = [(axis, exponent) for x, exponent in operands if (axis := own(x)) is not None]
    return _Participants(
        tuple(axis for axis, _ in found),
        tuple(exponent for _, exponent in found),
        None if mask is None else own(mask),
        len(found) == len(operands),
    )


def _entrywise_law(
    how: Entrywise, found: _Participants, out: Axis, numbers: Sequence[Operand], *, selects: bool
) -> Law:
    """Return the constraint (law) on one axis of an operator's result. The constraint depends on the operands that vary
    along this axis, and on the operands that are numbers.
    """
    axes = found.axes
    is_plain = found.has_all and (how == "mul" or not any(x != 0 for x in numbers))
    if found.mask is not None:
        return (law.masked if axes and is_plain else law.fixed)(found.mask, *axes, out)
    if not axes or how == "joint":
        return law.fixed(*axes, out)
    if how == "mul":
        if len(axes) == 1 and found.exponents == (1,):
            return law.multiplied(axes[0], out, _factor(numbers) if found.has_all else None)
        return law.product(out, axes, found.exponents)
    if how == "add" and not selects:
        return (law.added if is_plain else law.offset)(axes, out)
    if not is_plain:
        return law.fixed(*axes, out)
    return (law.positive if how == "maximum" else law.linear)(*axes, out)


def _factor(numbers: Sequence[Operand]) -> float | None:
    factor = 1.0
    for number in numbers:
        if isinstance(number, complex | Value):
            return None
        factor *= float(number)
    return factor if math.isfinite(factor) else None
