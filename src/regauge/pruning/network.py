"""A network in float64 whose units are removed one by one without changing the shapes of tensors."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regauge.alignment.activations.costs import Traces
from regauge.core.act import Site
from regauge.core.families import unit_index
from regauge.core.params import Params
from regauge.core.probe import InDouble, Probe, exact_probe, relative_change
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, arguments
from regauge.discovery.activations import Activations, activations

Outputs: TypeAlias = list[Tensor]


class Network:
    """A network in float64, with the groups of its symmetry. With a task, the network also has a module and inputs.

    Attributes:
        params: The current tensors. A unit is removed by setting the weights that read it to zero.
        symmetry: The symmetry, with every size known.
        task: The model and data, or None.
        tolerance: The largest relative change of the outputs that counts as rounding.
    """

    def __init__(self, params: Mapping[str, Tensor], symmetry: Symmetry, task: Task | None) -> None:
        self.params: Params = {
            name: tensor.detach().cpu().double() if tensor.is_floating_point() else tensor.detach().cpu()
            for name, tensor in params.items()
        }
        self.symmetry, self.task = symmetry, task
        self.take(self.params)
        self._index: dict[tuple[str, str, int], Tensor] = {}
        self.tolerance = 0.0
        if task is not None:
            inputs, kwargs = pytree.tree_map_only(Tensor, _detached, arguments(next(iter(task.batches))[0]))
            with InDouble():
                first, self.tolerance = exact_probe(task.module, inputs, kwargs, task.outputs)
                other = Probe(task.module, *_shaken(inputs, kwargs), task.outputs, first_dtype(first))
            self._probes = [first, other]

    def take(self, params: Mapping[str, Tensor]) -> None:
        """Replace all tensors. Tied names share one tensor."""
        self.params = dict(params)
        for names in self.symmetry.tied:
            known = next((name for name in names if name in params), None)
            self.params |= {} if known is None else dict.fromkeys(names, params[known])

    def run(self, params: Mapping[str, Tensor]) -> Outputs:
        """Return the outputs with given parameters, on the first inputs of the task and on random inputs."""
        with InDouble():
            return [output for probe in self._probes for output in probe(_completed(params, probe))]

    def run_smaller(self, module: nn.Module) -> Outputs:
        """Return the outputs of another module with other parameters, on the inputs that `run` uses."""
        assert self.task is not None
        found: Outputs = []
        with InDouble():
            probe = Probe(module, (), {}, self.task.outputs, first_dtype(self._probes[0]))
            for known in self._probes:
                probe.inputs, probe.kwargs = known.inputs, known.kwargs
                found += probe(probe.params)
        return found

    def change(self, reference: Outputs, outputs: Outputs) -> float:
        """Return the largest relative change of an output; infinity if shapes differ or entries are not finite."""
        if [one.shape for one in reference] != [one.shape for one in outputs]:
            return float("inf")
        return relative_change(reference, outputs)

    @cached_property
    def found(self) -> Activations:
        """The activations of the model, and the action of the groups on them."""
        assert self.task is not None
        first = self._probes[0]
        module = copy.deepcopy(self.task.module).to(first_dtype(first)).eval()
        return activations(module, first.inputs, self.symmetry, first.kwargs, outputs=self.task.outputs)

    def values(self, params: Mapping[str, Tensor], names: Iterable[str], which: int = 0) -> dict[str, Tensor]:
        """Return activations on the first inputs of the task (`which=0`) or on random inputs (`which=1`)."""
        probe = self._probes[which]
        return self.found.values(_completed(params, probe), probe.inputs, probe.kwargs, list(names))

    def read(self, inputs: Any, names: Sequence[str]) -> tuple[Activations, dict[str, Tensor]]:
        """Return activations for any inputs of the task, in the precision of the task's module."""
        found, _, args, kwargs = self._traces.prepare(inputs)
        params = {n: t.to(self._traces.dtype) if t.is_floating_point() else t for n, t in self.params.items()}
        return found, found.values(params, args, kwargs, names)

    @cached_property
    def _traces(self) -> Traces:
        assert self.task is not None
        dtype = next((p.dtype for p in self.task.module.parameters() if p.is_floating_point()), torch.float32)
        return Traces(self.symmetry, self.task.module, dtype, self.task.outputs, only_read=False)

    def sites(self, group: str, *, reading: bool) -> list[tuple[str, Site]]:
        """Return the axes of parameters along which layers sum over a group's units (`reading`), or all other axes of
        the group.
        """
        readers, seen, found = {*self.symmetry.readers}, set[int](), []
        for names in self.symmetry.tied:
            readers |= {(name, axis) for known, axis in self.symmetry.readers if known in names for name in names}
        for name, local in self.symmetry.sites.items():
            if name not in self.params or id(self.params[name]) in seen:
                continue
            own = [site for site in local if site.group.name == group]
            if own:
                seen.add(id(self.params[name]))
            found += [(name, site) for site in own if ((name, site.placement.axis) in readers) == reading]
        return found

    def entries(self, name: str, site: Site) -> Int[Tensor, "units values"]:
        """Return the flat indices of each unit's entries in a parameter, for each copy of the group."""
        key = (name, site.group.name, hash(site.placement))
        if key not in self._index:
            self._index[key] = unit_index(self.symmetry, name, site)
        return self._index[key]

    def unit_entries(self, name: str, site: Site, params: Mapping[str, Tensor]) -> Float[Tensor, "units values"]:
        """Return each unit's entries in a parameter, for each copy of the group."""
        return params[name].flatten()[self.entries(name, site)]

    def put(self, changes: Mapping[str, Tensor]) -> None:
        """Replace some tensors under all of their names."""
        for name, tensor in changes.items():
            old = self.params[name]
            for other in [other for other, known in self.params.items() if known is old]:
                self.params[other] = tensor

    def remove(self, group: str, units: Bool[Tensor, " units"]) -> None:
        """Set the weights that read some units to zero. If the reading weights are unknown, set all entries to zero."""
        places = self.sites(group, reading=True) or self.sites(group, reading=False)
        for name, site in places:
            if name not in self.symmetry.buffers:
                flat = self.params[name].flatten().clone()
                flat[self.entries(name, site)[units]] = 0.0
                self.put({name: flat.reshape(self.params[name].shape)})

    def fork(self) -> "Network":
        """Return a copy that can be edited independently."""
        other = copy.copy(self)
        other.params = dict(self.params)
        return other


def first_dtype(probe: Probe) -> torch.dtype:
    """Return the precision in which a model is evaluated."""
    return next((t.dtype for t in probe.params.values() if t.is_floating_point()), torch.float64)


def _completed(params: Mapping[str, Tensor], probe: Probe) -> Params:
    """Return all tensors of a model in the model's precision, where the given tensors replace the model's tensors of
    the same name.
    """
    own = {name: tensor for name, tensor in params.items() if name in probe.params}
    return {**probe.params, **{n: t.to(probe.params[n].dtype) for n, t in own.items()}}


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _shaken(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return other inputs of the same shapes: noise of three times the magnitude, and permuted integers."""
    generator = torch.Generator().manual_seed(0)

    def other(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return tensor
        if tensor.is_floating_point():
            size = 3 * float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0
            return size * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].reshape(tensor.shape)

    changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, other, (inputs, kwargs))
    return changed
