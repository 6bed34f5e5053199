"""The laws that one operator puts on the axes of its tensors, kept until all axes are fully refined."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from regauge.discovery.layout import Layout, leaf

Edges = tuple[tuple[int, int, int], ...]
LawOf = Callable[..., "Law"]
"""Makes the law of one index from its axes."""


class Virtual(NamedTuple):
    """The layout of an axis that a tensor lacks, but that its axis `dim` selects from by the index tensor `source`."""

    dim: int
    layout: Layout
    source: object


@final
class Value:
    """A tensor of the traced program: one layout per axis.

    Attributes:
        layouts: The meaning of the indices of each axis.
        shape: Sizes of the axes.
        is_fixed: It does not depend on any parameter (inputs, constants, position tables).
        is_zero: It is zero everywhere.
        is_norm: Its entries are norms, which are zero only where all that they are norms of is zero.
        is_complex: It depends on complex parameters or buffers, which nothing moves.
        uniform: Axes along which it is constant.
        index_of: For integer tensors: the axis whose positions its values are.
        virtual: An axis that is not there but that an axis of this tensor selects from.
        has_inputs: For tensors that depend on no parameter: whether they depend on the inputs, or on something unknown.
        made: For tensors that depend on no parameter and have blocks of equal entries: makes one whose blocks are free.
    """

    __slots__ = (
        "has_inputs",
        "index_of",
        "is_complex",
        "is_fixed",
        "is_norm",
        "is_zero",
        "layouts",
        "made",
        "shape",
        "uniform",
        "virtual",
    )

    def __init__(
        self,
        layouts: Sequence[Layout],
        shape: Sequence[int],
        *,
        is_fixed: bool = False,
        is_zero: bool = False,
        uniform: frozenset[int] = frozenset(),
        index_of: Layout | None = None,
        virtual: Virtual | None = None,
        has_inputs: bool = False,
    ) -> None:
        self.layouts, self.shape = [list(layout) for layout in layouts], tuple(shape)
        self.is_fixed, self.is_zero, self.uniform = is_fixed, is_zero, uniform
        self.index_of, self.virtual, self.has_inputs = index_of, virtual, has_inputs
        self.is_norm = self.is_complex = False
        self.made: Callable[[], Value | None] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def axis(self, dim: int) -> "Axis":
        """Return one axis, as laws name it."""
        return Axis(self, (dim,))

    @classmethod
    def fixed(
        cls,
        shape: Sequence[int],
        is_zero: bool = False,
        uniform: frozenset[int] | None = None,
        *,
        has_inputs: bool = False,
    ) -> "Value":
        """Return a tensor that no parameter influences."""
        constant = frozenset(range(len(shape))) if is_zero else (uniform or frozenset())
        layouts = [leaf(n) for n in shape]
        return cls(layouts, shape, is_fixed=True, is_zero=is_zero, uniform=constant, has_inputs=has_inputs)


@dataclass(frozen=True)
class Axis:
    """Some axes of a tensor read as one, or a range of one axis."""

    value: Value
    dims: tuple[int, ...]
    start: int = 0
    length: int | None = None


@dataclass(frozen=True)
class Law:
    """One index of an operator, and the law that transformations along it must obey.

    The rows of `scale` and `sign` are linear equations over the axes that must vanish: over the rationals
    for log-scales and modulo two for signs. `edges` tie the matrices that may act on two axes: +1 the same,
    -1 the inverse transpose. A axis without an edge admits no matrix.

    Attributes:
        axes: The axes that this index runs over.
        scale: Equations for log-scales; None fixes every axis.
        sign: Equations for signs; None fixes every axis.
        edges: Pairs of axes on which one matrix may act; None where none may.
        is_metric: Only rotations may act.
        keeps_ones: Only rotations that keep the vector of all ones may act.
        is_mixing: The operator treats the indices jointly, so that nothing else may depend on them.
        is_shared: One reordering must serve all: this axis cannot be repeated within another.
        is_virtual: The axis is selected from by another axis of the result, which remembers it.
        shift: Equations for translations of the values, constant along all other axes; None fixes them.
        period: For functions of (x, out) with half period pi: whether they are odd or even.
    """

    axes: tuple[Axis, ...]
    scale: tuple[tuple[int, ...], ...] | None = None
    sign: tuple[tuple[int, ...], ...] | None = None
    edges: Edges | None = None
    is_metric: bool = False
    keeps_ones: bool = False
    is_mixing: bool = False
    is_shared: bool = False
    is_virtual: bool = False
    shift: Sequence[Sequence[float]] | None = None
    period: Literal["odd", "even"] | None = None

    @property
    def is_contraction(self) -> bool:
        """Whether products are summed over the index: then scales of all axes cancel."""
        return bool(self.scale) and len(self.axes) > 1 and all(c > 0 for row in self.scale or () for c in row)


Record = Sequence[Law]
"""The laws of one operator call."""


def same(*axes: Axis) -> Law:
    """Return a copy of the values to another place: everything passes."""
    rows = _equal(len(axes))
    return Law(axes, rows, rows, _alike(len(axes)), shift=rows)


def linear(*axes: Axis) -> Law:
    """Return a linear operator along which nothing happens: everything but translations passes."""
    rows = _equal(len(axes))
    return Law(axes, rows, rows, _alike(len(axes)))


def added(axes: Sequence[Axis], out: Axis) -> Law:
    """Return a sum of tensors that all have this axis."""
    rows = _equal(len(axes) + 1)
    shift = ((*(1.0 for _ in axes), -1.0),)
    return Law((*axes, out), rows, rows, _alike(len(axes) + 1), shift=shift)


def offset(axes: Sequence[Axis], out: Axis) -> Law:
    """Return a sum with something that lacks this axis: reordering and translations only."""
    return Law((*axes, out), shift=((*(1.0 for _ in axes), -1.0),))


def multiplied(x: Axis, out: Axis, factor: float | None) -> Law:
    """Multiplied by something that does not vary along this axis: a known number or something else."""
    rows = _equal(2)
    return Law((x, out), rows, rows, _alike(2), shift=None if factor is None else ((factor, -1.0),))


def masked(mask: Axis, *axes: Axis) -> Law:
    """Chosen by a mask that has this axis."""
    rows = ((1, *(0 for _ in axes)), *((0, *row) for row in _equal(len(axes))))
    return Law((mask, *axes), rows, rows)


def zero(axis: Axis) -> Law:
    """Zeros: everything leaves them as they are but a translation."""
    return Law((axis,), (), (), ((0, 0, 1),))


def fixed(*axes: Axis, mixes: bool = False) -> Law:
    """Reordering only; with `mixes` the operator treats all indices jointly."""
    return Law(axes, is_mixing=mixes)


def mixed(*axes: Axis) -> Law:
    """Reordering only, and all indices are treated jointly."""
    return fixed(*axes, mixes=True)


def shared(*axes: Axis) -> Law:
    """Reordering only, the same for every axis that continues another one."""
    return Law(axes, is_shared=True)


def entrywise(scale: Sequence[int] | None, sign: Sequence[int] | None) -> LawOf:
    """Return the law of a function of each entry: one equation for the scales of its input and its result, one for
    signs.

    `(1, -2)` reads `log(scale of x) - 2 log(scale of the result) = 0`; without an equation none pass.
    """

    def law(x: Axis, out: Axis) -> Law:
        return Law((x, out), None if scale is None else (tuple(scale),), None if sign is None else (tuple(sign),))

    return law


def positive(*axes: Axis) -> Law:
    """Positively homogeneous: scales pass, signs do not (ReLU, maximum)."""
    return Law(axes, _equal(len(axes)), None)


def odd(*axes: Axis, mixes: bool = False) -> Law:
    """Signs pass, scales do not (tanh)."""
    return Law(axes, None, _equal(len(axes)), is_mixing=mixes)


def even(x: Axis) -> Law:
    """Only magnitudes along this axis count."""
    return Law((x,), None, ())


def power(exponent: int, *, is_even: bool) -> LawOf:
    """Return the law of |x| ** exponent, with the sign of x or without it."""
    return entrywise((exponent, -1), (0, 1) if is_even else (1, 1))


def contracted(x: Axis, y: Axis) -> Law:
    """Summed over in a product of two tensors: one carries the inverse of what the other carries."""
    return Law((x, y), ((1, 1),), ((1, 1),), ((0, 1, -1),))


def product(out: Axis | None, factors: Sequence[Axis], exponents: Sequence[int] | None = None) -> Law:
    """Multiplied entry by entry; without an output the product is summed over."""
    exponents = list(exponents or [1] * len(factors))
    axes = (*factors, *([out] if out else []))
    row = (*exponents, *([-1] if out else []))
    return Law(axes, (row,), (tuple(abs(c) % 2 for c in row),))


def normed(*axes: Axis) -> Law:
    """The 2-norm over this axis is all that counts: rotations pass."""
    edges = _alike(len(axes)) or ((0, 0, 1),)
    return Law(axes, None, _equal(len(axes)), edges, is_metric=True, is_mixing=len(axes) > 1)


def centered(*axes: Axis) -> Law:
    """Only deviations from the mean over this axis, and their 2-norm, count: rotations that keep the ones pass."""
    return Law(axes, edges=_alike(len(axes)), is_metric=True, keeps_ones=True, is_mixing=True)


def periodic(x: Axis, out: Axis, period: Literal["odd", "even"]) -> Law:
    """sin (odd) and cos (even): a shift by pi flips the sign of the output."""
    return Law((x, out), None, ((0, 1),) if period == "even" else ((1, 1),), period=period)


def _alike(count: int) -> Edges:
    return tuple((0, k, 1) for k in range(1, count))


def _equal(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple((j == 0) - (j == k) for j in range(count)) for k in range(1, count))


compared = entrywise((0, 1), None)
"""Positive scales do not change the result: comparison with zero, the position of the largest."""
magnitude = power(1, is_even=True)
"""|x|."""
squared = power(2, is_even=True)
"""x ** 2."""
