"""A second device made of CPU memory, which detects tensors of two devices in one operation, even on a machine without
a GPU.

Tensors that are moved to the device carry a mark, and so do all tensors that are computed from them. The device refuses
everything that CUDA refuses: operands on two devices (except scalars and indices into a tensor of the device), numpy
arrays, random numbers from a generator of another device, and matrix products of integers. The device reports one
thread.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from regauge.alignment.engine import searches

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
TO_NUMPY = (Tensor.numpy, Tensor.__array__)
INDEXING = (Tensor.__getitem__, torch.index_put, Tensor.index_put)
PRODUCTS = (Tensor.matmul, Tensor.__matmul__, torch.matmul, torch.mm, torch.bmm, torch.einsum)
WAITING = (
    *(Tensor.item, Tensor.tolist, Tensor.nonzero, torch.nonzero),
    *(Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__),
)
COPYING = (Tensor.copy_, Tensor.cpu, Tensor.to, Tensor.type_as, torch._has_compatible_shallow_copy_type)


class TwoDevicesError(RuntimeError):
    """An error that is raised for operands on two devices."""


class PretendDevice(TorchFunctionMode):
    """A context in which `tensor.to(DEVICE)` marks a copy, and operators refuse to combine marked with unmarked
    tensors.

    `left` contains the numbers of entries of the tensors that were moved back to the CPU. `waits` counts how often the
    CPU waited for values, including values that decide a branch or a shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.left: list[int] = []
        self.waits = 0
        self._one_thread = mock.patch.object(searches, "count_searches", return_value=1)

    def __enter__(self) -> "PretendDevice":
        self._one_thread.start()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._one_thread.stop()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return _unwrapped(tensor) in self._marked

    def adopt(self, module: nn.Module) -> None:
        """Put the parameters and buffers of a module on the device."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._mark(tensor)

    def bring(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors on the device."""
        return {name: self._mark(tensor.clone()) for name, tensor in params.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        operands = [*_tensors_in((args, kwargs))]
        marked = [tensor for tensor in operands if self.holds(tensor)]
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE if marked else func(*args, **kwargs)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return bool(marked)
        if func in TO_NUMPY and marked:
            raise TypeError("can't convert a tensor of the pretended device to numpy; use Tensor.cpu() first")
        if func in PRODUCTS and marked and not any(t.is_floating_point() or t.is_complex() for t in operands):
            raise NotImplementedError("the device has no matrix products of integers")
        target = self._target(func, args, kwargs, operands, is_marked=bool(marked))
        if func in (Tensor.cpu, Tensor.to):
            args = tuple(CPU if _is_device(a) else a for a in args)
            moved = args[0] if func is Tensor.cpu else func(*args, **kwargs)
            if target == self.holds(args[0]):
                return self._mark(moved) if target else moved
            self.left += [] if target else [moved.numel()]
            self.waits += not target
            moved = moved.clone() if moved is args[0] else moved
            return self._mark(moved) if target else moved
        self.waits += bool(marked) and func in WAITING
        self._require_one_device(func, args, operands, marked)
        if "generator" in kwargs and kwargs["generator"] is not None and target:
            raise TwoDevicesError(f"{func} draws on the device with a generator of the CPU")
        result = func(*args, **kwargs)
        if func is torch.autograd.grad:  # Gradients are where their inputs are.
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            for leaf, gradient in zip(tree_leaves(inputs), result, strict=True):
                if self.holds(leaf) and gradient is not None:
                    self._mark(gradient)
        elif func == Tensor.data.__set__ and marked:  # type: ignore[attr-defined]  # How a module is moved.
            self._mark(args[0])
        elif target:
            for leaf in _tensors_in(result):
                self._mark(leaf)
        return result

    def _mark(self, tensor: Tensor) -> Tensor:
        self._marked[_unwrapped(tensor)] = True
        return tensor

    def _target(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], operands: list[Tensor], *, is_marked: bool
    ) -> bool:
        """Return whether the result is on the device. A requested device is replaced by the CPU."""
        if func is Tensor.cpu:
            return False
        if func is Tensor.to:
            devices = [a for a in (*args[1:], *kwargs.values()) if _is_device(a)]
            others = [a for a in args[1:] if isinstance(a, Tensor)]
            if "device" in kwargs and kwargs["device"] is not None:
                kwargs["device"] = CPU
            if devices:
                return torch.device(devices[0]).type == DEVICE.type
            return self.holds(others[0]) if others else self.holds(args[0])
        if kwargs.get("device") is not None:
            asked = torch.device(kwargs["device"])
            kwargs["device"] = CPU if asked.type == DEVICE.type else asked
            return asked.type == DEVICE.type
        if func in INDEXING or func is Tensor.copy_ or getattr(func, "__name__", "").startswith("new_"):
            return self.holds(args[0])
        return is_marked

    def _require_one_device(
        self, func: Callable[..., Any], args: Any, operands: list[Tensor], marked: list[Tensor]
    ) -> None:
        if (
            not marked
            or func is torch.autograd.grad
            or func in COPYING
            or getattr(func, "__name__", "") in ("__get__", "__set__")
        ):
            return
        others = [tensor for tensor in operands if tensor.ndim and not self.holds(tensor)]
        if func in (Tensor.__getitem__, Tensor.__setitem__) and self.holds(args[0]):
            written = tree_leaves(args[2:])
            is_gathered = any(isinstance(leaf, Tensor) for leaf in tree_leaves(args[1]))
            others = [t for t in others if is_gathered and any(t is leaf for leaf in written)]
        if others:
            shapes = [(tuple(t.shape), "device" if self.holds(t) else "CPU") for t in operands]
            raise TwoDevicesError(f"{getattr(func, '__name__', func)} got tensors on two devices: {shapes}")


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries. Torch's own function would take half of the time of
    the tests.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors_in(one)
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"))


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that `torch.func.vmap` and similar functions have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
