"""Elements without matrices, compiled to one gather.

Compiling is worthwhile if many small networks are transformed many times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core.act import ReadValues, Site, broadcastable, flat_index, moves_of
from regauge.core.element import Element
from regauge.core.groups import axes_of
from regauge.core.params import VALUES, Params


@dataclass(frozen=True)
class CompiledElement:
    """An element of permutations, signs, scales and shifts, stored as one index and one factor for all parameters.

    `compiled(params)` equals `symmetry.act(element, params)`. The tensors on which the element acts are concatenated to
    N entries for each network. The entries are gathered once by `index`, multiplied by `factor`, and shifted. The
    index, the factor and the shift have shape `[*batch, N]`.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    index: Tensor
    factor: Tensor
    shift: Tensor | None

    def __call__(self, params: Mapping[str, Tensor]) -> Params:
        """Return the parameters after the element has acted.

        Each element of a batch acts on one network along the leading model axis of the parameters. A single element
        acts on all networks of a population.
        """
        tensors = [params[name] for name in self.names]
        if len({(t.dtype, t.device) for t in tensors}) > 1:
            raise ValueError(
                "a compiled element needs all parameters that it changes in one dtype and on one device; convert them, "
                "or use `symmetry.act`"
            )
        if tensors[0].dtype not in VALUES:
            raise ValueError(
                f"{self.names[0]!r} is {tensors[0].dtype}, but only values in float16, bfloat16, float32 or float64 "
                "can be moved by a compiled element; dequantize the network first"
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
            result[name] = moved[..., start : start + length].reshape((*moved.shape[:-1], *size))
            start += length
        return result


def compile_element(
    sites: Mapping[str, list[Site]], element: Element, shapes: Mapping[str, tuple[int, ...]]
) -> CompiledElement:
    """Compile an element without matrices, for parameters of the given shapes."""
    sizes = [math.prod(shapes[name]) for name in sites]
    lead = (*element.batch, sum(sizes))
    index, factor, shift = torch.empty(lead, dtype=torch.int64), torch.ones(lead, dtype=torch.float64), None
    start, read = 0, ReadValues(element)
    for (name, local), size in zip(sites.items(), sizes, strict=True):
        shape = axes_of(shapes[name])
        moves = moves_of(local, read, shape, torch.float64)

        def part(values: Tensor, start: int = start, shape: tuple[int, ...] = shape) -> Tensor:
            return values[..., start : start + math.prod(shape)].view(*element.batch, *shape)

        part(index).copy_(flat_index(moves.displacements, shape, len(element.batch)) + start)
        for axes, values in moves.factors.items():
            part(factor).mul_(broadcastable(values, axes, len(element.batch), len(element.batch), len(shape)))
        for axes, values in moves.shifts.items():
            shift = torch.zeros_like(factor) if shift is None else shift
            part(shift).add_(broadcastable(values, axes, len(element.batch), len(element.batch), len(shape)))
        start += size
    return CompiledElement(tuple(sites), tuple(shapes[name] for name in sites), index, factor, shift)
