"""Laws: constraints of single operators on the transformations of axes of their operands and results.

Laws are stored until the whole program is read, because later operators may split the axes further.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from regauge.discovery.layout import Layout, leaf

Edges = tuple[tuple[int, int, int], ...]
LawOf = Callable[..., "Law"]
"""A function that returns the law of one operator index, given the axes along which the index runs."""


class Virtual(NamedTuple):
    """A virtual axis of a tensor: an axis of which the tensor contains only selected indices.

    For example, if each token selects an expert, the values of the tokens have a virtual axis of experts.

    The index tensor `source` selects one index of the virtual axis for each position along axis `dim`.
    """

    dim: int
    layout: Layout
    source: object


@final
class Value:
    """A tensor of the traced program, with one layout for each axis.

    Attributes:
        layouts: The factors of each axis.
        shape: The sizes of the axes.
        is_fixed: Whether no parameter influences the tensor. Inputs, constants and position tables are fixed.
        is_zero: Whether all entries are zero.
        is_norm: Whether the entries are norms. A norm is zero only if all entries over which it is computed are zero.
        is_complex: Whether the tensor depends on complex parameters or buffers, on which no group acts.
        uniform: The axes along which the tensor is constant.
        index_of: If the entries are indices, the axis into which they point.
        virtual: The virtual axis, of which the tensor contains only selected indices.
        has_inputs: For a fixed tensor, whether it depends on the inputs or on an unknown value.
        made: For fixed tensors that consist of blocks of equal entries, a function that returns the same tensor with
            new axes. Each use of the tensor gets its own axes.
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
        """Return one axis of the tensor as an `Axis`, the form in which laws refer to axes."""
        return Axis(self, (dim,))

    def whole(self) -> "Axis":
        """Return the whole tensor as an `Axis` without axes, for laws about one factor of all its entries."""
        return Axis(self, ())

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
    """One axis of a tensor, several axes that are treated as one, or a range of one axis.

    An `Axis` without axes represents all entries of the tensor.
    """

    value: Value
    dims: tuple[int, ...]
    start: int = 0
    length: int | None = None


@dataclass(frozen=True)
class Law:
    """The law of one index of an operator: a constraint on transformations of the axes along which this index runs.

    Each row of `scale` contains one integer coefficient for each axis. The sum of the coefficients times the logarithms
    of the axes' scales must be zero. Each row of `sign` is a similar equation modulo two for signs, in which 1 stands
    for a negative sign. Each entry of `edges` contains the numbers of two axes and a parity. If the parity is +1, the
    same matrix acts on both axes. If the parity is -1, the inverse transpose acts on the second axis. No matrix may act
    on an axis without an edge.

    Attributes:
        axes: The axes along which the operator index runs.
        scale: The equations for logarithms of scales. If `scale` is None, no axis may be scaled.
        sign: The equations for signs. If `sign` is None, no axis may change signs.
        edges: Pairs of axes on which one matrix may act. If `edges` is None, no matrix may act.
        is_metric: Whether all matrices must be rotations.
        keeps_ones: Whether all matrices must be rotations that keep the vector of ones.
        is_mixing: Whether the operator treats all indices jointly. If indices are treated jointly, transformations of
            other axes may not depend on the position along the index.
        is_shared: Whether the axis must have the same permutation at all indices of the other axes. The group of such
            an axis cannot be repeated within another group.
        is_virtual: Whether the result selects indices from the axis. Such an axis is the virtual axis of the result.
        shift: The equations for translations, which add the same number to all entries at one index of the axis. If
            `shift` is None, no translation commutes with the operator.
        period: For a function with half period pi, such as sin or cos: whether the function is odd or even.
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
        """Whether the operator sums products over this index, so the scales of the factors must cancel."""
        return bool(self.scale) and len(self.axes) > 1 and all(c > 0 for row in self.scale or () for c in row)


Record = Sequence[Law]
"""The laws of one operator call."""


def same(*axes: Axis) -> Law:
    """Return the constraint (law) for a copy. Every transformation commutes with copying."""
    rows = _equal(len(axes))
    return Law(axes, rows, rows, _alike(len(axes)), shift=rows)


def linear(*axes: Axis) -> Law:
    """Return the constraint (law) for an axis that the operand and the result of a linear operator share.

    All transformations except translations commute with a linear operator.
    """
    rows = _equal(len(axes))
    return Law(axes, rows, rows, _alike(len(axes)))


def added(axes: Sequence[Axis], out: Axis) -> Law:
    """Return the constraint (law) for an axis of a sum, if all summands vary along this axis."""
    rows = _equal(len(axes) + 1)
    shift = ((*(1.0 for _ in axes), -1.0),)
    return Law((*axes, out), rows, rows, _alike(len(axes) + 1), shift=shift)


def offset(axes: Sequence[Axis], out: Axis) -> Law:
    """Return the constraint (law) for an axis of a sum, if some summand is constant along this axis.

    Only permutations and translations of the axis commute with the sum.
    """
    return Law((*axes, out), shift=((*(1.0 for _ in axes), -1.0),))


def multiplied(x: Axis, out: Axis, factor: float | None) -> Law:
    """Return the constraint (law) for an axis of a product, if only one factor varies along this axis.

    The argument `factor` is the product of all constant factors. The argument `factor` is None if the value of a
    constant factor is unknown.
    """
    rows = _equal(2)
    return Law((x, out), rows, rows, _alike(2), shift=None if factor is None else ((factor, -1.0),))


def masked(mask: Axis, *axes: Axis) -> Law:
    """Return the constraint (law) for an axis of a selection (`where`), if the mask varies along this axis."""
    rows = ((1, *(0 for _ in axes)), *((0, *row) for row in _equal(len(axes))))
    return Law((mask, *axes), rows, rows)


def zero(axis: Axis) -> Law:
    """Return the constraint (law) for a tensor of zeros. Every transformation except a translation leaves zeros
    unchanged.
    """
    return Law((axis,), (), (), ((0, 0, 1),))


def fixed(*axes: Axis, mixes: bool = False) -> Law:
    """Return the constraint (law) for axes that can only be permuted.

    The argument `mixes` states whether the operator treats all positions along the axes jointly.
    """
    return Law(axes, is_mixing=mixes)


def mixed(*axes: Axis) -> Law:
    """Return the constraint (law) for axes whose positions an operator treats jointly, so the axes can only be
    permuted.
    """
    return fixed(*axes, mixes=True)


def shared(*axes: Axis) -> Law:
    """Return the constraint (law) for axes that can only be permuted, with the same permutation at all indices of the
    other axes.
    """
    return Law(axes, is_shared=True)


def entrywise(scale: Sequence[int] | None, sign: Sequence[int] | None) -> LawOf:
    """Return the constraint (law) for a function that is applied to each entry.

    One equation relates the scales of the input and the result. A second equation relates their signs. The equation
    `(1, -2)` means `log(scale of x) - 2 log(scale of the result) = 0`. If an equation is None, no scale (or no sign)
    commutes with the function.
    """

    def law(x: Axis, out: Axis) -> Law:
        return Law((x, out), None if scale is None else (tuple(scale),), None if sign is None else (tuple(sign),))

    return law


def positive(*axes: Axis) -> Law:
    """Return the constraint (law) for positively homogeneous functions (ReLU, maximum).

    Scales commute with positively homogeneous functions, but signs do not.
    """
    return Law(axes, _equal(len(axes)), None)


def odd(*axes: Axis, mixes: bool = False) -> Law:
    """Return the constraint (law) for odd functions such as tanh, which commute with signs, but not with scales."""
    return Law(axes, None, _equal(len(axes)), is_mixing=mixes)


def even(x: Axis) -> Law:
    """Return the constraint (law) for a function that depends only on the magnitudes of entries along this axis."""
    return Law((x,), None, ())


def power(exponent: int, *, is_even: bool) -> LawOf:
    """Return the constraint (law) for |x| ** exponent if `is_even`, and for sign(x) * |x| ** exponent otherwise."""
    return entrywise((exponent, -1), (0, 1) if is_even else (1, 1))


def contracted(x: Axis, y: Axis) -> Law:
    """Return the constraint (law) for an index over which a product of two tensors is summed.

    The transformations of the two tensors must be inverse to each other.
    """
    return Law((x, y), ((1, 1),), ((1, 1),), ((0, 1, -1),))


def product(out: Axis | None, factors: Sequence[Axis], exponents: Sequence[int] | None = None) -> Law:
    """Return the constraint (law) for a product of entries. If `out` is None, the product is summed over the index."""
    exponents = list(exponents or [1] * len(factors))
    axes = (*factors, *([out] if out else []))
    row = (*exponents, *([-1] if out else []))
    return Law(axes, (row,), (tuple(abs(c) % 2 for c in row),))


def normed(*axes: Axis) -> Law:
    """Return the constraint (law) for the 2-norm along an axis, and for functions that divide by this norm.

    Rotations do not change the 2-norm. Rotations also commute with division by the 2-norm.
    """
    edges = _alike(len(axes)) or ((0, 0, 1),)
    return Law(axes, None, _equal(len(axes)), edges, is_metric=True, is_mixing=len(axes) > 1)


def centered(*axes: Axis) -> Law:
    """Return the constraint (law) for functions that center the entries along an axis and divide by their norm.

    Rotations that keep the vector of ones change neither the mean nor the norm of deviations from the mean.
    """
    return Law(axes, edges=_alike(len(axes)), is_metric=True, keeps_ones=True, is_mixing=True)


def periodic(x: Axis, out: Axis, period: Literal["odd", "even"]) -> Law:
    """Return the constraint (law) for sin (odd) or cos (even). A shift by pi flips the sign of the output."""
    return Law((x, out), None, ((0, 1),) if period == "even" else ((1, 1),), period=period)


def _alike(count: int) -> Edges:
    return tuple((0, k, 1) for k in range(1, count))


def _equal(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple((j == 0) - (j == k) for j in range(count)) for k in range(1, count))


compared = entrywise((0, 1), None)
"""The constraint (law) for results that positive scales do not change, such as comparisons with zero and argmax
positions.
"""
magnitude = power(1, is_even=True)
"""The constraint (law) for |x|."""
squared = power(2, is_even=True)
"""The constraint (law) for x ** 2."""
