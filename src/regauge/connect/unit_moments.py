"""Means and standard deviations of the units in a model's layers, measured on data."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regauge.connect.affine_layers import AffineLayer, layers_of
from regauge.core.given import inputs_of, require_batches
from regauge.core.outputs import evaluating
from regauge.core.params import Params
from regauge.core.task import arguments
from regauge.discovery.activations import IntermediateValues
from regauge.discovery.registry import leaves_as_operators
from regauge.discovery.trace import trace


@dataclass
class RunningMoments:
    """The running mean and variance of every unit, in float64. Batches are merged pairwise.

    References:
        Chan, Golub and LeVeque (1983), equations 1.5 and 3.1.
    """

    count: int = 0  # samples so far
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))  # `[units]`
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))  # sums of squared deviations from it, `[units]`

    def update(self, values: Tensor) -> None:
        """Add one batch of values, `[units, samples]`."""
        samples = values.shape[1]
        mean = values.mean(1, dtype=torch.float64)
        squares = (values - mean.to(values.dtype).unsqueeze(1)).square().sum(1, dtype=torch.float64)
        if not self.count:
            self.count, self.mean, self.squares = samples, mean, squares
            return
        total = self.count + samples
        change = mean - self.mean
        self.squares += squares + change.square() * (self.count * samples / total)
        self.mean += change * (samples / total)
        self.count = total

    @property
    def std(self) -> Tensor:
        """The standard deviation over all samples, `[units]`."""
        return (self.squares / self.count).sqrt()


class LayerStatistics:
    """A module with data, which measures the layers of networks with the module's architecture.

    Statistics are computed over all examples, positions and tokens. Networks run in evaluation mode, in float32. If one
    of the measured networks is in float64, all of them run in float64. Batches are iterated several times.

    Raises:
        TraceError: The module cannot be traced.
        ValueError: There are no batches, the batches can be iterated only once, or the module raises an error for a
            batch.
    """

    def __init__(self, module: nn.Module, batches: Iterable[Any], networks: Sequence[Mapping[str, Tensor]]) -> None:
        require_batches(batches)
        dtypes = [t.dtype for params in networks for t in params.values() if t.is_floating_point()]
        self._dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        is_alike = all(t.dtype == self._dtype for t in module.state_dict().values() if t.is_floating_point())
        self.module = module if is_alike else copy.deepcopy(module).to(self._dtype)
        self._batches = batches
        self._traces: dict[tuple[Any, ...], IntermediateValues] = {}
        self._layers: tuple[AffineLayer, ...] | None = None
        for batch in batches:
            self._prepare(batch)
            break

    @property
    def layers(self) -> tuple[AffineLayer, ...]:
        """The affine layers, in graph order."""
        if self._layers is None:
            raise ValueError("there are no batches, and activations are measured on data; give at least one")
        return self._layers

    @property
    def places(self) -> dict[str, int]:
        """The names of the layers' values (after normalization if there is one), with the unit axis of each value."""
        return {layer.normalized or layer.value: layer.axis for layer in self.layers}

    @property
    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """For each tensor, all of its names, by its first name."""
        return next(iter(self._traces.values())).program.aliases

    def moments(self, params: Mapping[str, Tensor], places: Mapping[str, int]) -> dict[str, RunningMoments]:
        """Return the mean and variance of every unit of some values, computed in one pass.

        `places` gives the unit axes.

        Raises:
            ValueError: A value contains NaN or Inf.
        """
        result = {name: RunningMoments() for name in places}
        for batch in self.activations(params, places):
            for name, samples in batch.items():
                result[name].update(samples)
        return result

    def activations(self, params: Mapping[str, Tensor], places: Mapping[str, int]) -> Iterator[dict[str, Tensor]]:
        """Yield the measured values, `[units, samples]`, one batch at a time.

        Raises:
            ValueError: A value contains NaN or Inf.
        """
        running = self.floats(params)
        for batch in self._batches:
            values, args, kwargs = self._prepare(batch)
            with evaluating(self.module):
                found = values(running, args, kwargs, list(places))
            result = {name: found[name].movedim(axis, 0).flatten(1) for name, axis in places.items()}
            for name, samples in result.items():
                if not bool(samples.isfinite().all()):
                    raise ValueError(
                        f"the activation {name} (shape {tuple(found[name].shape)}) is NaN or Inf for some inputs and "
                        "has no statistics; leave these inputs out, or run the networks in a wider dtype"
                    )
            yield result

    def floats(self, params: Mapping[str, Tensor]) -> Params:
        """Return the parameters in the precision in which the networks run."""
        return {name: t.detach().to(self._dtype) if t.is_floating_point() else t for name, t in params.items()}

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches in the precision of the networks, as pairs without targets."""
        for batch in self._batches:
            args, kwargs = self._arguments(batch)
            yield kwargs or args, None

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def cast(value: Any) -> Any:
            return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        args, kwargs = pytree.tree_map(cast, arguments(inputs_of(batch)))
        return args, kwargs

    def _prepare(self, batch: Any) -> tuple[IntermediateValues, tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self._arguments(batch)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (structure, *(tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves))
        if key not in self._traces:
            with leaves_as_operators(self.module):
                program = trace(self.module, args, kwargs)
            layers = layers_of(program)
            if self._layers is not None and layers != self._layers:
                raise ValueError(
                    "the module takes another way for a batch of another shape, and its activations cannot be measured "
                    "over all batches; give batches of one shape"
                )
            self._layers = layers
            self._traces[key] = IntermediateValues(self.module, program)
        return self._traces[key], args, kwargs
