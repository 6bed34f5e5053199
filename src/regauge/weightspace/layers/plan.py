"""The plan from which a layer is built, and the base class of all layer settings."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regauge.weightspace.layers.dense import Dense
from regauge.weightspace.layers.reach import Reach, reach
from regauge.weightspace.layout.blocks import Block
from regauge.weightspace.layout.compile import Layout

ENDS = 3
"""The largest number of ends of a block that have separate maps. An end is a set of units that indexes the block's
values, such as the inputs of a weight matrix. All further ends share the last map."""


@dataclass(frozen=True)
class LayerPlan:
    """The plan from which a layer is built.

    Attributes:
        layouts: The layouts of all networks that the layer reads.
        width: The length of the vectors of units, pairs and networks.
        reads: The outputs that the next layer or the head reads; see `weightspace.layers`.
        generator: The random number generator for the initial weights.
        before: The number of layers that precede the layer.
    """

    layouts: Sequence[Layout]
    width: int
    reads: frozenset[str]
    generator: torch.Generator | None
    before: int = 0

    @property
    def has_units(self) -> bool:
        """Whether some network has units."""
        return any(layout.units for layout in self.layouts)

    @property
    def has_pairs(self) -> bool:
        """Whether some network has values between units."""
        return any(layout.pair_blocks for layout in self.layouts)

    @property
    def is_nested(self) -> bool:
        """Whether some units are repeated within other units."""
        return any(len(units.axes) > 1 for layout in self.layouts for units in layout.units.values())

    def dense(self, inputs: int, outputs: int, *, is_biased: bool = True, gain: float = 1.0) -> Dense:
        """Return a linear map with weights from the plan's generator."""
        return Dense(inputs, outputs, is_biased=is_biased, gain=gain, generator=self.generator)

    def for_ends(
        self, inputs: int, outputs: int, *, is_biased: bool = True, gain: float = 1.0, are_read: bool = False
    ) -> "ForEnds":
        """Return one linear map for each unit set that a block connects (each end). With `are_read`, count only the
        ends of blocks whose vectors the next layer or the head reads.
        """
        ends = self.count_ends(are_read=are_read)
        return ForEnds(self.dense(inputs, outputs, is_biased=is_biased, gain=gain) for _ in range(ends))

    def count_ends(self, *, are_read: bool = False) -> int:
        """Return the number of unit sets of one block (its ends) that have separate maps."""
        blocks = [b for one in self.layouts for b in (read_blocks(one, self.reads) if are_read else one.pair_blocks)]
        return min(ENDS, max((len(block.ends) for block in blocks), default=0))


def read_blocks(layout: Layout, reads: frozenset[str]) -> tuple[Block, ...]:
    """Return the blocks of pairs whose new vectors the next layer or the head reads."""
    if "pairs" not in reads:
        return ()
    is_all = "unwritten" in reads
    return tuple(block for block in layout.pair_blocks if is_all or block.name not in layout.unwritten)


class ForEnds(nn.ModuleList):
    """A list of modules, one for each unit set that a block connects (each end of the block)."""

    def number(self, end: int) -> int:
        """Return the index of the module for one end of a block. Ends without a module of their own share the last
        module.
        """
        return min(end, len(self) - 1)

    def at(self, end: int, x: Tensor) -> Tensor:
        """Apply the module that belongs to one end of a block (a set of units) to vectors."""
        made: Tensor = self[self.number(end)](x)
        return made


@dataclass(frozen=True)
class Traits:
    """Properties of a layer that determine how a net is built.

    Attributes:
        is_shared: Whether all parameters are shared between tensors. With shared parameters, one layer works for any
            architecture.
        keeps_pairs: Whether the layer has features of pairs of units.
        weighs_units: Whether the layer can weight units by shares of their outgoing weights. With shares, two copies
            into which a unit was split count as one unit. Only layers with means, not sums or maxima, can weight units.
        channels: The number of functions of each weight between units by which the layer multiplies.
        has_odd: Whether the layer has features that signs or scales change; see `Layer.reaches`.
        respects: Parts of a symmetry, in addition to permutations, for which the layer needs no canonical form.
    """

    is_shared: bool = True
    keeps_pairs: bool = True
    weighs_units: bool = True
    channels: int = 0
    has_odd: bool = False
    respects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer(ABC):
    """The settings of a layer."""

    @property
    def traits(self) -> Traits:
        """The properties of the layer that determine how a net is built."""
        return Traits()

    def reaches(self, layout: Layout, layers: int) -> Reach | None:
        """Return which of the features that signs or scales change can be nonzero after `layers` layers, or None if the
        layer has no such features.
        """
        return reach(layout, layers, keeps_pairs=self.traits.keeps_pairs) if self.traits.has_odd else None

    @abstractmethod
    def build(self, plan: LayerPlan) -> nn.Module:
        """Return the torch module of one layer; see `weightspace.layers`.

        Raises:
            ValueError: The settings do not fit the width of the net.
        """
