"""What descents over a network's orbit follow: the rounding error of weights, or what rounding does to the outputs."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from regauge.core.given import as_pair
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, cross_entropy
from regauge.gauging.methods.rotations import Weights
from regauge.gauging.rounding import RoundToNearest, layer_rows, round_network


class RoundingLoss(Protocol):
    """How good a point of the orbit is with true rounding, and a differentiable loss that leads to better ones."""

    unit: str

    def needed(self, symmetry: Symmetry) -> Iterable[str] | None:
        """The tensors that `descend` looks at; all where it is None."""

    def score(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> float:
        """What is maximized, of a network and its symmetry."""

    def descend(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> Tensor:
        """The differentiable loss of a network."""


class OfWeights:
    """The rounding error of all layers, relative to the norm of each: without data."""

    unit = "dB"

    def __init__(self, scheme: RoundToNearest) -> None:
        self._scheme = scheme

    def needed(self, symmetry: Symmetry) -> Iterable[str]:
        """The weights of the layers."""
        return layer_rows(symmetry)

    def score(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> float:
        """The ratio of signal to rounding noise of the weights."""
        return Weights(params, symmetry, self._scheme).decibels

    def descend(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> Tensor:
        """The expected error, `sum over scales of range^2`, over all values."""
        layers = {n: rows for n, rows in layer_rows(symmetry).items() if n in symmetry.sites and n in params}
        terms = [
            self._scheme.range_squares(params[name], rows)
            * (params[name].numel() / max(float(params[name].detach().square().sum()), 1e-30))
            for name, rows in layers.items()
        ]
        return torch.stack(terms).sum() / max(sum(params[name].numel() for name in layers), 1)


class OfFunction:
    """How far the outputs of the rounded network are from those of the network as it was, on the task's batches.

    For a task with cross entropy that is the Kullback-Leibler divergence of the softmax over the last axis, in nats;
    for others the squared distance relative to the squared outputs. Targets are not used. The last quarter of the
    batches, at least one, is held out: scores are taken there, and descents see the others, one after the other. A
    single batch serves both.
    """

    def __init__(self, params: Mapping[str, Tensor], scheme: RoundToNearest, task: Task) -> None:
        self._scheme = scheme
        self._task = replace(task, module=copy.deepcopy(task.module).float())
        self._is_divergence = task.criterion is cross_entropy
        self.unit = "nats" if self._is_divergence else "relative squared error"
        self._inputs: list[Any] = [pytree.tree_map_only(Tensor, _single, as_pair(batch)[0]) for batch in task.batches]
        if not self._inputs:
            raise ValueError("the task has no batches to learn from")
        with torch.no_grad():
            self._outputs = [self._run(params, inputs) for inputs in self._inputs]
        count = len(self._inputs)
        self._seen = range(max(count - max(count // 4, 1), 1))
        self._held = range(self._seen.stop, count) if count > 1 else self._seen
        self._next = 0

    def needed(self, symmetry: Symmetry) -> None:
        """All tensors: the network is run."""
        return

    def score(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> float:
        """The negative distance with rounded weights, over the batches that are held out."""
        rounded = round_network(params, symmetry, self._scheme)
        with torch.no_grad():
            found = [float(self._distance(rounded, k)) for k in self._held]
        return -sum(found) / len(found)

    def descend(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> Tensor:
        """The distance with rounded weights on the next batch, whose gradient goes straight through the rounding."""
        rounded = round_network(params, symmetry, self._scheme.straight_through)
        self._next = (self._next + 1) % len(self._seen)
        return self._distance(rounded, self._next)

    def _distance(self, params: Mapping[str, Tensor], batch: int) -> Tensor:
        made, wanted = self._run(params, self._inputs[batch]), self._outputs[batch]
        if self._is_divergence:
            shares = functional.kl_div(made, wanted, log_target=True, reduction="none").sum(-1)
            return shares.mean()
        return (made - wanted).square().sum() / wanted.square().sum().clamp_min(1e-30)

    def _run(self, params: Mapping[str, Tensor], inputs: Any) -> Tensor:
        made = self._task.run({name: _single(tensor) for name, tensor in params.items()}, inputs)
        return made.log_softmax(-1) if self._is_divergence else made


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
