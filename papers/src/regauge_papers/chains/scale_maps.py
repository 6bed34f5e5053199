"""The published maps of ScaleGMN, which are equivariant under scales or signs."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from regauge_papers.chains.maps import plain
from regauge_papers.chains.scale_config import Ends

Kind = Literal["first", "hidden", "last"]
"""The kind of a layer of units: the inputs, hidden units (which are permuted), or the outputs."""
Rest = Literal["symmetrized", "absolute", "normalized"]
SMALL = 1e-10
"""A constant that is added to norms before a division, to avoid division by zero."""


@dataclass(frozen=True)
class Signal:
    """Feature vectors of all weights of one tensor, `factor * (x matrix' + offset)`, where each part broadcasts.

    Initial features of weights are one number times one vector. Therefore linear maps of initial features, and of their
    products with states, need to be applied only to one vector of each unit. After the first update, the features have
    the form `factor * (x matrix' + offset)`, so a linear map of the features is a linear map of `x`.
    """

    x: Tensor
    factor: Tensor | None = None
    matrix: Tensor | None = None
    offset: Tensor | None = None

    def map(self, weight: Tensor) -> "Signal":
        """Apply a linear map to the vectors."""
        if self.matrix is None or self.offset is None:
            return Signal(linear(self.x, weight), self.factor)
        return Signal(linear(self.x, weight @ self.matrix, weight @ self.offset), self.factor)

    def times(self, other: Tensor) -> "Signal":
        """Multiply the vectors by other vectors, entry by entry."""
        if self.factor is None or self.x.shape[1] == 1 or self.x.shape[2] == 1:
            return Signal(self.x * other, self.factor)
        return Signal(self.x * self.factor * other)

    def dense(self) -> Tensor:
        """Return the vectors as a dense tensor."""
        x = self.x if self.matrix is None else linear(self.x, self.matrix, self.offset)
        return x if self.factor is None else x * self.factor

    def rest(self, rest: Rest) -> "Signal":
        """Return the function of the vectors that no sign, or no scale, changes."""
        if rest == "absolute":
            return Signal(self.x.abs(), None if self.factor is None else self.factor.abs())
        norm = self.x.norm(dim=-1, keepdim=True)
        if self.factor is None:
            return Signal(self.x / (norm + SMALL))
        return Signal(self.x, self.factor / (self.factor.abs() * norm + SMALL))


class Perceptron(nn.Module):
    """A perceptron: linear map, layer normalization, SiLU, linear map."""

    def __init__(self, inputs: int, hidden: int, outputs: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.first = plain(inputs, hidden, generator)
        self.norm: nn.Module = nn.LayerNorm(hidden)
        self.last = plain(hidden, outputs, generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.first(x))

    def finish(self, x: Tensor) -> Tensor:
        """Apply all steps of the perceptron after the first linear map."""
        made: Tensor = self.last(self.activate(x))
        return made

    def activate(self, x: Tensor) -> Tensor:
        """Apply the normalization and SiLU between the two linear maps."""
        return silu(self.norm(x))


class Remainder(nn.Module):
    """A function of vectors that no sign, or no scale, changes, followed by the first linear map of a perceptron."""

    def __init__(self, rest: Rest, width: int, hidden: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.rest = rest
        if rest == "symmetrized":
            self.rho = Perceptron(width, hidden, width, generator)

    def into(self, signal: Signal, weight: Tensor, bias: Tensor) -> Tensor:
        """Apply a linear map to the invariant part of a signal."""
        if self.rest != "symmetrized":
            return signal.rest(self.rest).map(weight).dense() + bias
        first, last = self.rho.first, self.rho.last
        turned = signal.map(first.weight).dense()
        even = self.rho.activate(first.bias + turned) + self.rho.activate(first.bias - turned)
        bias = bias + 2 * (weight @ last.bias)
        weight = weight @ last.weight
        return linear(even, weight, bias) if bias.ndim == 1 else linear(even, weight) + bias


class Product(nn.Module):
    """The product `(W x) * phi(r(x), p)` at hidden units, and similar products at inputs and outputs.

    Here `r(x)` is the part of x that no sign or scale changes, and `p` is the learned vector of the layer of units.

    Args:
        kinds: The kinds of units ("first", "hidden", "last") that use the product. Kinds of units that are not listed
            have no parameters.
        placed: The length of the learned vector of a layer of units; zero if the vector is not read.
    """

    def __init__(
        self,
        rest: Rest,
        ends: Ends,
        are_ends_shared: bool,
        kinds: set[Kind],
        widths: tuple[int, int, int],
        placed: int,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        inputs, hidden, outputs = widths
        self.is_gated, self.are_ends_shared, self.inputs = ends == "gated", are_ends_shared, inputs
        if "hidden" in kinds or self.is_gated:
            self.linear = plain(inputs, outputs, generator, is_biased=False)
        if "hidden" in kinds:
            self.remainder = Remainder(rest, inputs, hidden, generator)
            self.gate = Perceptron(inputs + placed, hidden, outputs, generator)
        self.ends = nn.ModuleDict(
            {
                name: Perceptron(inputs + placed, hidden, outputs, generator)
                for name in sorted({self._end(kind) for kind in kinds if kind != "hidden"})
            }
        )

    def _end(self, kind: Kind) -> str:
        return "both" if self.are_ends_shared else kind

    def forward(self, signal: Signal, kind: Kind, place: Tensor | None) -> Tensor:
        gate = self.gate if kind == "hidden" else self.ends[self._end(kind)]
        assert isinstance(gate, Perceptron)
        weight: Tensor = gate.first.weight
        bias: Tensor = gate.first.bias
        if place is not None:
            bias = bias + linear(place, weight[:, self.inputs :])
        weight = weight[:, : self.inputs]
        is_hidden = kind == "hidden"
        made = gate.finish(
            self.remainder.into(signal, weight, bias) if is_hidden else signal.map(weight).dense() + bias
        )
        if is_hidden or self.is_gated:
            made = signal.map(self.linear.weight).dense() * made
        return made


class Message(nn.Module):
    """Sums of messages between the units of two layers; a message is a product of states and weight features."""

    def __init__(self, product: Product, width: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.source = plain(width, width, generator, is_biased=False)
        self.weight = plain(width, width, generator, is_biased=False)
        self.product = product

    def forward(self, states: Tensor, weights: Signal, axis: int, kind: Kind, place: Tensor | None) -> Tensor:
        """Return sums of messages from states `[models, units, 1, width]` or `[models, 1, units, width]`."""
        signal = weights.map(self.weight.weight).times(self.source(states))
        heard: Tensor = self.product(signal, kind, place)
        return heard.sum(axis)


class WeightUpdate(nn.Module):
    """The update `(W e) * phi(r(x), r(y))` of features e of the weight between two units with states x and y.

    Here `r` is the function that no sign or scale changes.
    """

    def __init__(self, rest: Rest, width: int, outputs: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.linear = plain(width, outputs, generator, is_biased=False)
        self.remainder = Remainder(rest, width, width, generator)
        self.gate = Perceptron(2 * width, width, outputs, generator)

    def pull(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return linear maps of states: one for units that a weight leaves, and one for units that a weight enters."""
        first, second = self.gate.first.weight.chunk(2, 1)
        bias = self.gate.first.bias
        stacked = torch.cat([first, second])
        both = self.remainder.into(Signal(states), stacked, torch.cat([bias, torch.zeros_like(bias)]))
        one, other = both.chunk(2, -1)
        return one, other

    def forward(self, weights: Signal, first: Tensor, second: Tensor) -> Signal:
        """Return new weight features, given the results of `pull` for the units that weights leave and for the units
        that weights enter.
        """
        mapped, last = weights.map(self.linear.weight), self.gate.last
        x = mapped.x
        if mapped.factor is not None and x.shape[:3].numel() == 1:
            x = x.flatten()
            active = self.gate.activate(first + second)
            return Signal(active, mapped.factor, x.unsqueeze(-1) * last.weight, x * last.bias)
        return Signal(mapped.dense() * self.gate.finish(first + second))
