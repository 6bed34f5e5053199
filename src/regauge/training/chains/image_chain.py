"""Convolutional networks, one after the other, without autograd: the convolutions are torch's, and little else is left.

Stacked convolutions are grouped ones, which a CPU is slow in. So every network runs by itself, images in channels-last
layout. A batch whose hidden values do not fit the cache is read in pieces, and the gradients of the pieces are added.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.training.chains.chain_steps import Convolution, Linear, Passed, Step
from regauge.training.programs import PIECE_BYTES, channels_last, mean_losses


class ImageChain:
    """Losses and gradients of a stack of chains with convolutions, an `Engine`."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        learned = [k for k, step in enumerate(steps) if step.names]
        self.first = learned[0]
        # What comes from a convolution or a linear layer is nobody else's, and is written over.
        self.is_free = [k > 0 and isinstance(steps[k - 1], Convolution | Linear) for k in range(len(steps))]

    def gradients(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See `Engine`."""
        networks, examples = len(next(iter(params.values()))), inputs.shape[1]
        found: list[dict[str, Tensor]] = []
        losses = torch.zeros(networks, dtype=torch.float64, device=inputs.device)
        batches = [channels_last(batch) for batch in inputs]
        pieces = 0
        for k, own in enumerate(unstack(params)):
            batch, wanted = batches[k * len(inputs) // networks], targets[k * len(targets) // networks]
            pieces = pieces or self._pieces(own, batch)
            total: dict[str, Tensor] = {}
            for piece, answer in zip(batch.chunk(pieces), wanted.chunk(pieces), strict=True):
                share = len(piece) / examples
                loss, gradients = self._gradients(own, piece, answer, share)
                total = {name: total[name].add_(g) if total else g for name, g in gradients.items()}
                losses[k] += loss * share
            found.append(total)
        return losses.to(inputs.dtype), [torch.stack([one[name] for one in found]) for name in params]

    def outputs(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """See `Engine`."""
        networks = len(next(iter(params.values())))
        batches = [channels_last(batch) for batch in inputs]
        results = []
        for k, own in enumerate(unstack(params)):
            batch = batches[k * len(inputs) // networks]
            results.append(torch.cat([self._forward(own, piece)[0] for piece in batch.chunk(self._pieces(own, batch))]))
        return torch.stack(results)

    def _gradients(self, own: Params, batch: Tensor, targets: Tensor, share: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a network on a piece of a batch, and the derivatives of its share of the whole loss."""
        outputs, passed = self._forward(own, batch)
        # The derivative is written over the outputs, which a last activation would need.
        outputs = outputs if isinstance(self.steps[-1], Linear) else outputs.clone()
        losses, deltas = mean_losses(outputs.t().unsqueeze(0), targets.unsqueeze(0))
        delta = deltas[0].t()
        if share < 1:
            delta = delta.mul_(share)
        found: dict[str, Tensor] = {}
        for k in range(len(self.steps) - 1, self.first - 1, -1):
            step = self.steps[k]
            delta, gradients = step.backward(delta, passed[k], own, goes_on=k > self.first)
            found |= dict(zip(step.names, gradients, strict=True))
        return losses[0], found

    def _forward(self, own: Params, batch: Tensor) -> tuple[Tensor, list[Passed]]:
        passed: list[Passed] = []
        x = batch
        for step, is_free in zip(self.steps, self.is_free, strict=True):
            passed.append(step.forward(x, own, is_free=is_free))
            x = passed[-1].wrote
        return x, passed

    def _pieces(self, own: Params, batch: Tensor) -> int:
        """Number of pieces to cut a batch into so that each hidden tensor fits the cache."""
        if batch.device.type != "cpu":
            return 1
        _, passed = self._forward(own, batch[:1])
        largest = max(one.wrote.numel() for one in passed) * batch.element_size()
        return min(len(batch), -(-len(batch) * largest // PIECE_BYTES))


def unstack(params: Mapping[str, Tensor]) -> list[Params]:
    """The networks of a stack, their kernels in channels-last layout."""
    # Kernels of one channel are in either layout as they are, and convolutions would take the other one.
    apart = {
        name: tensor.permute(0, 1, 3, 4, 2).clone(memory_format=torch.contiguous_format).permute(0, 1, 4, 2, 3).unbind()
        if tensor.ndim == 5
        else tensor.unbind()
        for name, tensor in params.items()
    }
    return [dict(zip(apart, own, strict=True)) for own in zip(*apart.values(), strict=True)]
