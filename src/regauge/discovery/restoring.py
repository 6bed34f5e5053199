"""Contexts that restore a module after its forward pass has modified it."""

from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

DEPTH = 3
"""The depth to which nested attributes of a module are restored.

Key-value caches are at depth two.
"""
PLAIN = (Tensor, nn.Parameter, nn.Buffer)
Container = MutableMapping[Any, Any] | list[Any] | set[Any] | deque[Any]


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Return a context that restores the attributes, containers, buffers and gradients of a module at its end.

    The entries of parameters are restored only within `parameters_kept`, because a copy of all parameters would double
    the memory.
    """
    before = _Snapshot()
    for part in module.modules():
        before.follow(part, DEPTH)
    for one in before.tensors:
        one.set_grad(None)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def parameters_kept(module: nn.Module) -> Iterator[None]:
    """Return a context that restores the entries of parameters at its end.

    A parameter is copied before the first operator writes to it.
    """
    with _CopyOnWrite(module) as written:
        try:
            yield
        finally:
            written.restore()


@dataclass(frozen=True)
class _TensorState:
    """The state of a tensor: its properties that can change, and its entries if they were copied."""

    tensor: Tensor
    shown: Tensor
    values: Tensor | None
    requires_grad: bool
    grad: Tensor | None

    def set_grad(self, grad: Tensor | None) -> None:
        if self.tensor.is_leaf and self.tensor.grad is not grad:
            self.tensor.grad = grad

    def restore(self) -> None:
        tensor, shown = self.tensor, self.shown
        if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (shown.data_ptr(), shown.shape, shown.stride()):
            tensor.data = shown
        if self.values is not None and not torch.equal(shown, self.values):
            shown.copy_(self.values)
        if tensor.is_leaf and tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        self.set_grad(self.grad)


@dataclass(frozen=True)
class _Snapshot:
    """The containers and tensors among a module's attributes, with their contents."""

    contents: list[tuple[Container, Any]] = field(default_factory=list)
    tensors: list[_TensorState] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def follow(self, value: Any, depth: int) -> None:
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, MutableMapping | list | set | deque):
            self.contents.append((value, dict(value) if isinstance(value, MutableMapping) else list(value)))
            for one in value.values() if isinstance(value, MutableMapping) else value:
                self.follow(one, depth)
        elif isinstance(value, tuple):
            for one in value:
                self.follow(one, depth)
        elif depth > 0 and hasattr(value, "__dict__") and not _is_code(value):
            self.follow(vars(value), depth if isinstance(value, nn.Module) else depth - 1)

    def _keep_tensor(self, value: Tensor) -> None:
        if type(value) not in PLAIN or value.layout != torch.strided or value.is_quantized:
            return
        shown = value.data
        is_copied = not (isinstance(value, nn.Parameter) or value.is_meta)
        grad = value.grad if value.is_leaf else None
        self.tensors.append(_TensorState(value, shown, shown.clone() if is_copied else None, value.requires_grad, grad))

    def restore(self) -> None:
        for container, content in self.contents:
            _refill(container, content)
        for one in self.tensors:
            one.restore()


def _is_code(value: Any) -> bool:
    """Return whether a value has no state, or only state that the whole process shares."""
    if isinstance(value, type | FunctionType | MethodType | ModuleType | torch.Generator):
        return True
    return type(value).__module__.partition(".")[0] in ("logging", "threading", "torch") and not isinstance(
        value, nn.Module
    )


def _refill(container: Container, content: Any) -> None:
    """Restore the earlier entries of a container in their earlier order, unless the container is unchanged."""
    if isinstance(container, MutableMapping):
        now = list(container.items())
        is_same = [(key, id(one)) for key, one in now] == [(key, id(one)) for key, one in content.items()]
    else:
        is_same = list(map(id, container)) == list(map(id, content))
    if is_same:
        return
    container.clear()
    if isinstance(container, MutableMapping | set):
        container.update(content)
    else:
        container.extend(content)


class _CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that copies the memory of a parameter before an operator writes to it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {parameter.untyped_storage()._cdata: parameter for parameter in module.parameters()}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for k, argument in enumerate(func._schema.arguments):
                if argument.is_write:
                    self._keep(args[k] if k < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _keep(self, written: Any) -> None:
        if not isinstance(written, Tensor):
            return
        place = written.untyped_storage()._cdata
        if place in self._own and place not in self._before:
            parameter = self._own[place].data
            self._before[place] = parameter, parameter.clone()

    def restore(self) -> None:
        for parameter, values in self._before.values():
            parameter.copy_(values)
