"""Selection of the sampled networks with the smallest loss on a task."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.flow.answers import find_metrics

LARGEST = torch.finfo(torch.float32).max
"""The number that replaces NaN and Inf among losses."""
MOVED_AT_ONCE = 256
"""The number of networks that are generated at a time."""
FIRST_SIZE, SIZES, KEPT_MOVES = 0.3, (1e-3, 0.9), 0.25
"""The initial step size, the range of step sizes, and the share of accepted steps at which the step size does not
change."""


def require_fit(task: Task, symmetry: Symmetry) -> None:
    """Raise a ValueError unless a task can evaluate networks of a symmetry with every size known."""
    own = {name: tuple(tensor.shape) for name, tensor in task.module.state_dict().items()}
    for name, shape in symmetry.shapes.items():
        if name in symmetry.sites and own.get(name) != tuple(shape):
            found = f"{name!r} of shape {own[name]}" if name in own else f"no {name!r}"
            raise ValueError(
                f"the module of the task has {found}, but the networks have the shape {tuple(shape)} there; give a "
                "task with a module of their architecture"
            )


def finite_losses(task: Task, params: Params) -> Float64[Tensor, " models"]:
    """Return the losses of networks on a task. Losses that are NaN or Inf become the largest float32 number.

    Raises:
        ValueError: No loss is finite.
    """
    losses = _losses(task, params)
    if bool((losses == LARGEST).all()):
        raise ValueError("no sampled network has a finite loss on the task; look for NaN or Inf in the examples")
    return losses


def _losses(task: Task, params: Params) -> Float64[Tensor, " models"]:
    """Return the losses of networks on a task, at most `LARGEST`."""
    return find_metrics(task, params)[0].double().nan_to_num(nan=LARGEST, posinf=LARGEST).clamp_max(LARGEST)


@dataclass
class ChosenNetworks:
    """The sampled networks with the smallest loss. The method `move` reduces their loss further by random steps.

    Attributes:
        task: The task that measures losses.
        make: A function from standard normal vectors, `[models, values]`, to networks.
        noise: The standard normal vectors from which the networks are generated.
        networks: The networks, in sampling order.
        losses: The losses of the networks, on the CPU.
    """

    task: Task
    make: Callable[[Float64[Tensor, "models values"]], Params]
    noise: Float64[Tensor, "models values"]
    networks: Params
    losses: Float64[Tensor, " models"]

    @classmethod
    def of(
        cls, task: Task, make: Callable[[Tensor], Params], noise: Float64[Tensor, "models values"], count: int
    ) -> "ChosenNetworks":
        """Generate networks from all vectors in batches, and keep the networks with the smallest loss."""
        made: ChosenNetworks | None = None
        for part in torch.split(noise, MOVED_AT_ONCE):
            networks = make(part)
            own = cls(task, make, part, networks, finite_losses(task, networks).cpu())
            made = own if made is None else made._join(own)
            made = made._select(made.losses.argsort(stable=True)[:count].sort().values)
        assert made is not None
        return made

    def move(self, moves: int, generator: torch.Generator) -> None:
        """Try random steps for each network, and accept the steps that lower the loss.

        A step mixes a network's normal vector with a new random vector, `sqrt(1 - b^2) z + b z'`, which does not change
        the vector's distribution. Therefore changed networks are as far from one another and from training networks as
        unchanged samples are. The step size b of each network adapts to the share of accepted steps.

        References:
            Cotter et al. (2013), MCMC methods for functions, section 4: the preconditioned Crank-Nicolson proposal,
            which also accepts some moves that raise the loss.
        """
        sizes = torch.full((len(self.noise), 1), FIRST_SIZE, dtype=torch.float64)
        for _ in range(moves):
            drawn = torch.randn(self.noise.shape, generator=generator, dtype=torch.float64)
            noise = (1 - sizes.square()).sqrt() * self.noise + sizes * drawn
            kept = torch.cat([self._try(noise, part) for part in torch.split(torch.arange(len(noise)), MOVED_AT_ONCE)])
            sizes = (sizes * ((kept.double() - KEPT_MOVES) / 2).exp().unsqueeze(1)).clamp(*SIZES)

    def _try(self, noise: Tensor, part: Tensor) -> Tensor:
        """Try one step for some networks, and return whether it lowered the loss, bool `[models]`."""
        networks = self.make(noise[part])
        losses = _losses(self.task, networks).cpu()
        kept = losses < self.losses[part]
        rows = part[kept]
        self.noise[rows], self.losses[rows] = noise[rows], losses[kept]
        for name, tensor in self.networks.items():
            tensor[rows.to(tensor.device)] = networks[name][kept.to(tensor.device)]
        return kept

    def _join(self, other: "ChosenNetworks") -> "ChosenNetworks":
        networks = {name: torch.cat([tensor, other.networks[name]]) for name, tensor in self.networks.items()}
        pairs = (self.noise, other.noise), (self.losses, other.losses)
        noise, losses = map(torch.cat, pairs)
        return replace(self, noise=noise, networks=networks, losses=losses)

    def _select(self, rows: Tensor) -> "ChosenNetworks":
        networks = {name: tensor[rows.to(tensor.device)] for name, tensor in self.networks.items()}
        return replace(self, noise=self.noise[rows], networks=networks, losses=self.losses[rows])
