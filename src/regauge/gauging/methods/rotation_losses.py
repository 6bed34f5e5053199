"""What learned rotations descend on: the rounding error of weights, or what rounding does to the network's outputs."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from regauge.core.act import act
from regauge.core.element import Element
from regauge.core.given import as_pair
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, cross_entropy
from regauge.gauging.methods.rotations import Weights
from regauge.gauging.rounding import RoundToNearest, layer_rows, round_network


class RotationLoss(Protocol):
    """How good a rotation of a network is, with true rounding, and a smooth loss that leads to better ones."""

    unit: str

    def score(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> float:
        """What is maximized, of a network and its symmetry."""

    def descend(self, params: Mapping[str, Tensor], symmetry: Symmetry, element: Element) -> Tensor:
        """The differentiable loss of a network that is moved by an element."""


def rotated(params: Mapping[str, Tensor], symmetry: Symmetry, element: Element) -> Params:
    """The parameters that a symmetry moves, moved; differentiable in the element, and others are left out."""
    sites = {name: local for name, local in symmetry.sites.items() if name in params}
    return act(symmetry.groups, sites, element, params, {name: params[name].ndim for name in sites})


class OfWeights:
    """The rounding error of all layers, relative to the norm of each: without data."""

    unit = "dB"

    def __init__(self, scheme: RoundToNearest) -> None:
        self._scheme = scheme

    def score(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> float:
        """The ratio of signal to rounding noise of the weights."""
        return Weights(params, symmetry, self._scheme).decibels

    def descend(self, params: Mapping[str, Tensor], symmetry: Symmetry, element: Element) -> Tensor:
        """The expected error, `sum over scales of range^2`, over all values."""
        layers = {n: rows for n, rows in layer_rows(symmetry).items() if n in symmetry.sites and n in params}
        own = {name: params[name] for name in layers}
        moved = rotated(own, symmetry, element)
        terms = [
            self._scheme.range_squares(moved[name], rows)
            * (own[name].numel() / max(float(own[name].square().sum()), 1e-30))
            for name, rows in layers.items()
        ]
        return torch.stack(terms).sum() / max(sum(tensor.numel() for tensor in own.values()), 1)


class OfOutputs:
    """How far the outputs of the rounded network are from those of the network as it was, on the task's batches.

    For a task with cross entropy that is the Kullback-Leibler divergence of the softmax over the last axis, in nats;
    for others the squared distance relative to the squared outputs. Targets are not used. The smooth loss replaces
    rounding by uniform noise as wide as its steps, on one batch after the other.
    """

    def __init__(
        self, params: Mapping[str, Tensor], scheme: RoundToNearest, task: Task, generator: torch.Generator
    ) -> None:
        self._scheme, self._generator = scheme, generator
        self._task = replace(task, module=copy.deepcopy(task.module).float())
        self._is_divergence = task.criterion is cross_entropy
        self.unit = "nats" if self._is_divergence else "relative squared error"
        self._inputs: list[Any] = [pytree.tree_map_only(Tensor, _single, as_pair(batch)[0]) for batch in task.batches]
        with torch.no_grad():
            self._outputs = [self._run(params, inputs) for inputs in self._inputs]
        self._next = 0

    def score(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> float:
        """The negative distance with rounded weights, over all batches."""
        rounded = round_network(params, symmetry, self._scheme)
        with torch.no_grad():
            found = [float(self._distance(rounded, k)) for k in range(len(self._inputs))]
        return -sum(found) / len(found)

    def descend(self, params: Mapping[str, Tensor], symmetry: Symmetry, element: Element) -> Tensor:
        """The distance with noise in place of rounding, on the next batch."""
        moved = {**params, **rotated(params, symmetry, element)}
        noisy = round_network(moved, symmetry, lambda tensor, rows: self._scheme.noisy(tensor, rows, self._generator))
        self._next = (self._next + 1) % len(self._inputs)
        return self._distance(noisy, self._next)

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
