"""Networks of a stack one after the other: recurrent networks, and CNNs that are no chains.

Images lie in channels-last layout. A batch whose hidden values do not fit the cache is read in pieces, and the
gradients of the pieces are added up.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.training.chains.images import unstack
from regauge.training.programs import PIECE_BYTES, channels_last, learned_names, mean_loss


class LoopEngine:
    """Any module, by automatic differentiation of one network at a time, an `Engine`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = learned_names(module)
        self.pieces: int | None = None

    def gradients(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See `Engine`."""
        self.module.train()
        networks = unstack(params)
        batches = [channels_last(images) for images in inputs]
        if self.pieces is None:
            self.pieces = self.count_pieces(networks[0], batches[0])
        found: list[list[Tensor]] = []
        losses = torch.zeros(len(networks), dtype=torch.float64, device=inputs.device)
        for k, own in enumerate(networks):
            batch, wanted = batches[k * len(batches) // len(networks)], targets[k * len(targets) // len(networks)]
            leaves = [own[name].detach().requires_grad_() for name in self.names]
            for images, answers in zip(batch.chunk(self.pieces), wanted.chunk(self.pieces), strict=True):
                outputs = self._run({**own, **dict(zip(self.names, leaves, strict=True))}, images)
                loss = mean_loss(outputs, answers) * (len(images) / inputs.shape[1])
                torch.autograd.backward(loss, inputs=leaves)
                losses[k] += loss.detach()
            found.append([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
        return losses.to(inputs.dtype), [torch.stack(rows) for rows in zip(*found, strict=True)]

    def outputs(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """See `Engine`; one batch for all."""
        self.module.eval()
        batch = channels_last(inputs[0])
        return torch.stack([self._run(own, batch) for own in unstack(params)])

    def _run(self, own: Params, batch: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(self.module, own, (batch,))
        return outputs

    def count_pieces(self, own: Params, batch: Tensor) -> int:
        """Pieces of a batch: one if hidden values fit the cache, or examples depend on one another."""
        if next(self.module.buffers(), None) is not None or batch.device.type != "cpu":
            return 1
        sizes = [0]

        def note(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor):
                sizes.append(output.numel() * output.element_size())

        hooks = [part.register_forward_hook(note) for part in self.module.modules()]
        with torch.no_grad():
            whole = self._run(own, batch)
            for hook in hooks:
                hook.remove()
            pieces = min(len(batch), -(-max(sizes) // PIECE_BYTES))
            apart = torch.cat([self._run(own, piece) for piece in batch.chunk(pieces)])
        # A module may compare the examples of a batch; then its outputs for pieces are others.
        return pieces if torch.allclose(whole, apart, rtol=0, atol=1e-3 * float(whole.abs().max())) else 1
