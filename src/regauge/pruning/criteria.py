"""Criteria that decide which units of a group are removed first, and how the weights of the remaining units change."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.core.families import unit_values
from regauge.core.outputs import evaluating
from regauge.core.params import Params
from regauge.core.task import Task
from regauge.pruning.compensation import SecondMoments, remove_compensated, values_read
from regauge.pruning.network import Network

Scores = Mapping[str, Float[Tensor, "copies units"]]
"""For each group, the importance of each unit of each copy."""


class Criterion(ABC):
    """A criterion for choosing the units that are removed. Subclasses are frozen dataclasses and define `scores`.

    A criterion receives a balanced network. Among the networks that scales and invertible matrices can reach without
    changing the function, the balanced network has the smallest norm. Therefore a criterion chooses the same units for
    all networks of an orbit.
    """

    needs_task = False
    """Whether the criterion evaluates the model on the data of a task."""
    needs_generator = False
    """Whether the criterion uses random numbers."""

    @abstractmethod
    def scores(self, network: Network, groups: tuple[str, ...], generator: torch.Generator | None) -> Scores:
        """Return the importance scores of the units; units with the smallest scores are removed first."""

    def remove(
        self, network: Network, group: str, scores: Float[Tensor, "copies units"], gone: Tensor, count: int
    ) -> Tensor:
        """Remove the `count` units with the smallest scores from each copy, and return the removed units."""
        order = scores.masked_fill(gone, -torch.inf).argsort(dim=1, stable=True)
        removed = torch.zeros_like(gone).scatter(1, order[:, :count], value=True)
        network.remove(group, removed.flatten())
        return removed


@dataclass(frozen=True)
class Magnitude(Criterion):
    """The sum of squares of all weights of a unit, over all tensors of a balanced network.

    References:
        Li et al. (2017), Pruning filters for efficient ConvNets, section 3.1, for the incoming weights alone.
    """

    def scores(self, network: Network, groups: tuple[str, ...], generator: torch.Generator | None) -> Scores:
        """Return the sums of squares of the units' weights."""
        squares = {name: tensor.square() for name, tensor in network.params.items()}
        return {name: _summed(network, name, squares) for name in groups}


@dataclass(frozen=True)
class RandomUnits(Criterion):
    """A random choice of units, which is a baseline for all other criteria."""

    needs_generator = True

    def scores(self, network: Network, groups: tuple[str, ...], generator: torch.Generator | None) -> Scores:
        """Return uniformly random numbers."""
        symmetry = network.symmetry
        return {
            name: torch.rand(symmetry.count_copies(name), symmetry[name].size, generator=generator, dtype=torch.float64)
            for name in groups
        }


@dataclass(frozen=True)
class Taylor(Criterion):
    """The first-order change of the loss if a unit is removed: gradient times weight, summed over outgoing weights.

    The change of the loss is squared and summed over the batches of the task.

    References:
        Molchanov et al. (2019), Importance estimation for neural network pruning, equations 6 to 8.
    """

    needs_task = True

    def scores(self, network: Network, groups: tuple[str, ...], generator: torch.Generator | None) -> Scores:
        """Return the squared first-order changes, summed over batches."""
        assert network.task is not None
        total = dict[str, Tensor]()
        for batch in network.task.batches:
            products = _products(network, network.task, batch)
            for name in groups:
                one = _summed(network, name, products, is_reading=True).square()
                total[name] = total[name] + one if name in total else one
        return total


@dataclass(frozen=True)
class OutputError(Criterion):
    """The change in the outputs of the layers that read a unit, if the unit is removed and the weights are refitted.

    A removed unit is replaced by its best linear approximation from the remaining units, and from a constant if layers
    have biases. The approximation uses the second moments of the activations over the batches of the task. Units are
    removed one by one, beginning with the unit whose removal costs least. Groups are cut one after the other. The fit
    for a group uses the activations of the network from which earlier groups are already cut.

    Attributes:
        is_compensated: Whether the weights are refitted. Without refitting, the contributions of removed units are
            dropped.

    References:
        Hassibi and Stork (1993), Optimal brain surgeon, equations 4 and 5; He et al. (2017), Channel pruning for
        accelerating very deep neural networks, section 3.
    """

    is_compensated: bool = True

    needs_task = True

    def scores(self, network: Network, groups: tuple[str, ...], generator: torch.Generator | None) -> Scores:
        """Return magnitudes for groups whose reading layers are unknown; `remove` scores all other groups."""
        unknown = tuple(name for name in groups if not values_read(network, name))
        symmetry = network.symmetry
        zeros = {name: torch.zeros(symmetry.count_copies(name), symmetry[name].size) for name in groups}
        return {**zeros, **Magnitude().scores(network, unknown, generator)}

    def remove(
        self, network: Network, group: str, scores: Float[Tensor, "copies units"], gone: Tensor, count: int
    ) -> Tensor:
        """Remove units one by one, using the second moments of the current network."""
        moments = SecondMoments.collect(network, group)
        if not moments.readings:
            return super().remove(network, group, scores, gone, count)
        removed = remove_compensated(network, moments, gone, count, is_compensated=self.is_compensated)
        network.remove(group, removed.flatten())
        return removed


def _summed(
    network: Network, group: str, tensors: Mapping[str, Tensor], *, is_reading: bool = False
) -> Float[Tensor, "copies units"]:
    """Return each unit's sum of entries, over all tensors on which the group acts or only over tensors that read the
    unit.
    """
    symmetry = network.symmetry
    places = network.sites(group, reading=True)
    places += [] if is_reading and places else network.sites(group, reading=False)
    total = torch.zeros(symmetry.count_copies(group), symmetry[group].size, dtype=torch.float64)
    for name, site in places:
        if name not in symmetry.buffers and tensors[name].is_floating_point():
            values = unit_values(symmetry, name, site, tensors[name]).sum(-1).double()
            total += values.reshape(total.shape)
    return total


def _products(network: Network, task: Task, batch: tuple[object, object]) -> Params:
    """Return the gradient times the weight of each tensor, for one batch."""
    dtype = next((p.dtype for p in task.module.parameters() if p.is_floating_point()), torch.float32)
    leaves: Params = {}
    known: dict[int, Tensor] = {}
    for name, tensor in network.params.items():
        if id(tensor) not in known:
            is_float = tensor.is_floating_point()
            leaf = (tensor.to(dtype) if is_float else tensor).detach().clone()
            known[id(tensor)] = leaf.requires_grad_(is_float and name not in network.symmetry.buffers)
        leaves[name] = known[id(tensor)]
    with torch.enable_grad(), evaluating(task.module):
        loss = task.loss(leaves, batch)
        wanted = {id(leaf): leaf for leaf in leaves.values() if leaf.requires_grad}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    gradients = dict(zip(wanted, found, strict=True))
    return {
        name: torch.zeros_like(leaf) if gradients.get(id(leaf)) is None else (gradients[id(leaf)] * leaf).detach()
        for name, leaf in leaves.items()
    }


CRITERIA: dict[str, type[Criterion]] = {
    "magnitude": Magnitude,
    "taylor": Taylor,
    "output": OutputError,
    "random": RandomUnits,
}
"""The criteria by their names on the command line."""
