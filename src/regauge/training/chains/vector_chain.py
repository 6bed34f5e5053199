"""One program for a stack of fully connected networks, which evaluates all networks at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regauge.core.products import scaled_matmul
from regauge.training.chains.chain_steps import ACTIVATIONS, Activation, Factor, Flattening, Linear, Step
from regauge.training.programs import mean_losses

Judge = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function from outputs `[networks, out, examples]`, which it may overwrite, to losses `[networks]` and gradients."""

THIN = 16
"""Inputs with at most this number of features are stored feature by feature, the layout that matrix products need."""


@dataclass(frozen=True)
class Link:
    """A linear layer and its activation: `activation(scale * (W h + b))`. The scale may be a SIREN's frequency."""

    weight: str
    bias: str
    scale: float
    activation: str


def links_of(steps: Sequence[Step]) -> tuple[Link, ...] | None:
    """Return the links of a chain of linear layers, each with an optional factor and an optional activation.

    A flattening step may come first. The result is None if the chain has steps of any other kind.
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
    """Losses and gradients of a stack of chains; an `Engine`.

    Hidden layers are stored feature by feature, `[networks, features, examples]`. If networks read the same batch,
    their first layer is one matrix product. Every other layer is a batched product without copies. Buffers are reused
    between steps.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)
        self.buffers: dict[tuple[str, int], Tensor] = {}

    def gradients(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See `Engine`."""
        return self.pull(params, inputs, lambda outputs: mean_losses(outputs, targets))

    def pull(self, params: Mapping[str, Tensor], inputs: Tensor, judge: Judge) -> tuple[Tensor, list[Tensor]]:
        """Return losses `[networks]`, which `judge` computes from outputs, and the gradients of parameters in order.

        The next call may overwrite the returned gradients.
        """
        hidden, slopes = self._forward(params, inputs, is_training=True)
        # The derivative overwrites the outputs, but a last activation still needs them.
        is_plain = self.links[-1].activation == "identity"
        losses, delta = judge(hidden[-1] if is_plain else hidden[-1].clone())
        found: dict[str, Tensor] = {}
        x = _features(inputs)
        groups = len(x)
        for k in reversed(range(len(self.links))):
            link, weight = self.links[k], params[self.links[k].weight]
            delta = ACTIVATIONS[link.activation].backward(delta, hidden[k], slopes[k])
            bias = self._buffer(link.bias, params[link.bias].shape, delta)
            torch.sum(delta, 2, out=bias)
            if link.scale != 1:
                bias.mul_(link.scale)
            # The networks of a group, which read the same batch, are one matrix in the first layer.
            matrices = len(delta) if k else groups
            buffer = self._buffer(link.weight, weight.shape, delta).view(matrices, -1, weight.shape[2])
            before, rows = hidden[k - 1] if k else x, delta.view(matrices, -1, delta.shape[2])
            gradient = scaled_matmul(rows, before.transpose(1, 2), factor=link.scale, buffer=buffer)
            found[link.bias], found[link.weight] = bias, gradient.view(weight.shape)
            if k:
                buffer = self._buffer(f"delta {k}", hidden[k - 1].shape, delta)
                delta = _back(weight, delta, link.scale, buffer)
        return losses, [found[name] for name in params]

    def outputs(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """See `Engine`."""
        hidden, _ = self._forward(params, inputs, is_training=False)
        return hidden[-1].transpose(1, 2)

    def _forward(
        self, params: Mapping[str, Tensor], inputs: Tensor, *, is_training: bool
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the activations of every layer, feature by feature, and the slopes that the backward pass needs."""
        h = _features(inputs)
        examples = h.shape[2]
        hidden: list[Tensor] = []
        slopes: list[Tensor | None] = []
        for k, link in enumerate(self.links):
            weight, bias = params[link.weight], params[link.bias]
            shape = (len(weight), weight.shape[1], examples)
            memory = self._buffer(f"hidden {k}", shape, weight) if is_training else weight.new_empty(shape)
            matrices = len(h)
            rows, shifts = weight.view(matrices, -1, weight.shape[2]), bias.view(matrices, -1, 1)
            buffer = memory.view(matrices, -1, examples)
            z = scaled_matmul(rows, h, shift=shifts, factor=link.scale, buffer=buffer).view(shape)
            slope = self._buffer(f"slope {k}", shape, weight) if is_training and link.activation == "sin" else None
            ACTIVATIONS[link.activation].forward(z, slope)
            hidden.append(z)
            slopes.append(slope)
            h = z
        return hidden, slopes

    def _buffer(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a buffer that is reused at every step as long as its shape stays the same."""
        key = (name, len(shape))
        found = self.buffers.get(key)
        if found is None or found.shape != tuple(shape) or found.dtype != like.dtype or found.device != like.device:
            found = self.buffers[key] = like.new_empty(shape)
        return found


def _features(inputs: Tensor) -> Tensor:
    """Return batches stored feature by feature, `[groups, features, examples]`."""
    columns = inputs.flatten(2).transpose(1, 2)
    return columns.contiguous() if columns.shape[1] <= THIN else columns


def _back(weight: Tensor, delta: Tensor, scale: float, buffer: Tensor) -> Tensor:
    """Return `scale * W^T delta` for each network."""
    if weight.shape[1] == 1:
        factor = weight.transpose(1, 2)
        return torch.mul(factor * scale if scale != 1 else factor, delta, out=buffer)
    return scaled_matmul(weight.transpose(1, 2), delta, factor=scale, buffer=buffer)
