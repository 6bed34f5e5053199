"""Training of a module's parameters, with their optimizer, moving averages, and a seed for each step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from regauge.checkpoints.state_file import copy_exactly
from regauge.core.params import Params, below
from regauge.training.optimizers import Optimizer, load_moments, moments_of, require_numbers, set_rate
from regauge.training.schedules import Rate
from regauge.training.settings import derive_seed

B = TypeVar("B")


class NetProgram(Generic[B]):
    """A module that is trained in place; a `Program`.

    `seed` and the index of the step determine all random choices of a step, including dropout.

    Args:
        net: The module. All parameters that require gradients are trained. Weight decay applies only to matrices, not
            to biases, gains and scalars.
        loss: A function from a batch and a random generator to the mean loss.
        optimizer: The optimizer. The settings of the optimizer must be numbers, not distributions.
        seed: The seed of all random choices.
        clip: The largest norm of a gradient. Gradients with a larger norm are scaled down to the norm `clip`.
        average: The decay of exponential moving averages of the weights; no averages if None. After few steps, the
            decay is smaller: at most (1 + steps) / (10 + steps).
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[B, torch.Generator], Tensor],
        optimizer: Optimizer,
        *,
        seed: int,
        clip: float,
        average: float | None = None,
    ) -> None:
        self.net, self.taken = net, 0
        self._loss, self._seed, self._clip, self._decay = loss, seed, clip, average
        self._average = {} if average is None else {n: p.detach().clone() for n, p in net.named_parameters()}
        settings = require_numbers(optimizer)
        self._lr = settings["lr"]
        groups: Sequence[list[Tensor]] = ([], [])
        for parameter in net.parameters():
            groups[parameter.ndim < 2].append(parameter)
        kinds = [
            {"params": params, "weight_decay": settings["weight_decay"] if k == 0 else 0.0}
            for k, params in enumerate(groups)
            if params
        ]
        self._optimizer = optimizer.make(kinds, settings)

    def step(self, batch: B, rate: Rate) -> Tensor:
        """Take a step at the scheduled rate, unless the loss is NaN or Inf; return the loss before the step."""
        self.net.train()
        seed, device = derive_seed(self._seed, "step", self.taken), next(self.net.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
            torch.manual_seed(seed)  # dropout uses the global generator
            loss = self._loss(batch, torch.Generator().manual_seed(seed))
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.net.parameters(), self._clip)
        for group in self._optimizer.param_groups:
            set_rate(group, self._lr, rate)
        if math.isfinite(float(loss.detach())):
            self._optimizer.step()
        self.taken += 1
        self._follow()
        return loss.detach()

    def params(self) -> Params:
        """Return copies of the current parameters and buffers. Within `averaged`, the parameters are the averages."""
        return {name: tensor.detach().clone() for name, tensor in self.net.state_dict().items()}

    def tensors(self) -> Params:
        """Return all tensors that steps change, without copying."""
        tensors = {f"net/{name}": tensor for name, tensor in self.net.state_dict().items()}
        tensors |= {f"average/{name}": tensor for name, tensor in self._average.items()}
        return tensors | {f"optimizer/{name}": tensor for name, tensor in moments_of(self._optimizer).items()}

    def restore(self, tensors: Mapping[str, Tensor], taken: int) -> None:
        """Continue from the `tensors` and the number of steps of another program with the same net and settings."""
        self.net.load_state_dict(below("net/", tensors))
        copy_exactly(below("average/", tensors), self._average)
        load_moments(self._optimizer, below("optimizer/", tensors))
        self.taken = taken

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context in which moving averages replace the weights of the net, if the program has averages."""
        own = {name: parameter.data for name, parameter in self.net.named_parameters() if name in self._average}
        for name, parameter in self.net.named_parameters():
            parameter.data = self._average.get(name, parameter.data)
        try:
            yield
        finally:
            for name, parameter in self.net.named_parameters():
                parameter.data = own.get(name, parameter.data)

    @torch.no_grad()
    def _follow(self) -> None:
        """Update the averages with the current weights."""
        if self._decay is None:
            return
        decay = min(self._decay, (1 + self.taken) / (10 + self.taken))
        for name, parameter in self.net.named_parameters():
            self._average[name].lerp_(parameter, 1 - decay)
