"""Losses for descents on a network's orbit: the rounding error of weights, or the change of outputs by rounding."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from regauge.core.given import as_pair, given_or_seed
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, cross_entropy
from regauge.gauging.methods.orbit_part import OrbitPart, Point
from regauge.gauging.methods.spreading_rotations import RoundedLayers
from regauge.gauging.rounding import RoundToNearest, round_network

PROBES = 16
"""The number of gradients that approximate the second derivative of the distance. Each gradient takes as much memory as
all layers."""


class RoundingLoss(Protocol):
    """A score of networks with true rounding, and a differentiable loss for improving this score by descent."""

    unit: str

    def score(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> float:
        """Return the objective of a network with true rounding; higher is better."""

    def descend(self, reach: OrbitPart, point: Point) -> Tensor:
        """Return the differentiable loss at a point."""


class OfWeights:
    """The rounding error of all layers, relative to the norm of each layer. The score of weights needs no data."""

    unit = "dB"

    def __init__(self, scheme: RoundToNearest) -> None:
        self._scheme = scheme

    def score(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> float:
        """Return the signal-to-noise ratio of the rounded weights."""
        return RoundedLayers(params, symmetry, self._scheme).decibels

    def descend(self, reach: OrbitPart, point: Point) -> Tensor:
        """Return the expected error, summed over all weights."""
        layers, params = reach.layers, reach.params(point, reach.layers)
        terms = [
            self._scheme.expected_error(params[name], rows)
            * (params[name].numel() / max(float(params[name].detach().square().sum()), 1e-30))
            for name, rows in layers.items()
        ]
        return torch.stack(terms).sum() / max(sum(params[name].numel() for name in layers), 1)


class OfFunction:
    """The distance between the outputs of the rounded network and of the given network, on the task's batches.

    If the task uses cross entropy, the distance is the Kullback-Leibler divergence of the softmax over the last axis,
    in nats. For other tasks, the distance is the squared difference relative to the squared outputs. Targets are not
    used. The last quarter of the batches, and at least one batch, is held out. Scores use the held-out batches, and
    descents use the other batches in turn. If there is only one batch, it is used both for scores and for descents.
    """

    def __init__(self, params: Mapping[str, Tensor], scheme: RoundToNearest, task: Task) -> None:
        self._scheme = scheme
        self._task = replace(task, module=copy.deepcopy(task.module).float())
        self._is_divergence = task.criterion is cross_entropy
        self.unit = "nats" if self._is_divergence else "relative squared error"
        self._inputs: list[Any] = [pytree.tree_map_only(Tensor, _single, as_pair(batch)[0]) for batch in task.batches]
        if not self._inputs:
            raise ValueError("the task has no batches to learn from; give at least one")
        with torch.no_grad():
            self._outputs = [self._run(params, inputs) for inputs in self._inputs]
        count = len(self._inputs)
        self._seen = range(max(count - max(count // 4, 1), 1))
        self._held = range(self._seen.stop, count) if count > 1 else self._seen
        self._next = 0

    def score(self, params: Mapping[str, Tensor], symmetry: Symmetry) -> float:
        """Return minus the distance between the outputs with and without rounded weights, on the held-out batches."""
        rounded = round_network(params, symmetry, self._scheme)
        with torch.no_grad():
            found = [float(self._distance(rounded, k)) for k in self._held]
        return -sum(found) / len(found)

    def descend(self, reach: OrbitPart, point: Point) -> Tensor:
        """Return the distance with rounded weights on the next batch, with straight-through gradients."""
        rounded = round_network(reach.params(point), reach.symmetry, self._scheme.straight_through)
        self._next = (self._next + 1) % len(self._seen)
        with DifferentiableStatistics():
            return self._distance(rounded, self._next)

    def curvature(self, reach: OrbitPart, generator: torch.Generator) -> Params:
        """Return the second derivative of the distance, at the start, with respect to the weights that are transformed.

        The result contains gradients `[probes, *shape]` for each layer. The expected sum of the outer products of the
        gradients is the second derivative. Each gradient is the gradient of randomly weighted outputs, on some of the
        batches that descents use.

        References:
            Martens (2020), New insights on the natural gradient method, section 9.2, for the divergence.
        """
        start = reach.start
        leaves = {name: start[name].detach().clone().requires_grad_() for name in reach.layers}
        same = {name: leaves[one] for names in reach.symmetry.tied for one in names if one in leaves for name in names}
        params = {**start, **leaves, **same}
        draws = max(PROBES, len(self._seen))
        sums = {name: torch.zeros(PROBES, *leaf.shape) for name, leaf in leaves.items()}
        for draw in range(draws):
            made = self._run(params, self._inputs[draw % len(self._seen)])
            # The gradient of noise^T R f is J^T R noise, whose outer product has the expectation J^T R^2 J: the
            # curvature without second derivatives of f, from one backward pass.
            noise = torch.randn(made.shape, generator=generator, device=generator.device).to(made.device)
            found = torch.autograd.grad((noise * self._root(made.detach()) * made).sum(), [*leaves.values()])
            for name, gradient in zip(leaves, found, strict=True):
                sums[name][draw % PROBES] += gradient / draws**0.5
        return sums

    def _root(self, made: Tensor) -> Tensor:
        """Return a square root of the second derivative of the distance with respect to the outputs."""
        if self._is_divergence:
            return (made.exp() / made[..., 0].numel()).sqrt()
        return (2 / made.square().sum().clamp_min(1e-30)).sqrt()

    def _distance(self, params: Mapping[str, Tensor], batch: int) -> Tensor:
        made, wanted = self._run(params, self._inputs[batch]), self._outputs[batch]
        if self._is_divergence:
            shares = functional.kl_div(made, wanted, log_target=True, reduction="none").sum(-1)
            return shares.mean()
        return (made - wanted).square().sum() / wanted.square().sum().clamp_min(1e-30)

    def _run(self, params: Mapping[str, Tensor], inputs: Any) -> Tensor:
        made = self._task.run({name: _single(tensor) for name, tensor in params.items()}, inputs)
        return made.log_softmax(-1) if self._is_divergence else made


class DifferentiableStatistics(TorchFunctionMode):
    """A context in which batch normalization in evaluation mode is also differentiable in its running statistics.

    Scales of the normalized activations also change the running statistics, for which torch computes no gradients.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        return _batch_norm(*args, **(kwargs or {}))


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute `functional.batch_norm`, by elementary operations if the running statistics require gradients."""
    is_moved = any(one is not None and one.requires_grad for one in (running_mean, running_var))
    if training or not is_moved or running_mean is None or running_var is None:
        return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    shape = (1, -1, *[1] * (x.ndim - 2))
    factor = (running_var + eps).rsqrt() if weight is None else weight * (running_var + eps).rsqrt()
    shift = -running_mean * factor if bias is None else bias - running_mean * factor
    return x * factor.reshape(shape) + shift.reshape(shape)


class Expected:
    """The expected distance of outputs that rounding causes, to second order, on the batches that descents use.

    To second order, the distance is `sum over values of step^2 F / 24`, where F is the mean square of each weight's
    gradient. On an orbit, gradients transform by the inverse transpose of the weights' action. Therefore the network is
    evaluated only once. The expected distance is smooth, unlike the outputs of the rounded network. Scores are computed
    by `function`.
    """

    def __init__(
        self, function: OfFunction, reach: OrbitPart, scheme: RoundToNearest, generator: torch.Generator | None
    ) -> None:
        self.unit = function.unit
        self.score = function.score
        self._scheme = scheme
        chance = given_or_seed(generator)
        self._curvature = function.curvature(reach, chance)

    def descend(self, reach: OrbitPart, point: Point) -> Tensor:
        """Return the logarithm of the expected distance.

        The gradients of the logarithm have about the same size for any number of bits.
        """
        params, gradients = reach.params(point, reach.layers), reach.gradients(point, self._curvature)
        terms = [
            self._scheme.expected_error(params[name], rows, gradients[name].square().sum(0))
            for name, rows in reach.layers.items()
        ]
        return (torch.stack(terms).sum() / 2).clamp_min(1e-30).log()


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
