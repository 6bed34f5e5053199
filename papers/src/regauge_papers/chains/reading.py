"""Networks that are chains of linear layers, and the assignment of their tensors to weights and biases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from regauge.core.params import Params
from regauge.weightspace.layout.blocks import Block
from regauge.weightspace.layout.compile import Layout


@dataclass(frozen=True, eq=False)
class Chain:
    """The tensors of a chain of linear layers.

    The layers of units are numbered from 0 (inputs) to the last (outputs); the numbers are called places. A bias
    belongs to one place, and a weight belongs to two places.

    Attributes:
        layout: The layout of the networks.
        sets: The names of the sets of hidden units, from the inputs to the outputs.
        weights: The weight of each layer.
        biases: The bias of each layer.
    """

    layout: Layout
    sets: tuple[str, ...]
    weights: tuple[Block, ...]
    biases: tuple[Block, ...]

    @classmethod
    def of(cls, layout: Layout) -> "Chain":
        """Return the chain in a layout.

        Raises:
            ValueError: The networks are no chains of at least three linear layers with biases.
        """
        shapes = layout.symmetry.shapes
        ends = [block for block in layout.unit_blocks if len(shapes[block.parameters[0]]) == 2]
        sets = [ends[0].ends[0].units] if len(ends) == 2 and layout.pair_blocks else []
        weights = [ends[0]] if sets else []
        rest = list(layout.pair_blocks)
        while sets and rest:
            found = next((block for block in rest if sets[-1] in (end.units for end in block.ends)), None)
            others = [end.units for end in found.ends if end.units not in sets] if found is not None else []
            if found is None or len(others) != 1 or len(found.ends) != 2:
                break
            rest.remove(found)
            weights.append(found)
            sets += others
        biases = [
            block
            for name in sets
            for block in layout.unit_blocks
            if block.ends[0].units == name and len(shapes[block.parameters[0]]) == 1
        ]
        biases += layout.network_blocks
        weights += ends[1:]
        is_whole = len(weights) + len(biases) == len(layout.blocks) and {*sets} == {*layout.units}
        is_plain = all(len(units.axes) == 1 for units in layout.units.values()) and all(
            len(block.parameters) == 1 and block.channels == 1 for block in layout.pair_blocks
        )
        is_chain = is_whole and is_plain and not rest and len(weights) == len(biases) == len(sets) + 1
        if not is_chain or ends[1].ends[0].units != sets[-1]:
            raise ValueError(
                "nets as published read chains of at least three linear layers with biases and nonlinearities between "
                f"them, but these networks have {len(layout.units)} sets of units and the tensors "
                f"{list(layout.parameters)[:6]}, ...; use `Metanet`, which reads any network"
            )
        return cls(layout, tuple(sets), tuple(weights), tuple(biases))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of units of each layer, from the inputs to the outputs."""
        hidden = (self.layout.units[name].sizes[0] for name in self.sets)
        return (self.weights[0].channels, *hidden, self.weights[-1].channels)

    def read(self, params: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the weights `[models, inputs, outputs, 1]`, and then the biases `[models, outputs, 1]`."""
        values = self.layout.read(params)
        first, *inner, last = (values[block.name] for block in self.weights)
        between = [
            x if block.ends[0].units == source else x.transpose(1, 2)
            for x, block, source in zip(inner, self.weights[1:-1], self.sets[:-1], strict=True)
        ]
        *biases, output = (values[block.name] for block in self.biases)
        ends = first.transpose(1, 2).unsqueeze(-1), last.unsqueeze(-1)
        return [ends[0], *between, ends[1], *biases, output.unsqueeze(-1)]

    def write(self, tensors: Sequence[Tensor]) -> Params:
        """Return parameters from the values of weights and biases. `write` is the inverse of `read`."""
        first, *inner, last = tensors[: len(self.weights)]
        *biases, output = tensors[len(self.weights) :]
        between = [
            x if block.ends[0].units == source else x.transpose(1, 2)
            for x, block, source in zip(inner, self.weights[1:-1], self.sets[:-1], strict=True)
        ]
        parts = [first.squeeze(-1).transpose(1, 2), *between, last.squeeze(-1), *biases, output.squeeze(-1)]
        blocks = (*self.weights, *self.biases)
        values = {block.name: part.unsqueeze(-2) for block, part in zip(blocks, parts, strict=True)}
        written = self.layout.writer.write([values[piece.block.name] for piece in self.layout.writer.written])
        return {name: tensor.squeeze(1) for name, tensor in written.items()}


def axes_of(places: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each tensor, the layers of units that its axes index: first for the weights in order, then for the
    biases.
    """
    return (*pairwise(range(places)), *((place,) for place in range(1, places)))
