"""Preparation of features for an exchange between tensors: normalization, activation, and pooling over some axes."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regauge.weightspace.layers.dense import Norm
from regauge.weightspace.layers.hubs import POOLED, Hub, HubLink
from regauge.weightspace.layout.blocks import Grid
from regauge.weightspace.shares import Shares, average

Pooling = Literal["mean", "max"]
LAYER_VALUES_AT_ONCE = 1 << 17
"""The number of values that are processed at once. The number is chosen such that the values fit in a cache of the
processor."""


def activate(x: Tensor, norm: Norm) -> Tensor:
    """Return `silu(norm(x))`, and save only `x` for the backward pass."""
    active: Tensor = _Activated.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    return active


def map_and_pool(
    x: Tensor, norm: Norm, weight: Tensor, kept: Iterable[tuple[int, ...]], pooling: Pooling
) -> tuple[Tensor, dict[tuple[int, ...], Tensor]]:
    """Return `x + silu(norm(x)) weight'`, and `silu(norm(x))` pooled over some axes.

    Args:
        x: The features, `[models, *sizes, width]`.
        norm: The norm before the activation.
        weight: The weight of the linear map.
        kept: For each pooled result, the axes that are kept.
        pooling: The kind of pooling.

    Returns:
        The mapped features, and for each set of kept axes the pooled result.
    """
    whole = tuple(range(x.ndim - 2))
    sizes = {axes: math.prod(x.shape[1 + axis] for axis in axes) for axes in {whole, *kept}}
    sources: dict[tuple[int, ...], tuple[int, ...]] = {}
    for axes in sorted({*sizes} - {whole}, key=lambda axes: (-sizes[axes], axes)):
        sources[axes] = min((one for one in (whole, *sources) if {*axes} <= {*one}), key=sizes.__getitem__)
    direct = [axes for axes, source in sources.items() if source == whole]
    away = [_away(whole, axes) for axes in direct]
    mapped, *pooled = _Mapped.apply(x, norm.weight, norm.bias, weight, norm.eps, pooling, away)  # type: ignore[no-untyped-call]
    return mapped, dict(zip(direct, pooled, strict=True))


class _Activated(torch.autograd.Function):
    """The function `silu(norm(x))`, which saves only `x` and recomputes intermediate results for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        return nn.functional.silu(nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps), inplace=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        shape = list(x.shape[-1:])
        normed, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, ctx.eps)
        grad = torch.ops.aten.silu_backward(grads[0], normed)
        found = torch.ops.aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, [True, True, True])
        return (*found, None)


class _Mapped(torch.autograd.Function):
    """The functions `x + silu(norm(x)) weight'` and pooled `silu(norm(x))`, which save only `x`.

    Intermediate results are computed for some networks at a time, such that they fit in a cache of the processor. For
    the gradient, intermediate results are computed again instead of stored.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        weight: Tensor,
        eps: float,
        pooling: Pooling,
        away: Sequence[Sequence[int]],
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        shapes = [[n for k, n in enumerate(x.shape) if k not in axes] for axes in away]
        mapped, pooled = x.new_empty(x.shape), [x.new_empty(shape) for shape in shapes]
        moments = list[tuple[Tensor, Tensor]]()
        for own, out, *into in _portions(x, mapped, *pooled):
            active, *found = torch.native_layer_norm(own, own.shape[-1:], scale, shift, eps)
            moments.append((found[0], found[1]))
            nn.functional.silu(active, inplace=True)
            torch.addmm(_rows(own), _rows(active), weight.t(), out=_rows(out))
            for axes, one in zip(away, into, strict=True):
                if pooling == "mean":
                    torch.mean(active, list(axes), out=one)
                else:
                    torch.amax(active, list(axes), out=one)
        mean, rstd = map(torch.cat, zip(*moments, strict=True))
        ctx.save_for_backward(x, scale, shift, weight, mean, rstd)
        ctx.pooling, ctx.away = pooling, away
        return mapped, *pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, weight, mean, rstd = ctx.saved_tensors
        into = torch.empty_like(x)
        by_scale, by_shift, by_weight = map(torch.zeros_like, (scale, shift, weight))
        for own, mu, factor, out, given, *pooled in _portions(x, mean, rstd, into, *grads):
            normed = torch.sub(own, mu).mul_(factor)
            torch.addcmul(shift, normed, scale, out=normed)
            sigmoid = torch.sigmoid(normed)
            active = normed.mul_(sigmoid)
            rows = _rows(given)
            by_weight.addmm_(rows.t(), _rows(active))
            grad = (rows @ weight).view(active.shape)
            for axes, one in zip(ctx.away, pooled, strict=True):
                _spread(one, axes, active, ctx.pooling, grad)
            # The derivative of x s(x) is s + x s (1 - s).
            grad.mul_(torch.addcmul(active, active, sigmoid, value=-1, out=active).add_(sigmoid))
            found, *others = torch.ops.aten.native_layer_norm_backward(
                grad, own, own.shape[-1:], mu, factor, scale, shift, [True, True, True]
            )
            torch.add(found, given, out=out)
            by_scale += others[0]
            by_shift += others[1]
        return into, by_scale, by_shift, by_weight, None, None, None


def _spread(one: Tensor, axes: Sequence[int], active: Tensor, pooling: Pooling, grad: Tensor) -> None:
    """Add the gradient of the pooled results to `grad`, the gradient of the features."""
    if pooling == "mean":
        one = one / math.prod(active.shape[axis] for axis in axes)
    for axis in axes:
        one = one.unsqueeze(axis)
    if pooling == "mean":
        grad += one
        return
    largest = active.amax(list(axes), keepdim=True)
    are_largest = torch.eq(active, largest, out=torch.empty_like(active))
    grad.addcmul_(are_largest, one / are_largest.sum(list(axes), keepdim=True))


def _portions(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split several tensors along their first axis into chunks that fit the cache, at the same indices."""
    step = max(1, LAYER_VALUES_AT_ONCE // max(1, tensors[0][:1].numel()))
    return zip(*(torch.split(tensor, step) for tensor in tensors), strict=True)


def _rows(x: Tensor) -> Tensor:
    """Return features as a matrix `[vectors, width]`, with one row for each vector."""
    return x.reshape(-1, x.shape[-1])


class _Largest(torch.autograd.Function):
    """The maximum along an axis. If several entries equal the maximum, the gradient is divided among them.

    `x.max(axis)` takes several times as long as `x.amax(axis)`, because it also computes indices.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> Tensor:
        largest = x.amax(axis, keepdim=True)
        ctx.save_for_backward(x, largest)
        ctx.axis = axis
        return largest.squeeze(axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, largest = ctx.saved_tensors
        are_largest = torch.eq(x, largest, out=torch.empty_like(x))
        return are_largest.mul_(grads[0].unsqueeze(ctx.axis) / are_largest.sum(ctx.axis, keepdim=True)), None


class Pools:
    """Features, pooled over some of their axes on request. Each pooled result is computed once, from the smallest
    earlier result that contains its axes.

    Args:
        known: Pooled features, by the axes that were kept.
    """

    def __init__(
        self,
        known: Mapping[tuple[int, ...], Tensor],
        pooling: Pooling,
        grid: Grid | None = None,
        shares: Shares | None = None,
    ) -> None:
        self.known, self.pooling, self.grid, self.shares = dict(known), pooling, grid, shares or {}

    @classmethod
    def of(cls, x: Tensor, pooling: Pooling, grid: Grid | None = None, shares: Shares | None = None) -> "Pools":
        """Return the pools of features, beginning with the features themselves, `[models, *sizes, width]`."""
        return cls({tuple(range(x.ndim - 2)): x}, pooling, grid, shares)

    def read(self, link: HubLink, hub: Hub) -> Tensor:
        """Return pooled features, arranged at the axes of a hub (common units of tensors): `[models, *sizes of the hub,
        width]`.
        """
        kept = tuple(axis for axis, place in enumerate(link.axes) if place != POOLED)
        x = self.over(kept)
        places = [link.axes[axis] for axis in kept]
        if places == list(range(len(hub.grid.sizes))):
            return x
        last = len(hub.grid.sizes) + 1
        return torch.einsum(x, [0, *(1 + place for place in places), last], [*range(last + 1)])

    def over(self, kept: tuple[int, ...]) -> Tensor:
        """Return the features pooled over all axes except `kept`; the order of the axes in `kept` does not change."""
        if kept not in self.known:
            source = min((axes for axes in self.known if {*kept} <= {*axes}), key=lambda axes: self.known[axes].numel())
            away, x = _away(source, kept), self.known[source]
            if self.pooling == "mean" and self.grid is not None and self.shares:
                x = average(x, away, self.grid.keep(source), self.shares)
            elif self.pooling == "mean":
                # The gradient of a sum takes no memory of its own.
                x = x.sum(away) / math.prod(x.shape[axis] for axis in away)
            else:
                for axis in reversed(away):
                    x = _Largest.apply(x, axis)  # type: ignore[no-untyped-call]
            self.known[kept] = x
        return self.known[kept]


def _away(source: tuple[int, ...], kept: tuple[int, ...]) -> list[int]:
    """Return the axes that disappear if features with the axes `source` are pooled to the axes `kept`, counted with the
    model axis.
    """
    return [1 + k for k, axis in enumerate(source) if axis not in kept]
