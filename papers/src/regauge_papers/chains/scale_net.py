"""The complete published ScaleGMN: layers, positions, and the readouts of its code."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regauge.core.symmetry import Symmetry
from regauge.weightspace.heads.equivariant import Equivariant
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.layout.compile import compile_layout
from regauge_papers.chains.maps import plain
from regauge_papers.chains.reading import Chain
from regauge_papers.chains.scale_config import ChainScaleConfig
from regauge_papers.chains.scale_layer import Needs, ScaleLayer
from regauge_papers.chains.scale_maps import (
    Perceptron,
    Remainder,
    Rest,
    Signal,
)

ENTRIES = 2**21
"""The largest number of entries of an array. Networks are read in small groups, because allocators return the memory of
larger arrays to the system."""


class ChainScaleGMN(nn.Module):
    """A reimplementation of the nets of ScaleGMN for chains of linear layers, for comparisons.

        net = ChainScaleGMN(symmetry, ChainScaleConfig(), head=Invariant(10), generator=generator)
        net(population)                       # [models, 10]

    The net does not standardize weights. `Metanet` with `layer=ScaleGMN()` reads any network, and respects scales in
    both directions. With equal parameters, the outputs equal the outputs of the published code, except for its faults.
    Two faults are settings of `ChainScaleConfig`. The following faults are not repeated:

    - values that only unread states need were computed, and had parameters without effect;
    - the code that read settings overwrote the widths of perceptrons with the width of the features;
    - a script had to remove half periods of sines beforehand, but ignored their frequency; this class does not remove
      half periods.

    `ChainScaleGMN` avoids slow steps of the published code, with the same result. The initial features of a weight are
    one number times one vector, so linear maps are applied only to the vectors. Consecutive maps are multiplied first,
    and x and -x share a map. Values that depend on only one of the two units of a weight are computed once for each
    unit. Only a few networks are read at a time. Intermediate results of a layer are not stored but computed again in
    the backward pass.

    Published settings with convolutions, several kinds of nonlinearities, or dropout within perceptrons are not
    supported.

    Args:
        symmetry: The symmetry of the networks, which are chains of at least three linear layers with biases. Either all
            hidden units have signs, or all hidden units have positive scales.
        config: The settings of the net.
        head: `Invariant` without a hidden layer returns numbers. `Equivariant` returns a change of every weight and
            bias.
        generator: The random generator of the initial weights.

    Raises:
        ValueError: The networks are no chains, hidden units have neither signs nor scales, or the head is of another
            kind.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        config: ChainScaleConfig,
        *,
        head: Invariant | Equivariant,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        is_plain = isinstance(head, Invariant) and head.hidden is None and not head.dropout
        if not is_plain and not (isinstance(head, Equivariant) and head.changes == 1):
            raise ValueError(
                f"{head} is no head of the published code; choose Invariant without a hidden layer and dropout, or "
                "Equivariant with one change"
            )
        self.config, self.head = config, head
        self.chain = Chain.of(compile_layout(symmetry))
        self.part = _common_part(self.chain)
        self.rest: Rest = config.signs if self.part == "sign" else "normalized"
        self.count, width = len(self.chain.weights), config.hidden
        self.has_backward = config.is_bidirectional and self.part == "scale"
        sizes = self.chain.sizes
        self.unit = plain(1, width, generator, is_biased=False)
        self.weight = plain(1, width, generator, is_biased=False)
        kinds = sizes[0] + sizes[-1]
        self.unit_places = nn.Parameter(torch.randn(kinds + self.count - 1, width, generator=generator))
        if config.are_weights_placed:
            self.weight_places = nn.Parameter(torch.randn(kinds + self.count - 2, width, generator=generator))
        is_changed = isinstance(head, Equivariant)
        self.layers = nn.ModuleList()
        for k, needs in enumerate(self._plan()):
            outputs = 1 if is_changed and k == config.layers - 1 else width
            self.layers.append(ScaleLayer(config, self.rest, needs, self.count, outputs, generator))
        skips = config.layers - is_changed if config.is_skipping else 0
        self.skips = nn.ModuleList(plain(width, width, generator, is_biased=False) for _ in range(skips))
        if isinstance(head, Equivariant):
            self.weight_scales = nn.Parameter(torch.full((self.count,), head.scale))
            self.bias_scales = nn.Parameter(torch.full((self.count,), head.scale))
            self._norm()
            return
        ends = sizes[-1]
        if config.reads == "everything":
            self.remainder = Remainder(self.rest, width, width, generator)
            self.gate = Perceptron(width, width, width, generator)
            ends = 1 + sizes[0] + sizes[-1]
        elif config.is_bidirectional:
            self.read_first = plain(sizes[0] * width, width, generator)
            self.read_last = plain(sizes[-1] * width, width, generator)
            ends = 2
        self.classify = Perceptron(ends * width, width, head.outputs, generator)
        self._norm()

    def _norm(self) -> None:
        """Remove normalization from perceptrons if the settings have none."""
        for module in self.modules():
            if isinstance(module, Perceptron) and not self.config.are_perceptrons_normalized:
                module.norm = nn.Identity()

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the symmetry that are respected exactly; see the faults in `ChainScaleConfig`."""
        config = self.config
        is_mixed = config.are_weights_placed and config.are_classes_mixed and self.chain.sizes[-1] > 1
        is_lost = self.has_backward and not config.is_backward_inverted
        return (*(() if is_mixed else ("permutation",)), *(() if is_lost else (self.part,)))

    def _plan(self) -> list[Needs]:
        """Return the states and features that every layer must compute for the next layer or the head."""
        config, last = self.config, self.count
        if isinstance(self.head, Equivariant):
            plan = [Needs(frozenset(range(1, last + 1)), frozenset(range(last)), frozenset())]
        else:
            ends = range(last + 1) if config.reads == "everything" else (last,)
            places = frozenset(ends) | ({0} if config.is_bidirectional else set())
            plan = [Needs(places, frozenset(), frozenset())]
        while len(plan) < config.layers:
            plan.insert(
                0,
                plan[0].before(last, is_bidirectional=config.is_bidirectional, has_backward=self.has_backward),
            )
        return plan

    def forward(self, population: Mapping[str, Tensor]) -> Any:
        """Return numbers `[models, outputs]`, or the changes of all tensors.

        Raises:
            ValueError: A tensor does not have the shape that the symmetry expects after a model axis.
        """
        dtype = next(self.parameters()).dtype
        tensors = [tensor.to(dtype) for tensor in self.chain.read(population)]
        edges = max(weight[0].numel() for weight in tensors[: self.count]) * self.config.hidden
        size = max(1, ENTRIES // edges)
        made = [self._run(part) for part in zip(*(torch.split(t, size) for t in tensors), strict=True)]
        joined = [torch.cat(parts) for parts in zip(*made, strict=True)]
        if not isinstance(self.head, Equivariant):
            return joined[0]
        return self.chain.write(joined)

    def _run(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Run the layers and the head on a few networks."""
        config, count = self.config, self.count
        states = self._begin(tensors[count:])
        places = dict(enumerate(self._places())) if config.are_messages_placed else {}
        forward = self._weigh(tensors[:count])
        backward = forward
        if config.is_bidirectional and config.is_backward_inverted and self.has_backward:
            backward = self._weigh([_invert(w) for w in tensors[:count]])
        for k, layer in enumerate(self.layers):
            made, forward, backward = checkpoint(
                layer, states, forward, backward, places, use_reentrant=False, preserve_rng_state=False
            )
            if k < len(self.skips):
                made = {place: self.skips[k](states[place]) + x for place, x in made.items()}
            states = {place: nn.functional.dropout(x, config.dropout, self.training) for place, x in made.items()}
        if isinstance(self.head, Equivariant):
            weights = [forward[k].dense() * self.weight_scales[k] for k in range(count)]
            return [*weights, *(states[k + 1] * self.bias_scales[k] for k in range(count))]
        last = states[count].flatten(1)
        if config.reads == "everything":
            gate, total = self.gate, torch.zeros(()).to(last)
            for place in range(1, count):
                mixed = self.remainder.into(Signal(states[place]), gate.first.weight, gate.first.bias)
                total = total + gate.finish(mixed).sum(1)
            read = [total, states[0].flatten(1).expand(len(last), -1), last]
        elif config.is_bidirectional:
            read = [self.read_last(last), self.read_first(states[0].flatten(1).expand(len(last), -1))]
        else:
            read = [last]
        return [self.classify(torch.cat(read, -1))]

    def _places(self) -> list[Tensor]:
        """Return the learned vectors of each layer of units: one for each input and output, and one for each hidden
        layer.
        """
        sizes = self.chain.sizes
        return list(torch.split(self.unit_places, [sizes[0], *[1] * (self.count - 1), sizes[-1]]))

    def _begin(self, biases: tuple[Tensor, ...]) -> dict[int, Tensor]:
        """Return the initial states of units.

        The state is the unit's bias (1 at inputs) times two learned vectors: one for all units, and one for the unit's
        layer. At inputs and outputs, the second vector depends on the unit. With `are_ends_added`, the second vector is
        added at inputs and outputs, and is not a factor.
        """
        first, *hidden, last = self._places()
        one = self.unit.weight.squeeze(-1)
        models = len(biases[0]) if self.training and self.config.dropout else 1
        is_added = self.config.are_ends_added
        states = {0: (one + first if is_added else one * first).expand(models, -1, -1)}
        for k, (bias, place) in enumerate(zip(biases[:-1], hidden, strict=True)):
            states[k + 1] = bias * (one * place)
        states[self.count] = biases[-1] * one + last if is_added else biases[-1] * (one * last)
        return states

    def _weigh(self, weights: tuple[Tensor, ...] | list[Tensor]) -> dict[int, Signal]:
        """Return initial features of weights: each weight times a learned vector, which may depend on layer, input and
        output.
        """
        one = self.weight.weight.squeeze(-1)
        if not self.config.are_weights_placed:
            return {k: Signal(one[None, None, None], weight) for k, weight in enumerate(weights)}
        inputs, *hidden, outputs = self.chain.sizes
        first, *inner, last = torch.split(one * self.weight_places, [inputs, *[1] * (self.count - 2), outputs])
        end = last[None, None]
        if self.config.are_classes_mixed:
            kinds = torch.arange(hidden[-1] * outputs, device=one.device) // hidden[-1]
            end = last[kinds].reshape(1, hidden[-1], outputs, -1)
        vectors = [first[None, :, None], *(one[None, None] for one in inner), end]
        return {k: Signal(x, weight) for k, (x, weight) in enumerate(zip(vectors, weights, strict=True))}


def _invert(weight: Tensor) -> Tensor:
    """Return `1 / w`, and zero if w is zero."""
    is_zero = weight == 0
    return torch.where(is_zero, 0.0, 1 / torch.where(is_zero, 1.0, weight))


def _common_part(chain: Chain) -> str:
    """Return the part of the symmetry that all hidden units have: signs or scales."""
    found = {
        ("sign" if group.signs else "scale" if group.scales else "")
        for group in chain.layout.symmetry.groups
        if group.name in chain.sets
    }
    part = next(iter(found)) if len(found) == 1 else ""
    if not part:
        raise ValueError(
            "ScaleGMN as published reads networks whose hidden units all have signs, or all have positive scales; "
            "use `Metanet` with `layer=ScaleGMN()`, which reads any network"
        )
    return part
