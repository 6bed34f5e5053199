"""One network after the other, with a fused optimizer and images in channels-last layout: fastest for CNNs on a CPU."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.zoo.training.optimizers import Optimizer
from regauge.zoo.training.program import channels_last, learned_and_buffers, mean_loss


class Loop:
    """A module and an optimizer for each network."""

    def __init__(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        optimizer: Optimizer,
        settings: Mapping[str, Sequence[float]],
    ) -> None:
        learned_and_buffers(module, params)
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.rates = list(settings["lr"])
        for k in range(len(self.rates)):
            one = copy.deepcopy(module).to(next(iter(params.values())).dtype)
            one.load_state_dict({name: tensor[k] for name, tensor in params.items()})
            one.to(device=next(iter(params.values())).device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.modules.append(one.train())
            own = {name: values[k] for name, values in settings.items()}
            self.optimizers.append(optimizer.sequential(list(one.parameters()), own))

    def step(self, inputs: Tensor, targets: Tensor, factor: float) -> Tensor:
        """One step of all networks; their losses before it."""
        members = len(self.modules) // len(inputs)
        batches = [channels_last(batch) for batch in inputs]
        each = len(self.modules) // len(targets)
        losses = []
        for k, (module, optimizer, rate) in enumerate(zip(self.modules, self.optimizers, self.rates, strict=True)):
            optimizer.zero_grad()
            loss = mean_loss(module(batches[k // members]), targets[k // each])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    def outputs(self, inputs: Tensor) -> Tensor:
        """What every network says, in evaluation mode, of a batch that all read."""
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
        """Go on with the networks at `index` alone."""
        chosen = index.tolist()
        self.modules = [self.modules[k] for k in chosen]
        self.optimizers = [self.optimizers[k] for k in chosen]
        self.rates = [self.rates[k] for k in chosen]
