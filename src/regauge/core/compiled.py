"""Elements without matrices as one gather: for moving many small networks, many times."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core.element import Element
from regauge.core.params import Params


@dataclass(frozen=True)
class CompiledElement:
    """An element of permutations, signs, scales and shifts, as one index and one factor for all parameters.

    `compiled(params)` equals `symmetry.act(element, params)`: all tensors that the element moves are laid end to end, N
    values for each network, gathered once, multiplied and shifted once.

    Attributes:
        names: Parameters that it moves, in order.
        shapes: Their shapes without a model axis.
        index: Where each value comes from, int64 `[*batch, N]`.
        factor: What it is multiplied by, float64 `[*batch, N]`.
        shift: What is added, float64 `[*batch, N]`; None where the element shifts nothing.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    index: Tensor
    factor: Tensor
    shift: Tensor | None

    def __call__(self, params: Mapping[str, Tensor]) -> Params:
        """New parameters; a leading model axis goes with a batched element, or shares a single one.

        Raises:
            ValueError: The parameters have different dtypes or devices.
        """
        tensors = [params[name] for name in self.names]
        if len({(t.dtype, t.device) for t in tensors}) > 1:
            raise ValueError(
                "a compiled element needs all parameters that it moves in one dtype and on one device; "
                "convert them, or use `symmetry.act`"
            )
        lead = tensors[0].ndim - len(self.shapes[0])
        flat = torch.cat([t.reshape(*t.shape[:lead], -1) for t in tensors], dim=-1)
        index = self.index.to(flat.device)
        shape = torch.Size((*self.index.shape[:-1], flat.shape[-1])) if lead < index.ndim - 1 else flat.shape
        moved = flat.expand(shape).gather(-1, index.expand(shape))
        moved = (moved * self.factor.to(device=flat.device, dtype=flat.dtype)).to(flat.dtype)
        if self.shift is not None:
            moved = moved + self.shift.to(device=flat.device, dtype=flat.dtype)
        result = dict(params)
        start = 0
        for name, size in zip(self.names, self.shapes, strict=True):
            length = torch.Size(size).numel()
            result[name] = moved[..., start : start + length].reshape(*moved.shape[:-1], *size)
            start += length
        return result


def compile_element(
    act: Callable[[Element, Mapping[str, Tensor]], Params],
    orders: Element,
    element: Element,
    shapes: Mapping[str, tuple[int, ...]],
) -> CompiledElement:
    """Read the index, the factor and the shift off what the action does to positions, ones and zeros.

    Args:
        act: The action.
        orders: The element reduced to its permutations.
        element: The element.
        shapes: Shapes of the parameters that it moves.
    """
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    positions = act(orders, _split(torch.arange(total, dtype=torch.float64), shapes))
    shift = _joined(act(element, _split(torch.zeros(total, dtype=torch.float64), shapes)), shapes)
    ones = _joined(act(element, _split(torch.ones(total, dtype=torch.float64), shapes)), shapes)
    return CompiledElement(
        tuple(shapes),
        tuple(shapes.values()),
        _joined(positions, shapes).round().to(torch.int64),
        ones - shift,
        shift if bool((shift != 0).any()) else None,
    )


def _split(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Params:
    result, start = {}, 0
    for name, shape in shapes.items():
        length = torch.Size(shape).numel()
        result[name] = flat[start : start + length].reshape(shape)
        start += length
    return result


def _joined(params: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    rows = [params[name].reshape(*params[name].shape[: params[name].ndim - len(s)], -1) for name, s in shapes.items()]
    lead = max((row.shape[:-1] for row in rows), key=len)
    return torch.cat([row.expand(*lead, row.shape[-1]) for row in rows], dim=-1)
