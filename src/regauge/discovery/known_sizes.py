"""Export of programs whose tensor sizes depend on integer inputs, such as patch grids and lengths.

`torch.export` does not compute the entries of tensors, and raises an error if Python code converts a tensor to a
number. If a tensor depends only on integer inputs, not on weights or activations, the example inputs determine its
entries. Therefore this module computes all tensors that depend only on integer inputs. If Python code reads a number
from a tensor, it gets an entry of a computed tensor. Computed entries also determine the lengths of index tensors that
depend on the entries of other tensors.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from regauge.discovery.operators import words

TAKING = words("item tolist __int__ __float__ __index__")
"""Functions that read numbers from a tensor.

Functions for branches, such as `__bool__`, are excluded. A program with one chosen branch would be valid only for the
example inputs.
"""
OF_ANY_LENGTH = words("nonzero argwhere unique unique_consecutive repeat_interleave masked_select bincount")
"""Functions whose result has a length that depends on tensor entries."""
MAKING = words("tensor as_tensor arange linspace full zeros ones eye tril_indices triu_indices scalar_tensor")
"""Functions that create tensors from numbers."""
SIZED = words("view reshape expand repeat tile split unflatten narrow roll new_zeros new_ones new_full pad interpolate")
"""Functions whose arguments are sizes and positions, which a model may compute as tensors."""
RANDOM = words("rand randn randint randperm normal bernoulli multinomial dropout rand_like randn_like randint_like")
MANY = 1 << 20
"""The largest tensor, by number of entries, that this module computes."""
MARK = "regauge: sizes are those of the example inputs"


def export_with_values(wrapped: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram | None:
    """Export a module whose tensor sizes depend on integer inputs. The module may be on the meta device.

    Returns:
        The program for the given integers, or None. The result is None if sizes depend on weights or activations, if
        Python code branches on a tensor, or if inputs are on the meta device.
    """
    given = [one for one in pytree.tree_leaves((inputs, kwargs)) if isinstance(one, Tensor)]
    if any(one.is_meta for one in given):
        return None
    held = {name: one for name, one in wrapped.named_buffers() if not one.is_meta}
    forward = wrapped.forward

    @functools.wraps(forward)
    def known(*args: Any, **kwargs: Any) -> Any:
        numbers = _Numbers()
        traced = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        numbers.know(zip(traced, given, strict=True))
        numbers.know((one, held[name]) for name, one in wrapped.named_buffers() if name in held)
        with numbers:
            return forward(*args, **kwargs)

    try:
        with torch.no_grad(), without_memory(wrapped), patch.object(wrapped, "forward", known):
            program = torch.export.export(wrapped, inputs, kwargs, strict=False)
    except Exception:  # torch.export raises many unrelated classes; the caller raises the earlier error.
        return None
    program.graph_module.meta[MARK] = True
    return program


def has_unknown_sizes(program: ExportedProgram) -> bool:
    """Return whether a program contains a tensor whose size depends on the entries of other tensors."""
    found = (one for node in program.graph.nodes for one in pytree.tree_leaves(node.meta.get("val")))
    return any(not isinstance(size, int) for one in found for size in getattr(one, "shape", ()))


def has_known_sizes(program: ExportedProgram) -> bool:
    """Return whether a program is valid only for the integers in the example inputs."""
    return MARK in program.graph_module.meta


class _Numbers(TorchFunctionMode):
    """A mode that computes, during a trace, the entries of tensors that depend only on integers."""

    def __init__(self) -> None:
        super().__init__()
        self.values: Any = WeakTensorKeyDictionary()

    def know(self, pairs: Any) -> None:
        """Record the entries of tensors that contain integers."""
        with _disable_current_modes():
            for traced, value in pairs:
                if not value.is_floating_point() and not value.is_complex():
                    self.values[traced] = value.clone()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), pytree.tree_map_only(slice, self._sliced, (args, kwargs or {}))
        tensors = [one for one in pytree.tree_leaves(given) if isinstance(one, Tensor)]
        is_known = all(map(self._is_known, tensors)) and name not in RANDOM
        writes = name in ("__setitem__", "set_") or (name.endswith("_") and not name.endswith("__"))
        if not is_known or not (tensors or name in MAKING) or name.startswith(("__get__", "__set__")):
            if writes and tensors:
                self._forget(tensors[0])
            if name in SIZED:
                given = pytree.tree_map_only(Tensor, self._number, given)
            elif name in ("__getitem__", "__setitem__"):
                given = (given[0][0], self._places(given[0][1]), *given[0][2:]), given[1]
            return func(*given[0], **given[1])
        with _disable_current_modes():
            args, kwargs = pytree.tree_map_only(Tensor, self._value, given)
            value = func(*args, **kwargs)
        if name in TAKING:
            return value
        if (name in OF_ANY_LENGTH | MAKING and tensors) or self._has_mask(name, given):
            result = pytree.tree_map_only(Tensor, torch.clone, value)  # A constant of the program.
        else:
            result = func(*given[0], **given[1])
        self._pair(result, value)
        return result

    def _sliced(self, one: slice) -> slice:
        """Return a slice in which numbers replace tensors with known entries."""
        ends = (one.start, one.stop, one.step)
        return slice(*(self._number(end) if isinstance(end, Tensor) else end for end in ends))

    def _number(self, tensor: Tensor) -> Any:
        """Return the number in a tensor without axes, if it is known. Other tensors are returned unchanged."""
        return int(self._value(tensor)) if not tensor.ndim and self._is_known(tensor) else tensor

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor in self.values or (type(tensor) is Tensor and not tensor.is_meta)

    def _value(self, tensor: Tensor) -> Tensor:
        value: Tensor = self.values.get(tensor, tensor)
        return value

    def _places(self, index: Any) -> Any:
        """Return an index in which a mask with known entries is replaced by the positions that it selects."""
        found: list[Any] = []
        for one in index if isinstance(index, tuple) else (index,):
            if isinstance(one, Tensor) and one.dtype == torch.bool and one.ndim and self._is_known(one):
                with _disable_current_modes():
                    places = self._value(one).nonzero(as_tuple=True)
                found += map(torch.clone, places)
            else:
                found.append(one)
        return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]

    def _has_mask(self, name: str, given: Any) -> bool:
        """Return whether a function indexes a tensor with a mask."""
        index = pytree.tree_leaves(given[0][1:])
        return name == "__getitem__" and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in index)

    def _forget(self, tensor: Tensor) -> None:
        """Forget the entries of a tensor after an unknown value is written to it. Also forget the entries of all
        tensors that share its memory.
        """
        if tensor in self.values:
            place = self.values[tensor].untyped_storage().data_ptr()
            for one, value in list(self.values.items()):
                if value.untyped_storage().data_ptr() == place:
                    del self.values[one]

    def _pair(self, result: Any, value: Any) -> None:
        """Record the entries of all tensors that a function returned."""
        for one, number in zip(pytree.tree_leaves(result), pytree.tree_leaves(value), strict=True):
            if isinstance(one, Tensor) and one is not number and number.numel() <= MANY:
                self.values[one] = number


@contextmanager
def without_memory(module: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """Return a context in which zeros on the CPU, which take no memory, replace a module's meta tensors."""
    made: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for part in module.modules():
            for own in (part._parameters, part._buffers):
                blank = {name: one for name, one in own.items() if one is not None and one.is_meta}
                for one in blank.values():
                    zeros = torch.zeros((), dtype=one.dtype).expand(one.shape)
                    is_trained = isinstance(one, nn.Parameter)
                    made.setdefault(id(one), nn.Parameter(zeros, requires_grad=False) if is_trained else zeros)
                stack.enter_context(patch.dict(own, {name: made[id(one)] for name, one in blank.items()}))
        yield tuple(made.values())
