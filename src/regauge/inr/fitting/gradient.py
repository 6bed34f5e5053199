"""The loss of one INR on a batch and its gradient, at about the cost of their matrix products.

The batch is worked off in blocks of rows, each forward and at once backward, so that a block stays in the cache: sines
and cosines are computed once, in place, and nothing of the size of the batch is ever written.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.core.products import add_matmul, scaled_matmul
from regauge.inr.representation import Inr
from regauge.training.chains.activations import ACTIVATIONS

BLOCK = 1 << 19
"""Values of one layer in a block: 2 MB."""
LEAST = 64
"""Rows of a block at least."""


class Gradient:
    """`f(params, (points, labels))` is the mean loss and its gradients, in the order of the parameters.

    The gradient is that of automatic differentiation, up to rounding. It lies in memory that the next call overwrites.

    Args:
        inr: The architecture.
        like: A tensor of the dtype and device of the parameters.
        loss: From outputs and labels `[n, out]` to losses of that shape.
    """

    def __init__(self, inr: Inr, like: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.scale = 1.0 if inr.omega is None else inr.omega
        self.activation = ACTIVATIONS["sin" if inr.kind == "siren" else "relu"]
        self.loss = loss
        self.layers = range(len(inr.widths) - 1)
        self.rows = max(LEAST, BLOCK // inr.width)
        self.values = like.new_empty(inr.depth, self.rows, inr.width)
        self.slopes = None if inr.kind == "relu" else torch.empty_like(self.values)
        self.deltas = like.new_empty(2, self.rows, inr.width)
        self.ones = like.new_ones(self.rows)
        self.gradients: Params = {}

    @torch.no_grad()
    def __call__(self, params: Params, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
        points, labels = batch
        self.weights, self.biases = ([params[f"layers.{k}.{name}"] for k in self.layers] for name in ("weight", "bias"))
        self.gradients = self.gradients or {name: torch.empty_like(tensor) for name, tensor in params.items()}
        for tensor in self.gradients.values():
            tensor.zero_()
        total = points.new_zeros(())
        for first in range(0, len(points), self.rows):
            rows = slice(first, first + self.rows)
            total += self._block(points[rows], labels[rows], labels.numel())
        return total, [self.gradients[name] for name in params]

    def _block(self, points: Tensor, labels: Tensor, total: int) -> Tensor:
        count = len(points)
        inputs = [points]
        for k in range(len(self.values)):
            weight, bias, buffer = self.weights[k], self.biases[k], self.values[k, :count]
            value = scaled_matmul(inputs[-1], weight.t(), shift=bias, factor=self.scale, buffer=buffer)
            self.activation.forward(value, self._slope(k, count))
            inputs.append(value)
        outputs = torch.addmm(self.biases[-1], inputs[-1], self.weights[-1].t())
        with torch.enable_grad():
            outputs.requires_grad_()
            loss = self.loss(outputs, labels).sum() / total
        (delta,) = torch.autograd.grad(loss, outputs)
        self._add(len(self.weights) - 1, delta, inputs[-1], 1.0)
        factor = 1.0  # of the layer above: the last one has no frequency
        for k in reversed(range(len(self.values))):
            below = scaled_matmul(delta, self.weights[k + 1], factor=factor, buffer=self.deltas[k % 2, :count])
            factor = self.scale
            delta = self.activation.backward(below, inputs[k + 1], self._slope(k, count))
            self._add(k, delta, inputs[k], factor)
        return loss.detach()

    def _add(self, k: int, delta: Tensor, inputs: Tensor, factor: float) -> None:
        """Add a block's share to the gradient of layer k."""
        weight, bias = self.gradients[f"layers.{k}.weight"], self.gradients[f"layers.{k}.bias"]
        add_matmul(weight, delta.t(), inputs, factor=factor)
        bias.addmv_(delta.t(), self.ones[: len(delta)], alpha=factor)

    def _slope(self, k: int, count: int) -> Tensor | None:
        return None if self.slopes is None else self.slopes[k, :count]
