"""One layer of the published ScaleGMN, and the states and features of weights that it must compute."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regauge_papers.chains.scale_config import ChainScaleConfig
from regauge_papers.chains.scale_maps import Kind, Message, Product, Rest, Signal, WeightUpdate

States = Mapping[int, Tensor]
"""The states of the units in each layer of units, by the number of the layer, `[models or 1, units, width]`."""
Weights = Mapping[int, Signal]
"""The features of each weight, by the number of the layer of units before the weight."""


@dataclass(frozen=True)
class Needs:
    """The states and features that one layer must compute.

    Attributes:
        places: The layers of units whose states are needed, counted from the inputs (0).
        weights: The weights whose features are needed for forward messages.
        backward: The weights whose features are needed for backward messages, if backward messages have separate
            features.
    """

    places: frozenset[int]
    weights: frozenset[int]
    backward: frozenset[int]

    def before(self, last: int, *, is_bidirectional: bool, has_backward: bool) -> "Needs":
        """Return the states and features that the previous layer must compute as inputs of the given layer."""
        later = {place for place in self.places if place > 0}
        earlier = {place for place in self.places if place < last and is_bidirectional}
        weights = self.weights | {place - 1 for place in later}
        backward = self.backward | (earlier if has_backward else set())
        met = {end for k in self.weights | self.backward for end in (k, k + 1)}
        places = self.places | {k - 1 for k in later} | {k + 1 for k in earlier} | met
        return Needs(places, weights, backward)


def kind_of(place: int, last: int) -> Kind:
    """Return whether a layer of units is the first layer (inputs), the last layer (outputs) or a hidden layer."""
    return "first" if place == 0 else "last" if place == last else "hidden"


class ScaleLayer(nn.Module):
    """A layer of ScaleGMN that computes only the required states and features of weights.

    Args:
        rest: The part of features that signs or scales do not change.
        needs: The states and features that are computed.
        last: The number of the layer of output units.
        outputs: The length of the computed vectors.
    """

    def __init__(
        self,
        config: ChainScaleConfig,
        rest: Rest,
        needs: Needs,
        last: int,
        outputs: int,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.needs, self.last, self.is_bidirectional = needs, last, config.is_bidirectional
        width, placed = config.hidden, config.hidden if config.are_messages_placed else 0

        def product(places: Iterable[int], inputs: int, outputs: int) -> Product:
            kinds = {kind_of(place, last) for place in places}
            return Product(
                rest, config.ends, config.are_ends_shared, kinds, (inputs, width, outputs), placed, generator
            )

        def update() -> WeightUpdate:
            return WeightUpdate(rest, width, outputs, generator)

        later = [place for place in needs.places if place > 0]
        earlier = [place for place in needs.places if place < last and config.is_bidirectional]
        if later:
            self.forward_message = Message(product(later, width, width), width, generator)
        if earlier:
            self.backward_message = Message(product(earlier, width, width), width, generator)
        self.update = product(needs.places, (3 if config.is_bidirectional else 2) * width, outputs)
        if needs.weights:
            self.forward_weights = update()
        if needs.backward:
            self.backward_weights = update()

    def forward(
        self, states: States, forward: Weights, backward: Weights, places: Mapping[int, Tensor]
    ) -> tuple[dict[int, Tensor], Weights, Weights]:
        """Return new states, and new features of weights for forward and backward messages.

        Args:
            states: The states before the layer.
            forward: Features of weights for forward messages.
            backward: Features of weights for backward messages.
            places: Learned vectors of the layers of units, which messages and states use, `[units or 1, width]`.
        """
        made = {}
        for place in sorted(self.needs.places):
            heard = [states[place], *self._hear(place, states, forward, backward, places)]
            models = max(map(len, heard))
            joined = torch.cat([x.expand(models, -1, -1) for x in heard], -1)
            made[place] = self.update(Signal(joined), kind_of(place, self.last), places.get(place))
        if self.needs.weights:
            forward = self._renew(self.forward_weights, self.needs.weights, forward, states, is_backward=False)
        if self.needs.backward:
            backward = self._renew(self.backward_weights, self.needs.backward, backward, states, is_backward=True)
        return made, forward, backward

    def _hear(
        self, place: int, states: States, forward: Weights, backward: Weights, places: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """Collect the messages to the units of one layer from the units of the two neighboring layers."""
        own, kind = torch.zeros_like(states[place]), kind_of(place, self.last)
        heard = [own]
        if place > 0:
            # Messages know the place of the unit that hears them, in one direction, or that sends them, in two.
            known = places.get(place)
            if places and self.is_bidirectional:
                known = places[place - 1].unsqueeze(1)
            heard = [self.forward_message(states[place - 1].unsqueeze(2), forward[place - 1], 1, kind, known)]
        if self.is_bidirectional and place < self.last:
            sent = states[place + 1].unsqueeze(1)
            heard.append(self.backward_message(sent, backward[place], 2, kind, places.get(place + 1)))
        elif self.is_bidirectional:
            heard.append(own)
        return heard

    def _renew(
        self, update: WeightUpdate, needed: Iterable[int], weights: Weights, states: States, *, is_backward: bool
    ) -> dict[int, Signal]:
        """Return new features of weights, computed from the states of the two units that each weight connects."""
        ends = sorted({end for k in needed for end in (k, k + 1)})
        pulled = {place: update.pull(states[place]) for place in ends}
        made = {}
        for k in sorted(needed):
            source, target = int(is_backward), int(not is_backward)
            made[k] = update(weights[k], pulled[k][source].unsqueeze(2), pulled[k + 1][target].unsqueeze(1))
        return made
