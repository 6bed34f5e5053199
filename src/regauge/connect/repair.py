"""Variance collapse of interpolated networks: its measurement, and its repair by renormalizing activations.

If batch normalization follows the layers, recomputing the running statistics repairs the network.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from regauge.checkpoints.job import Network, open_call, open_job, with_files
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.output import Output
from regauge.connect.affine_layers import AffineLayer
from regauge.connect.unit_moments import LayerStatistics, RunningMoments
from regauge.core.arguments import check_arguments
from regauge.core.given import as_networks, as_params, inputs_of, require_batches, require_tensors
from regauge.core.interpolation import distance, mean, shares_of
from regauge.core.outputs import evaluating
from regauge.core.params import Params, equal_names, require_finite, require_same_shapes, round_alike
from regauge.core.task import Task, call

FAR = 0.05
"""A share of the distance between the endpoints. A note is given if the network is farther than this share from the
mean of the endpoints."""
CONSTANT_UNIT = 1e-6
"""A unit counts as constant if its standard deviation is below this share of its magnitude."""


@dataclass(frozen=True)
class RepairResult:
    """The result of `repair`: a repaired network.

    Attributes:
        params: The parameters, with the names, dtypes and devices of the interpolated network.
        layers: The names of the layers whose weights were rescaled, in graph order.
        losses: If there is a task, the losses of the interpolated network and of the repaired network.
        is_kept: Whether `params` belong to the repaired network instead of the interpolated network.
        off: The distance between the interpolated network and the mean of the endpoints.
        spread: The largest distance between an endpoint and the first endpoint.
    """

    params: Params = field(repr=False)
    layers: tuple[str, ...]
    losses: Mapping[str, float] = field(default_factory=dict)
    is_kept: bool = True
    off: float = 0.0
    spread: float = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Return messages about endpoints that do not fit the network, and about a repair that was discarded."""
        notes = []
        if self.off > FAR * self.spread:
            notes.append(
                f"note: the mean of the endpoints is {self.off:.4g} away from the merged checkpoint, and they are up "
                f"to {self.spread:.4g} apart. Give them as they were aligned for the merge, or align them to it"
            )
        if not self.is_kept:
            before, after = self.losses["interpolated"], self.losses["repaired"]
            notes.append(
                f"repairing raises the loss on the data that choose from {before:.4g} to {after:.4g}: the network "
                "stays as it is"
            )
        return tuple(notes)


@dataclass(frozen=True)
class LayerVariance:
    """The variances of one layer, averaged over its units.

    Attributes:
        variance: The variance of the interpolated network's units over the data.
        expected: The expected variance: the square of the interpolated standard deviation of the endpoints.
        ratio: The ratio `variance / expected`. The ratio is one without collapse, and NaN if both variances are zero.
    """

    layer: str
    units: int
    variance: float
    expected: float
    ratio: float


@dataclass(frozen=True)
class VarianceCollapse:
    """The variances in an interpolated network, compared with the interpolated variances of its endpoints.

    Attributes:
        table: One row for each layer, in graph order.
    """

    table: tuple[LayerVariance, ...]

    def __str__(self) -> str:
        width = max((len(row.layer) for row in self.table), default=0)
        head = f"{'layer':<{width}}  units   variance   expected   ratio"
        rows = [
            f"{row.layer:<{width}}  {row.units:5}  {row.variance:9.3g}  {row.expected:9.3g}  {row.ratio:6.3f}"
            for row in self.table
        ]
        return "\n".join([head, *rows])


@check_arguments
@with_files
def repair(
    params: Network,
    module: nn.Module,
    endpoints: Sequence[Network],
    batches: Iterable[Any],
    *,
    weights: Sequence[float] | None = None,
    task: Task | None = None,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
) -> RepairResult:
    """Give every unit of an interpolated network the interpolated mean and standard deviation of the endpoints.

    A linear layer or convolution is repaired if another linear layer or convolution follows. Before the nonlinearity,
    each unit gets the mean `sum_k w_k mean_k` and the *standard deviation* `sum_k w_k std_k` of the endpoints. The
    repair rescales the incoming weights of each unit and shifts its bias. The architecture of the network stays the
    same. Layers are repaired in graph order. The statistics of a layer are measured after all layers before it were
    repaired. Therefore all layers have the desired statistics at the end. Measuring each endpoint takes one pass over
    the batches. Each layer on the longest path through the model takes one further pass, which runs only up to this
    layer. Statistics are computed over all examples and positions.

    The following parts are not changed: the last layer, layers whose weight is used twice, grouped transposed
    convolutions, embeddings, and the gates of recurrent layers. If a layer has no bias of its own, its mean is not
    changed. If a unit is constant in the interpolated network, its standard deviation is not changed. Residual blocks
    are repaired at the layers that write to the residual stream. Layers before a batch normalization keep their
    weights. Instead, running statistics are recomputed (`reset_batchnorm`). In models that also have other layers to
    repair, the statistics are recomputed before each repair of a layer and at the end.

    Args:
        params: The interpolated network: parameters by name, or the path of a checkpoint. The given network is not
            modified.
        module: The module that is called with the parameters. Parameters stored in the module are not used.
        endpoints: The aligned networks from which the first argument was interpolated, in the same form. Without
            endpoints, only running statistics are recomputed.
        batches: Batches as in a `Task`, or inputs alone: tensors or mappings of keyword inputs. Targets are not used. A
            few thousand examples are sufficient. The examples are read many times.
        weights: The weight of every endpoint, which is `(1 - t, t)` at t. Default: equal weights.
        task: A task that decides whether the repair helps. If the repair increases the loss of the task, the network is
            returned unchanged, with a note.
        out: The path or `Output` to which the repaired checkpoint is written.
        memory: The memory limit for a checkpoint: a number of bytes, or text such as "2GB". Default: half of the
            machine's memory.

    Returns:
        The repaired network. If all endpoints equal the network itself, the result is the given network with recomputed
        running statistics.

    Raises:
        TraceError: The module cannot be traced.
        ValueError: There are no batches, the networks have different architectures or are not finite, the weights do
            not fit, or there are neither endpoints nor running statistics.

    References:
        Jordan et al. (2023), REPAIR: Renormalizing Permuted Activations for Interpolation Repair, section 4. In the
        paper, all layers get their goals at once, through a batch normalization that is fused afterwards.
    """
    named, files = {"merged": params, "endpoints": list(endpoints)}, [params]
    job = open_call("rg.repair", {"weights": weights}, named, networks=files, work="repairing", out=out, memory=memory)
    if job is not None:
        job.require_memory()
        job = job.named_for(module)
        params = job.source.params
    params = as_params(params)
    ends = [_read(one, module) for one in endpoints]
    if ends:
        result = Repairer(module, ends, batches).repair(params, weights)
        off = distance(params, mean(ends, shares_of(weights, len(ends))))
        result = replace(result, off=off, spread=max(distance(ends[0], end) for end in ends))
    elif _layers(module):
        result = RepairResult(reset_batchnorm(params, module, batches), ())
    else:
        raise ValueError(
            "without endpoints only statistics of batch normalization are recomputed, but the model has none; give the "
            "networks that were merged as endpoints"
        )
    if task is not None:
        losses = {"repaired": task.evaluate(result.params)["loss"], "interpolated": task.evaluate(params)["loss"]}
        best = min(losses, key=lambda name: (math.isnan(losses[name]), losses[name]))
        result = replace(result, losses=losses)
        if best != "repaired":
            result = replace(result, params=as_params(params), layers=(), is_kept=False)
    if job is not None and job.out is not None:
        job.write(result.params)
    return result


def _read(network: Network, module: nn.Module) -> Mapping[str, Tensor]:
    """Return the parameters of a network in memory or in a file, under the names of its module."""
    job = open_job([network], 0)
    if job is not None:
        return job.named_for(module).source.params
    return as_params(network, "the endpoint")


class Repairer:
    """A function object that repairs networks between the same endpoints.

    The statistics of the endpoints are measured once.

    Args:
        module: The module, as in `repair`.
        endpoints: The endpoints, as in `repair`. The endpoints must not change between calls.
        batches: The batches, as in `repair`.
    """

    def __init__(self, module: nn.Module, endpoints: Sequence[Mapping[str, Tensor]], batches: Iterable[Any]) -> None:
        self._module, self._endpoints, self._batches = module, endpoints, batches
        self._is_normalized = bool(_layers(module))
        self._known: tuple[LayerStatistics, tuple[AffineLayer, ...], list[dict[str, RunningMoments]]] | None = None

    def repair(self, params: Mapping[str, Tensor], weights: Sequence[float] | None = None) -> RepairResult:
        """Repair a network between the endpoints; see the function `repair`."""
        params, endpoints, shares = require_endpoints(params, self._endpoints, weights)
        statistics, layers, ends = self._measure(params, endpoints)
        result = statistics.floats(params)
        for depth in sorted({layer.depth for layer in layers}):
            stage = [layer for layer in layers if layer.depth == depth]
            if self._is_normalized:
                result = reset_batchnorm(result, statistics.module, statistics)
            now = statistics.moments(result, {layer.value: layer.axis for layer in stage})
            for layer in stage:
                goal = goals([end[layer.value] for end in ends], shares)
                for name, tensor in _repair_layer(layer, result, now[layer.value], *goal).items():
                    result |= dict.fromkeys(statistics.aliases.get(name, (name,)), tensor)
        if self._is_normalized:
            result = reset_batchnorm(result, statistics.module, statistics)
        names = tuple(layer.name for layer in layers)
        return RepairResult(round_alike(result, params), names)

    def _measure(
        self, params: Params, endpoints: list[Params]
    ) -> tuple[LayerStatistics, tuple[AffineLayer, ...], list[dict[str, RunningMoments]]]:
        """Return the module with its data, the layers to repair, and the moments of their values for each endpoint."""
        if self._known is None:
            statistics = LayerStatistics(self._module, self._batches, [params, *endpoints])
            layers = tuple(layer for layer in statistics.layers if layer.is_repaired)
            places = {layer.value: layer.axis for layer in layers}
            self._known = statistics, layers, [statistics.moments(end, places) for end in endpoints] if layers else []
        return self._known


@check_arguments
def variance_collapse(
    params: Mapping[str, Tensor],
    module: nn.Module,
    endpoints: Sequence[Mapping[str, Tensor]],
    batches: Iterable[Any],
    *,
    weights: Sequence[float] | None = None,
) -> VarianceCollapse:
    """Measure the variance of every layer's units in an interpolated network and in its endpoints.

    `variance_collapse` measures the outputs of all linear layers and convolutions, including the last layer. The
    outputs are measured before the nonlinearity, and after a batch normalization that follows the layer. After a
    repair, the layers that `repair` corrects have ratio one. For posteriors, build all networks from the same normal
    sample, and average the variances over several samples.

    Args:
        params: The interpolated network.
        module: The module that is called with the parameters. Parameters stored in the module are not used.
        endpoints: The networks from which the network was interpolated.
        batches: The batches, as in `repair`.
        weights: The weight of every endpoint, which is `(1 - t, t)` at t. Default: equal weights.

    Raises:
        TraceError: The module cannot be traced.
        ValueError: The arguments are invalid for `repair`, which lists the cases.

    References:
        Jordan et al. (2023), REPAIR, section 3.1; Rossi et al. (2023), figure 10.
    """
    params, endpoints, shares = require_endpoints(params, endpoints, weights)
    statistics = LayerStatistics(module, batches, [params, *endpoints])
    now, *ends = [statistics.moments(network, statistics.places) for network in (params, *endpoints)]
    variances = {name: moments.std.square() for name, moments in now.items()}
    expected = {name: goals([end[name] for end in ends], shares)[1] for name in now}
    return tabulate_variances(statistics, variances, expected)


def tabulate_variances(
    statistics: LayerStatistics, variances: Mapping[str, Tensor], stds: Mapping[str, Tensor]
) -> VarianceCollapse:
    """Compare the unit variances `[units]` of every layer with expected standard deviations; both indexed by the names
    of values.
    """
    rows = []
    for layer, name in zip(statistics.layers, statistics.places, strict=True):
        variance, expected = float(variances[name].mean()), float(stds[name].square().mean())
        ratio = variance / expected if expected else float("nan") if not variance else float("inf")
        rows.append(LayerVariance(layer.name, len(stds[name]), variance, expected, ratio))
    return VarianceCollapse(tuple(rows))


@check_arguments
def reset_batchnorm(params: Mapping[str, Tensor], module: nn.Module, batches: Iterable[Any]) -> Params:
    """Recompute the running means and variances of every batch normalization layer from data.

    If two networks are averaged, their activations often have a much smaller variance than the averaged statistics
    describe. The new statistics are plain averages, over the batches, of the mean and the unbiased variance of each
    batch. All layers are measured in the same forward passes, in which each batch normalization layer normalizes with
    the current batch, and all other layers are in evaluation mode.

    Args:
        params: The parameters and buffers, which are not modified.
        module: The module that is called with the parameters. Parameters stored in the module are not used.
        batches: The batches, as in `repair`.

    Returns:
        The same parameters with new statistics. If the module has no running statistics, the result equals `params`.

    Raises:
        TypeError: The parameters are not a dictionary, or `batches` is a single batch.
        ValueError: There are no batches, or the batches can be iterated only once.

    References:
        Ainsworth et al. (2023); Jordan et al. (2023), REPAIR.
    """
    require_batches(batches)
    require_tensors(params)
    layers, state = _layers(module), dict(params)
    if not layers:
        return state
    for name in layers:
        prefix = f"{name}." if name else ""
        for key, start in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            state[prefix + key] = torch.full_like(params[prefix + key], start)
    momenta = {name: layer.momentum for name, layer in layers.items()}
    seen = 0
    with evaluating(module):
        try:
            for layer in layers.values():
                layer.train()
                layer.momentum = None  # torch then computes the cumulative average
            with torch.no_grad():
                for batch in batches:
                    call(module, state, inputs_of(batch))
                    seen += 1
        finally:
            for name, layer in layers.items():
                layer.momentum = momenta[name]
    if not seen:
        raise ValueError("there are no batches to recompute the statistics from; give one at least")
    return round_alike(state, params)


def goals(ends: Sequence[RunningMoments], shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the interpolated means and standard deviations.

    Mean and standard deviation are exact if a unit is equal in all endpoints.
    """
    first = ends[0]
    rest = list(zip(ends, shares, strict=True))[1:]
    mean = first.mean + sum(w * (end.mean - first.mean) for end, w in rest)
    std = first.std + sum(w * (end.std - first.std) for end, w in rest)
    return mean, std


def require_endpoints(
    params: Mapping[str, Tensor], endpoints: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None
) -> tuple[Params, list[Params], tuple[float, ...]]:
    """Return the network, its endpoints and their weights, which sum to one. Raise an error unless the endpoints are
    valid.
    """
    params = as_params(params, "the interpolated network")
    ends = [as_params(end, f"endpoint {k}") for k, end in enumerate(as_networks(endpoints))]
    if not ends:
        raise ValueError("there are no endpoints; give the networks between which the interpolated one lies")
    equal = equal_names([params, *ends])
    require_finite(params, "the interpolated network", equal)
    for k, end in enumerate(ends):
        try:
            require_same_shapes(params, end)
        except ValueError as error:
            raise ValueError(
                f"endpoint {k} does not fit the interpolated network: {error}; give networks of its architecture"
            ) from None
        require_finite(end, f"endpoint {k}", equal)
    return params, ends, shares_of(weights, len(ends))


def _repair_layer(layer: AffineLayer, params: Params, now: RunningMoments, mean: Tensor, std: Tensor) -> Params:
    """Return the weight and bias of a layer that give its units a mean and a standard deviation."""
    # A constant unit has a standard deviation of zero. With a factor of one, only its mean changes.
    is_live = now.std > CONSTANT_UNIT * (now.mean.abs() + std)
    factor = torch.where(is_live, std / torch.where(is_live, now.std, 1.0), 1.0)
    weight = params[layer.weight]
    shape = [1] * weight.ndim
    shape[layer.weight_axis] = -1
    changed = {layer.weight: (weight.double() * factor.reshape(shape).to(weight.device)).to(weight.dtype)}
    if layer.bias is not None:
        bias = params[layer.bias]
        scale, shift = factor.to(bias.device), (mean - factor * now.mean).to(bias.device)
        changed[layer.bias] = (scale * bias.double() + shift).to(bias.dtype)
    return changed


def _layers(module: nn.Module) -> dict[str, _BatchNorm]:
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None
    }


@check_arguments
def prepare_statistics(task: Task, batches: Iterable[Any] | None = None) -> Task:
    """Make a task recompute batch normalization statistics for every network that it prepares.

    Args:
        task: The task. The task of a model without running statistics is returned unchanged.
        batches: The batches from which statistics are computed. Default: the batches of the task.
    """
    if not any(name.endswith("running_mean") for name in task.module.state_dict()):
        return task
    chosen = list(task.batches if batches is None else batches)
    return replace(task, prepare=partial(reset_batchnorm, module=task.module, batches=chosen))
