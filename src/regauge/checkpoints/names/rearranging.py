"""Tracking of tensor entries through code that only rearranges entries, on tensors without data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from regauge.checkpoints.names.boxes import Boxes, concatenate, permute, select, whole
from regauge.checkpoints.names.conversion import Blank

aten = torch.ops.aten


class RearrangementError(ValueError):
    """An error about an operator that does more than rearrange entries."""


class Rearranging(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that tracks operators on tensors from `blank`. `boxes` returns the source of each entry of a result.

    A RearrangementError is raised if an operator computes new values from tracked tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._boxes = WeakTensorKeyDictionary()

    def blank(self, name: str, blank: Blank) -> Tensor:
        """Return an uninitialized tensor that represents the tensor of a given name."""
        tensor = torch.empty(blank.shape, dtype=blank.dtype, device="meta")
        self._boxes[tensor] = whole(name, blank.numel)
        return tensor

    def boxes(self, tensor: Tensor) -> Boxes:
        """Return the boxes that describe the sources of a result's entries."""
        if tensor not in self._boxes:
            raise RearrangementError("it does not come from the tensors of the files")
        found: Boxes = self._boxes[tensor]
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flat = [t for arg in args for t in (arg if isinstance(arg, list | tuple) else (arg,))]
        followed = [t for t in flat if isinstance(t, Tensor) and t in self._boxes]
        if not followed:
            return result
        rule = RULES.get(func.overloadpacket)
        if rule is None or len(followed) < sum(isinstance(t, Tensor) for t in flat):
            raise RearrangementError(f"it is computed by {func.overloadpacket}, which does not only rearrange entries")
        results = list(result) if isinstance(result, list | tuple) else [result]
        for tensor, boxes in zip(results, rule(self, results, *args, **(kwargs or {})), strict=True):
            self._boxes[tensor] = boxes
        return result


Rule = Callable[..., list[Boxes]]


def _reshape(mode: Rearranging, results: Sequence[Tensor], x: Tensor, *_: Any, **__: Any) -> list[Boxes]:
    if results[0].numel() != x.numel():
        raise RearrangementError("entries are repeated or left out by a view")
    return [mode.boxes(x)]


def _permute(mode: Rearranging, results: Sequence[Tensor], x: Tensor, order: Sequence[int]) -> list[Boxes]:
    return [permute(mode.boxes(x), x.shape, [axis % x.ndim for axis in order])]


def _transpose(mode: Rearranging, results: Sequence[Tensor], x: Tensor, one: int, other: int) -> list[Boxes]:
    order = list(range(x.ndim))
    order[one], order[other] = order[other], order[one]
    return _permute(mode, results, x, order)


def _matrix_transpose(mode: Rearranging, results: Sequence[Tensor], x: Tensor) -> list[Boxes]:
    return _transpose(mode, results, x, 0, 1) if x.ndim == 2 else [mode.boxes(x)]


def _slice(
    mode: Rearranging,
    results: Sequence[Tensor],
    x: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> list[Boxes]:
    if step != 1:
        raise RearrangementError("it is sliced with steps, which is not supported")
    first = range(x.shape[dim])[start:end].start
    return [select(mode.boxes(x), x.shape, dim % x.ndim, first, first + results[0].shape[dim])]


def _one(mode: Rearranging, results: Sequence[Tensor], x: Tensor, dim: int, index: int) -> list[Boxes]:
    index %= x.shape[dim]
    return [select(mode.boxes(x), x.shape, dim % x.ndim, index, index + 1)]


def _split(mode: Rearranging, results: Sequence[Tensor], x: Tensor, *rest: Any, **named: Any) -> list[Boxes]:
    dim = (rest[1] if len(rest) > 1 else named.get("dim", 0)) % x.ndim
    boxes, first = [], 0
    for part in results:
        boxes.append(select(mode.boxes(x), x.shape, dim, first, first + part.shape[dim]))
        first += part.shape[dim]
    return boxes


def _unbind(mode: Rearranging, results: Sequence[Tensor], x: Tensor, dim: int = 0) -> list[Boxes]:
    return [select(mode.boxes(x), x.shape, dim % x.ndim, k, k + 1) for k in range(len(results))]


def _cat(mode: Rearranging, results: Sequence[Tensor], parts: Sequence[Tensor], dim: int = 0) -> list[Boxes]:
    return [concatenate([(mode.boxes(part), part.shape) for part in parts], dim % parts[0].ndim)]


def _stack(mode: Rearranging, results: Sequence[Tensor], parts: Sequence[Tensor], dim: int = 0) -> list[Boxes]:
    dim %= parts[0].ndim + 1
    shape = (*parts[0].shape[:dim], 1, *parts[0].shape[dim:])
    return [concatenate([(mode.boxes(part), shape) for part in parts], dim)]


RULES: Mapping[Any, Rule] = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.unsqueeze), _reshape),
    **dict.fromkeys((aten.squeeze, aten.clone, aten.detach, aten.alias, aten._to_copy, aten.contiguous), _reshape),
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.t: _matrix_transpose,
    aten.slice: _slice,
    aten.select: _one,
    aten.split: _split,
    aten.split_with_sizes: _split,
    aten.unbind: _unbind,
    aten.cat: _cat,
    aten.stack: _stack,
}
"""A rule for each operator: the boxes of its result."""
