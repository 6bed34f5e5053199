"""Fully connected networks as one program: forward and backward written once for all networks of a stack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regauge.zoo.training.chains.activations import ACTIVATIONS
from regauge.zoo.training.chains.losses import mean_losses
from regauge.zoo.training.chains.steps import Activation, Factor, Flattening, Linear, Step

THIN = 16
"""Inputs with at most as many features are stored feature by feature, which matrix products with them need."""


@dataclass(frozen=True)
class Link:
    """A linear layer and what follows: `activation(scale * (W h + b))`.

    Attributes:
        weight: Name of the weights.
        bias: Name of the bias.
        scale: A constant factor, such as the frequency of a SIREN.
        activation: A key of `ACTIVATIONS`.
    """

    weight: str
    bias: str
    scale: float
    activation: str


def links_of(steps: Sequence[Step]) -> tuple[Link, ...] | None:
    """The links of a chain of linear layers, each with a factor, an activation, both or neither behind it.

    Returns:
        None if the steps are others; the input may be flattened first.
    """
    links: list[Link] = []
    is_open = False
    for step in steps:
        match step:
            case Linear(weight, bias):
                links.append(Link(weight, bias, 1.0, "identity"))
                is_open = True
            case Flattening() if not links:
                pass
            case Factor(value) if is_open:
                links[-1] = replace(links[-1], scale=links[-1].scale * value)
            case Activation(name) if is_open:
                links[-1] = replace(links[-1], activation=name)
                is_open = False
            case _:
                return None
    return tuple(links) if links else None


class VectorChain:
    """Losses and gradients of a stack of chains.

    Hidden layers are stored feature by feature, `[networks, features, examples]`: then the first layer of all networks
    that read the same batch is one matrix product, and every other layer a batched one without copies. Buffers are kept
    between the steps.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)
        self.buffers: dict[tuple[str, int], Tensor] = {}

    def gradients(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The loss of every network and its gradients.

        Args:
            params: `[networks, ...]`.
            inputs: One batch for each group of consecutive networks, `[groups, examples, ...]`.
            targets: Classes `[groups, examples]`, or values `[networks or groups, examples, out]`.

        Returns:
            Mean losses `[networks]`: cross entropy for classes, squared error for values; gradients in the order of
            the parameters, in buffers that the next call overwrites.
        """
        hidden, slopes = self._forward(params, inputs, is_training=True)
        # The derivative is written over the outputs, which the last activation would need.
        is_plain = self.links[-1].activation == "identity"
        losses, delta = mean_losses(hidden[-1] if is_plain else hidden[-1].clone(), targets)
        found: dict[str, Tensor] = {}
        x = _features(inputs)
        groups = len(x)
        for k in reversed(range(len(self.links))):
            link, weight = self.links[k], params[self.links[k].weight]
            delta = ACTIVATIONS[link.activation].backward(delta, hidden[k], slopes[k])
            bias = self._buffer(link.bias, params[link.bias].shape, delta)
            torch.sum(delta, 2, out=bias)
            gradient = self._buffer(link.weight, weight.shape, delta)
            if k:
                torch.bmm(delta, hidden[k - 1].transpose(1, 2), out=gradient)
            else:
                flat = delta.view(groups, -1, delta.shape[2])
                torch.bmm(flat, x.transpose(1, 2), out=gradient.view(groups, -1, x.shape[1]))
            if link.scale != 1:
                bias.mul_(link.scale)
                gradient.mul_(link.scale)
            found[link.bias], found[link.weight] = bias, gradient
            if k:
                back = self._buffer(f"delta {k}", hidden[k - 1].shape, delta)
                delta = _back(weight, delta, link.scale, back)
        return losses, [found[name] for name in params]

    def outputs(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """What every network says of every example, `[networks, examples, out]`; inputs as for `gradients`."""
        hidden, _ = self._forward(params, inputs, is_training=False)
        return hidden[-1].transpose(1, 2)

    def _forward(
        self, params: Mapping[str, Tensor], inputs: Tensor, *, is_training: bool
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The values of every layer, feature by feature, and the slopes that the backward pass needs."""
        h = _features(inputs)
        groups, _, examples = h.shape
        hidden: list[Tensor] = []
        slopes: list[Tensor | None] = []
        for k, link in enumerate(self.links):
            weight, bias = params[link.weight], params[link.bias]
            shape = (len(weight), weight.shape[1], examples)
            z = self._buffer(f"hidden {k}", shape, weight) if is_training else weight.new_empty(shape)
            factor = link.scale
            if k:
                torch.baddbmm(bias.unsqueeze(2), weight, h, beta=factor, alpha=factor, out=z)
            else:
                rows, first = bias.view(groups, -1, 1), weight.view(groups, -1, weight.shape[2])
                torch.baddbmm(rows, first, h, beta=factor, alpha=factor, out=z.view(groups, -1, examples))
            slope = self._buffer(f"slope {k}", shape, weight) if is_training and link.activation == "sin" else None
            ACTIVATIONS[link.activation].forward(z, slope)
            hidden.append(z)
            slopes.append(slope)
            h = z
        return hidden, slopes

    def _buffer(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """The same memory at every step, as long as the shapes stay."""
        key = (name, len(shape))
        found = self.buffers.get(key)
        if found is None or found.shape != tuple(shape) or found.dtype != like.dtype or found.device != like.device:
            found = self.buffers[key] = like.new_empty(shape)
        return found


def _features(inputs: Tensor) -> Tensor:
    """Batches feature by feature, `[groups, features, examples]`."""
    columns = inputs.flatten(2).transpose(1, 2)
    return columns.contiguous() if columns.shape[1] <= THIN else columns


def _back(weight: Tensor, delta: Tensor, scale: float, out: Tensor) -> Tensor:
    """`scale * W^T delta`, for each network."""
    if weight.shape[1] == 1:
        factor = weight.transpose(1, 2)
        return torch.mul(factor * scale if scale != 1 else factor, delta, out=out)
    return torch.baddbmm(out, weight.transpose(1, 2), delta, beta=0, alpha=scale, out=out)
