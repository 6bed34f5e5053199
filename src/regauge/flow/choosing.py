"""Selection of sampled networks with the least loss on a task."""

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
"""The loss of networks whose loss is not finite."""
MOVED_AT_ONCE = 256
"""Networks that are made at a time."""
FIRST_SIZE, SIZES, KEPT_MOVES = 0.3, (1e-3, 0.9), 0.25
"""Sizes of the first moves and of all, and the share of moves that is kept where sizes stay."""


def require_fit(task: Task, symmetry: Symmetry) -> None:
    """Raise a ValueError unless a task runs networks of a symmetry with every size known."""
    own = {name: tuple(tensor.shape) for name, tensor in task.module.state_dict().items()}
    for name, shape in symmetry.shapes.items():
        if name in symmetry.sites and own.get(name) != tuple(shape):
            found = f"{name!r} of shape {own[name]}" if name in own else f"no {name!r}"
            raise ValueError(
                f"the module of the task has {found}, but the networks have the shape {tuple(shape)} there; give a "
                "task with a module of their architecture"
            )


def finite_losses(task: Task, params: Params) -> Float64[Tensor, " models"]:
    """Return the losses of networks on a task; losses that are not finite become the largest number of float32.

    Raises:
        ValueError: No loss is finite.
    """
    losses = _losses(task, params)
    if bool((losses == LARGEST).all()):
        raise ValueError("no drawn network has a finite loss on the task; look for NaN or Inf in its examples")
    return losses


def _losses(task: Task, params: Params) -> Float64[Tensor, " models"]:
    """Return the losses of networks on a task, at most `LARGEST`."""
    return find_metrics(task, params)[0].double().nan_to_num(nan=LARGEST, posinf=LARGEST).clamp_max(LARGEST)


@dataclass
class ChosenNetworks:
    """The sampled networks with the least loss, which random moves can improve further.

    Attributes:
        task: The task that measures losses.
        make: Function from standard normal values, `[models, values]`, to networks.
        noise: The standard normal values from which the networks are made.
        networks: The networks, in the order in which they were sampled.
        losses: Their losses, on the CPU.
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
        """Make networks from all values in batches, and keep the networks with the least loss."""
        made: ChosenNetworks | None = None
        for part in torch.split(noise, MOVED_AT_ONCE):
            networks = make(part)
            own = cls(task, make, part, networks, finite_losses(task, networks).cpu())
            made = own if made is None else made._join(own)
            made = made._select(made.losses.argsort(stable=True)[:count].sort().values)
        assert made is not None
        return made

    def move(self, moves: int, generator: torch.Generator) -> None:
        """Try random moves of each network, and keep the moves that lower the loss.

        A move mixes the values with new random values, `sqrt(1 - b^2) z + b z'`, which does not change their
        distribution. Moved networks are therefore no closer to one another or to training networks than other samples.
        The step size b of each network adapts to the share of its moves that are kept.

        References:
            Cotter et al. (2013), MCMC methods for functions, section 4: the preconditioned Crank-Nicolson proposal,
            here without the acceptance of moves that raise the loss.
        """
        sizes = torch.full((len(self.noise), 1), FIRST_SIZE, dtype=torch.float64)
        for _ in range(moves):
            drawn = torch.randn(self.noise.shape, generator=generator, dtype=torch.float64)
            noise = (1 - sizes.square()).sqrt() * self.noise + sizes * drawn
            kept = torch.cat([self._try(noise, part) for part in torch.split(torch.arange(len(noise)), MOVED_AT_ONCE)])
            sizes = (sizes * ((kept.double() - KEPT_MOVES) / 2).exp().unsqueeze(1)).clamp(*SIZES)

    def _try(self, noise: Tensor, part: Tensor) -> Tensor:
        """Try one move of some networks, and return whether it lowered the loss, bool `[models]`."""
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
