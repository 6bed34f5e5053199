"""Readings: parts of a network's intermediate values, each assigned to the unit set to which its entries belong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Num
from torch import Tensor

from regauge.core.act import Site
from regauge.weightspace.features import order_as
from regauge.weightspace.layout.blocks import End, find_ends
from regauge.weightspace.layout.characters import is_odd
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.layout.cut import Piece, cut

CLOSE = 1e-3
"""In the search for the axis of the examples, values with a smaller relative difference than this number count as
equal."""


@dataclass(frozen=True)
class Along:
    """The axis of an intermediate value that contains the examples, alone or merged with another axis: `[count, rest]`
    or `[rest, count]`.
    """

    axis: int
    count: int
    is_first: bool

    def last(self, values: Tensor, lead: int) -> Tensor:
        """Move the examples to a separate last axis of values. The field `axis` is counted after the first `lead`
        axes.
        """
        axis = lead + self.axis
        sizes = (self.count, -1) if self.is_first else (-1, self.count)
        apart = values.reshape(*values.shape[:axis], *sizes, *values.shape[axis + 1 :])
        return apart.movedim(axis if self.is_first else axis + 1, -1)


def find_examples(values: Tensor, rolled: Tensor, count: int) -> Along | None:
    """Find the axis of the examples by comparing values before and after the examples are rolled. Return None if no
    axis contains the examples.
    """
    if not values.numel():
        return None
    allowed = CLOSE * float(values.abs().max())
    for axis, size in enumerate(values.shape):
        for is_first in (True, False):
            along = Along(axis, count, is_first)
            if size % count == 0 and bool(
                ((along.last(values, 0).roll(1, -1) - along.last(rolled, 0)).abs() <= allowed).all()
            ):
                return along
    return None


@dataclass(frozen=True, eq=False)
class ProbeReading:
    """A part of an intermediate value (piece) from which features of the units of one set are computed.

    Attributes:
        value: The name of the intermediate value.
        units: The name of the unit set.
        piece: The part of the value that belongs to the unit set.
        end: The axes of the piece that index the units.
        examples: The axis of the examples, or None if values are averaged over examples.
    """

    value: str
    units: str
    piece: Piece
    end: End
    examples: Along | None

    @property
    def channels(self) -> int:
        """The number of values for each unit."""
        return 1 if self.examples is None else self.examples.count

    def __call__(self, values: Num[Tensor, "models *shape"]) -> Num[Tensor, "models *sizes channels"]:
        """Return the values of each unit for each example, averaged over all other axes."""
        labels = len(self.piece.labels)
        x = self.piece.read(values)
        x = x.reshape(*x.shape[:-1], *self.piece.fixed)
        x = x.unsqueeze(-1) if self.examples is None else self.examples.last(x, 1 + labels)
        rest = [*(1 + k for k in range(labels) if k not in self.end.axes), *range(1 + labels, x.ndim - 1)]
        return order_as(x.mean(rest) if rest else x, self.end)


def find_readings(
    name: str, shape: tuple[int, ...], sites: Sequence[Site], layout: Layout, examples: Along | None
) -> Iterator[ProbeReading]:
    """Yield the parts of one intermediate value that belong to unit sets, each as a `ProbeReading`.

    Values on whose axes matrices without a canonical form act are left out, because they belong to no units.
    """
    try:
        pieces = cut(name, shape, sites)
    except ValueError:  # units own different numbers of its values
        return
    for piece in pieces:
        groups = [label.group for label in piece.labels]
        if any(group in layout.contracted for group in groups):
            continue
        kept = [k for k, group in enumerate(groups) if group in layout.units]
        place = {k: number for number, k in enumerate(kept)}
        bases = tuple(tuple(place[base] for base in piece.bases[k] if base in place) for k in kept)
        is_whole = examples is not None and piece.fixed[examples.axis] == shape[examples.axis]
        for end in find_ends(tuple(groups[k] for k in kept), bases):
            axes = tuple(kept[axis] for axis in end.axes)
            sizes = tuple(piece.sizes[axis] for axis in axes)
            if sizes == layout.units[end.units].sizes and _is_settled(piece, axes, layout):
                yield ProbeReading(name, end.units, piece, End(end.units, axes), examples if is_whole else None)


def _is_settled(piece: Piece, axes: tuple[int, ...], layout: Layout) -> bool:
    """Return whether the mean over all remaining axes changes under signs in a way that unit features can have."""
    if not layout.is_signed:
        return True
    character = layout.character_of(piece.labels)
    if any(any(exponents) for axis, exponents in enumerate(character) if axis not in axes):
        return False
    if layout.waves is not None and any(any(label.shift) for label in piece.labels):
        return False
    own = tuple(character[axis] for axis in axes)
    units = next(name for name in layout.units if name == piece.labels[axes[-1]].group)
    return not is_odd(own) or own in layout.unit_signs[units]


def flatten_outputs(
    values: Num[Tensor, "models *shape"], examples: Along | None, most: int
) -> Num[Tensor, "models numbers"]:
    """Flatten each network's outputs.

    If there are more than `most` numbers, average over axes other than examples and classes.
    """
    x = values.unsqueeze(-1) if examples is None else examples.last(values, 1)
    if x[0].numel() > most and x.ndim > 3:
        x = x.mean(list(range(1, x.ndim - 2)))
    return x.flatten(1)


def roll(inputs: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return inputs in which each example is replaced by the preceding example."""
    return {name: torch.roll(x, 1, 0) if name in names else x for name, x in inputs.items()}
