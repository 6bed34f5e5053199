"""Angles: values to which a symmetry can add half periods. A metanetwork therefore reads their sines and cosines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxtyping import Num
from torch import Tensor

from regauge.weightspace.layout.blocks import Block, Label
from regauge.weightspace.layout.characters import Character


@dataclass(frozen=True)
class Turn:
    """The sine or cosine of a block of angles.

    Attributes:
        source: The name of the block, or of the part of a tensor, that contains the angles.
        frequency: The frequency in radians per unit of the values.
        is_sine: Whether the block contains the sine of the angles, instead of the cosine.
    """

    source: str
    frequency: float
    is_sine: bool

    def __call__(self, values: Mapping[str, Tensor]) -> Num[Tensor, "models *labels channels"]:
        angles = self.frequency * values[self.source]
        return angles.sin() if self.is_sine else angles.cos()


@dataclass(frozen=True)
class Wave:
    """The angles of a unit set. As in a sine network, sums of weights times features are added to angles.

    Attributes:
        sine: The name of the block of sines.
        cosine: The name of the block of cosines.
        frequency: The frequency in radians per unit of the original values.
        addend: The character (exponents of signs) of the angles. Only values with the character `addend` may be added
            to the angles.
    """

    sine: str
    cosine: str
    frequency: float
    addend: Character


def find_period(block: Block) -> tuple[int, int, float] | None:
    """Return the axis, the family and the amount of the half periods that a symmetry adds to a block, or None."""
    found = [
        (axis, family, shift)
        for axis, label in enumerate(block.labels)
        for family, shift in enumerate(label.shift)
        if shift
    ]
    return found[0] if len(found) == 1 else None


def is_shifted(block: Block) -> bool:
    """Return whether a symmetry adds half periods to values of a block."""
    return any(any(label.shift) for label in block.labels)


def split(block: Block) -> dict[str, tuple[Block, Turn]]:
    """Return two blocks, which contain the sines and the cosines of a block of angles.

    An odd number of half periods changes the signs of sines and cosines.
    """
    found = find_period(block)
    assert found is not None
    axis, family, shift = found
    made = {}
    for is_sine in (True, False):
        labels = list(block.labels)
        if not is_sine:
            labels = [_even(label) for label in labels]
        own = labels[axis]
        parity = tuple((exponent + (k == family)) % 2 for k, exponent in enumerate(own.parity))
        labels[axis] = replace(own, parity=parity, shift=(0.0,) * len(own.shift))
        name = f"{'sin' if is_sine else 'cos'}({block.name})"
        turn = Turn(block.name, math.pi / abs(shift), is_sine)
        made[name] = replace(block, name=name, labels=tuple(labels)), turn
    return made


def _even(label: Label) -> Label:
    return replace(label, sign=(0,) * len(label.sign), parity=(0,) * len(label.parity))
