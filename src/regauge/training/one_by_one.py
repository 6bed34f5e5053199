"""Programs that train one network after the other: for recurrent networks, and for CNNs that are no chains.

The optimizer is fused, and images lie in channels-last layout. A batch whose hidden values do not fit the cache is read
in pieces, and the gradients of the pieces are added up.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.training.optimizers import Optimizer, set_rate
from regauge.training.programs import PIECE_BYTES, Batch, channels_last, mean_loss
from regauge.training.schedules import Rate


class Loop:
    """A module and an optimizer for each network."""

    def __init__(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        optimizer: Optimizer,
        settings: Mapping[str, Sequence[float]],
    ) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lrs = list(settings["lr"])
        for k in range(len(self.lrs)):
            one = copy.deepcopy(module).to(next(iter(params.values())).dtype)
            one.load_state_dict({name: tensor[k] for name, tensor in params.items()})
            one.to(device=next(iter(params.values())).device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.modules.append(one.train())
            own = {name: values[k] for name, values in settings.items()}
            self.optimizers.append(optimizer.make([param for param in one.parameters() if param.requires_grad], own))
        self.pieces: int | None = None

    def step(self, batch: Batch, rate: Rate) -> Tensor:
        """Take a step with all networks, and return their losses before it."""
        inputs, targets = batch
        members = len(self.modules) // len(inputs)
        batches = [channels_last(images) for images in inputs]
        each = len(self.modules) // len(targets)
        if self.pieces is None:
            self.pieces = pieces_of(self.modules[0], batches[0])
        losses = []
        for k, (module, optimizer, lr) in enumerate(zip(self.modules, self.optimizers, self.lrs, strict=True)):
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64, device=inputs.device)
            parts = batches[k // members].chunk(self.pieces), targets[k // each].chunk(self.pieces)
            for images, wanted in zip(*parts, strict=True):
                loss = mean_loss(module(images), wanted) * (len(images) / inputs.shape[1])
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            set_rate(optimizer.param_groups[0], lr, rate)
            optimizer.step()
            losses.append(total)
        return torch.stack(losses).to(inputs.dtype)

    def outputs(self, inputs: Tensor) -> Tensor:
        """Outputs of all networks in evaluation mode for one batch."""
        batch = channels_last(inputs)
        with torch.no_grad():
            results = torch.stack([module.eval()(batch) for module in self.modules])
        for module in self.modules:
            module.train()
        return results

    def params(self) -> Params:
        """Parameters and buffers now, as new tensors."""
        states = [module.state_dict() for module in self.modules]
        return {name: torch.stack([state[name].detach().contiguous() for state in states]) for name in states[0]}

    def keep(self, index: Tensor) -> None:
        """Drop all networks but those at `index`."""
        chosen = index.tolist()
        self.modules = [self.modules[k] for k in chosen]
        self.optimizers = [self.optimizers[k] for k in chosen]
        self.lrs = [self.lrs[k] for k in chosen]


def pieces_of(module: nn.Module, batch: Tensor) -> int:
    """Number of pieces to cut a batch into: one if hidden values fit the cache, or examples depend on one another."""
    if next(module.buffers(), None) is not None or batch.device.type != "cpu":
        return 1
    sizes = [0]

    def note(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * output.element_size())

    hooks = [part.register_forward_hook(note) for part in module.modules()]
    with torch.no_grad():
        whole = module(batch)
    for hook in hooks:
        hook.remove()
    pieces = min(len(batch), -(-max(sizes) // PIECE_BYTES))
    with torch.no_grad():
        apart = torch.cat([module(piece) for piece in batch.chunk(pieces)])
    # A module may compare the examples of a batch; then its outputs for pieces are others.
    scale = float(whole.abs().max())
    return pieces if torch.allclose(whole, apart, rtol=0, atol=1e-3 * scale) else 1
