"""What one operator says about the axes of its tensors, kept until all axes are fully refined."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from regauge.discovery.layout import Layout, leaf

Edges = tuple[tuple[int, int, int], ...]
Law = Callable[..., "Letter"]
"""Makes the letter of one index from its spots."""


class Virtual(NamedTuple):
    """An axis that a tensor does not have, but that one of its axes selects from (experts chosen per token).

    Attributes:
        dim: The axis that selects.
        layout: The axis that is selected from.
        source: The index tensor that says what is selected where.
    """

    dim: int
    layout: Layout
    source: object


class Value:
    """A tensor of the traced program: one layout per axis.

    Attributes:
        shape: Sizes of the axes.
        layouts: What the indices of each axis mean.
        name: Parameter or buffer that it is, if it is one.
        is_fixed: It does not depend on any parameter (inputs, constants, position tables).
        is_zero: It is zero everywhere.
        uniform: Axes along which it is constant.
        index_of: For integer tensors: the axis whose positions its values are.
        virtual: An axis that is not there but that an axis of this tensor selects from.
    """

    __slots__ = ("index_of", "is_fixed", "is_zero", "layouts", "name", "shape", "uniform", "virtual")

    def __init__(
        self,
        layouts: Sequence[Layout],
        shape: Sequence[int],
        *,
        name: str | None = None,
        is_fixed: bool = False,
        is_zero: bool = False,
        uniform: frozenset[int] = frozenset(),
        index_of: Layout | None = None,
        virtual: Virtual | None = None,
    ) -> None:
        self.layouts = [list(layout) for layout in layouts]
        self.shape = tuple(shape)
        self.name = name
        self.is_fixed = is_fixed
        self.is_zero = is_zero
        self.uniform = uniform
        self.index_of = index_of
        self.virtual = virtual

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @classmethod
    def fixed(cls, shape: Sequence[int], is_zero: bool = False, uniform: frozenset[int] | None = None) -> "Value":
        """A tensor that no parameter influences."""
        constant = frozenset(range(len(shape))) if is_zero else (uniform or frozenset())
        return cls([leaf(n) for n in shape], shape, is_fixed=True, is_zero=is_zero, uniform=constant)


@dataclass(frozen=True)
class Spot:
    """Some axes of a tensor read as one, or a range of one axis."""

    value: Value
    dims: tuple[int, ...]
    start: int = 0
    length: int | None = None


@dataclass(frozen=True)
class Letter:
    """One index of an operator, and the law that transformations along it must obey.

    The rows of `scale` and `sign` are linear equations over the spots that must vanish: over the rationals
    for log-scales and modulo two for signs. `edges` tie the matrices that may act on two spots: +1 the same,
    -1 the inverse transpose. A spot without an edge admits no matrix.

    Attributes:
        spots: The axes that this index runs over.
        scale: Equations for log-scales; None fixes every spot.
        sign: Equations for signs; None fixes every spot.
        edges: Where a matrix may act; None nowhere.
        is_metric: Only rotations may act.
        keeps_ones: Of these only those that leave the vector of all ones where it is.
        is_mixing: The operator treats the indices jointly, so that nothing else may depend on them.
        is_shared: One reordering must serve all: this axis cannot be repeated within another.
        is_virtual: The axis is selected from by another axis of the result, which remembers it.
        shift: Equations for translations of the values, constant along all other axes; None fixes them.
        period: For functions of (x, out) with half period pi: whether they are odd or even.
    """

    spots: tuple[Spot, ...]
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


@dataclass
class Record:
    """The letters of one operator."""

    op: str
    letters: list[Letter] = field(default_factory=list)


def same(*spots: Spot) -> Letter:
    """The same values in another place: everything passes."""
    rows = _equal(len(spots))
    return Letter(spots, rows, rows, _alike(len(spots)), shift=rows)


def linear(*spots: Spot) -> Letter:
    """A linear operator along which nothing happens: everything but translations passes."""
    rows = _equal(len(spots))
    return Letter(spots, rows, rows, _alike(len(spots)))


def added(spots: Sequence[Spot], out: Spot) -> Letter:
    """A sum of tensors that all have this axis."""
    rows = _equal(len(spots) + 1)
    shift = ((*(1.0 for _ in spots), -1.0),)
    return Letter((*spots, out), rows, rows, _alike(len(spots) + 1), shift=shift)


def offset(spots: Sequence[Spot], out: Spot) -> Letter:
    """A sum with something that lacks this axis: reordering and translations only."""
    return Letter((*spots, out), shift=((*(1.0 for _ in spots), -1.0),))


def multiplied(x: Spot, out: Spot, factor: float | None) -> Letter:
    """Multiplied by something that does not vary along this axis: a known number or something else."""
    rows = _equal(2)
    return Letter((x, out), rows, rows, _alike(2), shift=None if factor is None else ((factor, -1.0),))


def masked(mask: Spot, *spots: Spot) -> Letter:
    """Chosen by a mask that has this axis."""
    rows = ((1, *(0 for _ in spots)), *((0, *row) for row in _equal(len(spots))))
    return Letter((mask, *spots), rows, rows)


def zero(spot: Spot) -> Letter:
    """Zeros: everything leaves them as they are but a translation."""
    return Letter((spot,), (), (), ((0, 0, 1),))


def fixed(*spots: Spot, mixes: bool = False) -> Letter:
    """Reordering only."""
    return Letter(spots, is_mixing=mixes)


def positive(*spots: Spot) -> Letter:
    """Positively homogeneous: scales pass, signs do not (ReLU, maximum)."""
    return Letter(spots, _equal(len(spots)), None)


def compared(x: Spot, out: Spot) -> Letter:
    """Positive scales do not change the result: comparison with zero, the position of the largest."""
    return Letter((x, out), ((0, 1),), None)


def odd(*spots: Spot, mixes: bool = False) -> Letter:
    """Signs pass, scales do not (tanh)."""
    return Letter(spots, None, _equal(len(spots)), is_mixing=mixes)


def even(x: Spot) -> Letter:
    """Only magnitudes along this axis count."""
    return Letter((x,), None, ())


def power(x: Spot, out: Spot, exponent: int, is_even: bool) -> Letter:
    """out = |x| ** exponent, with the sign of x or without it."""
    return Letter((x, out), ((exponent, -1),), ((0, 1),) if is_even else ((1, 1),))


def contracted(x: Spot, y: Spot) -> Letter:
    """Summed over in a product of two tensors: one carries the inverse of what the other carries."""
    return Letter((x, y), ((1, 1),), ((1, 1),), ((0, 1, -1),))


def product(out: Spot | None, factors: Sequence[Spot], exponents: Sequence[int] | None = None) -> Letter:
    """Multiplied entry by entry; without an output the product is summed over."""
    exponents = list(exponents or [1] * len(factors))
    spots = (*factors, *([out] if out else []))
    row = (*exponents, *([-1] if out else []))
    return Letter(spots, (row,), (tuple(abs(c) % 2 for c in row),))


def normed(*spots: Spot) -> Letter:
    """The 2-norm over this axis is all that counts: rotations pass."""
    edges = _alike(len(spots)) or ((0, 0, 1),)
    return Letter(spots, None, _equal(len(spots)), edges, is_metric=True, is_mixing=len(spots) > 1)


def centered(*spots: Spot) -> Letter:
    """Only deviations from the mean over this axis, and their 2-norm, count: rotations that keep the ones pass."""
    return Letter(spots, edges=_alike(len(spots)), is_metric=True, keeps_ones=True, is_mixing=True)


def periodic(x: Spot, out: Spot, period: Literal["odd", "even"]) -> Letter:
    """sin (odd) and cos (even): a shift by pi flips the sign of the output."""
    return Letter((x, out), None, ((0, 1),) if period == "even" else ((1, 1),), period=period)


def _alike(count: int) -> Edges:
    return tuple((0, k, 1) for k in range(1, count))


def _equal(count: int) -> tuple[tuple[int, ...], ...]:
    rows = []
    for k in range(1, count):
        row = [0] * count
        row[0], row[k] = 1, -1
        rows.append(tuple(row))
    return tuple(rows)
