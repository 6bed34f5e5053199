"""The published maps from one tensor of a chain to another."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from regauge.weightspace.layers.reading import Pools
from regauge_papers.chains.config import ChainConfig

BIAS = 1e-4
"""The bound of initial biases, which are uniformly random between minus and plus this number."""


class Map(nn.Module):
    """A map between two tensors: a set layer over the hidden units of both tensors, or a linear map if the tensors have
    no hidden units in common.

    The arguments call a layer of units a place, and a layer of permuted units a set. Axes of layers without
    permutations, such as inputs and outputs, count as features of both tensors. Layers of units that only the source
    has are pooled. The result is constant along layers of units that only the target has. If a tensor with two sets is
    mapped to itself, the result is the mean of four linear maps. The four maps read the tensor, the tensor pooled over
    each of its two axes, and the tensor pooled over both axes.

    Args:
        source: The places of the tensor that is read.
        target: The places of the tensor that is written.
        sets: The places whose units are permuted.
        sizes: The number of units at each place.
    """

    def __init__(
        self,
        source: tuple[int, ...],
        target: tuple[int, ...],
        sets: frozenset[int],
        sizes: tuple[int, ...],
        widths: tuple[int, int],
        heads: int,
        config: ChainConfig,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.source, self.target = source, target
        self.shared = tuple(place for place in source if place in target and place in sets)
        self.fixed = tuple(place for place in target if place not in sets)
        self.folded = tuple(place for place in source if place not in sets)
        self.sizes, self.outputs = tuple(sizes[place] for place in self.fixed), widths[1]
        inputs = math.prod(sizes[place] for place in self.folded) * widths[0]
        outputs = math.prod(self.sizes) * widths[1]
        self.maps = nn.ModuleList()
        if len(self.shared) == 2:
            self.maps.extend(linear(inputs, outputs, generator) for _ in range(4))
        elif not self.shared:
            self.maps.append(linear(inputs, outputs, generator))
        elif config.sets == "attention":
            self.maps.append(SetAttention(inputs, outputs, heads, generator))
        else:
            self.maps.append(SetMean(inputs, outputs, config.pooling, generator))

    def forward(self, pools: Pools) -> Tensor:
        """Return `[models, *places of the target, features]`, with length one along places with a constant result."""
        if len(self.shared) == 2:
            whole, first, second, both = (
                dense(pools.over(kept)) for dense, kept in zip(self.maps, ((0, 1), (1,), (0,), ()), strict=True)
            )
            mixed: Tensor = (whole + (first.unsqueeze(1) + second.unsqueeze(2) + both[:, None, None])) / 4
            return mixed
        kept = [axis for axis, place in enumerate(self.source) if place in (*self.shared, *self.folded)]
        x = pools.over(tuple(kept))
        places = [self.source[axis] for axis in kept]
        order = [places.index(place) for place in (*self.shared, *self.folded)]
        x = x.permute(0, *(1 + axis for axis in order), x.ndim - 1).flatten(1 + len(self.shared))
        made: Tensor = self.maps[0](x)
        made = made.reshape(*made.shape[:-1], *self.sizes, self.outputs)
        known = [*self.shared, *self.fixed]
        made = made.permute(0, *(1 + known.index(place) for place in self.target if place in known), made.ndim - 1)
        for axis, place in enumerate(self.target):
            if place not in known:
                made = made.unsqueeze(1 + axis)
        return made


class SetAttention(nn.Module):
    """A block of a set transformer: `y + relu(O y)` with `y = Q x + softmax(Q x (K x)' / sqrt(outputs)) V x` by heads.

    References:
        Lee et al. (2019), equations 6 to 8, without normalization.
    """

    def __init__(self, inputs: int, outputs: int, heads: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (linear(inputs, outputs, generator) for _ in range(3))
        self.out = linear(outputs, outputs, generator)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            dense(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for dense in (self.query, self.key, self.value)
        )
        scale = 1 / math.sqrt(self.heads * query.shape[-1])
        heard = nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
        y: Tensor = (query + heard).transpose(1, 2).flatten(2)
        return y + nn.functional.relu(self.out(y))


class SetMean(nn.Module):
    """The map `A x - B pool(x)`."""

    def __init__(self, inputs: int, outputs: int, pooling: str, generator: torch.Generator | None) -> None:
        super().__init__()
        self.pooling = pooling
        self.own = linear(inputs, outputs, generator)
        self.pooled = linear(inputs, outputs, generator, is_biased=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.amax(1, keepdim=True) if self.pooling == "max" else x.mean(1, keepdim=True)
        result: Tensor = self.own(x) - self.pooled(pooled)
        return result


class Resize(nn.Module):
    """A change of the length of the input axis of the first weight, equal for all features: `A x - B y`.

    Here `y` is the average of `x` over the units of the first hidden layer, with weights `softmax(q . x)`.
    """

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.own = plain(inputs, outputs, generator)
        self.pooled = plain(inputs, outputs, generator, is_biased=False)
        self.query = nn.Parameter(torch.ones(inputs))

    def forward(self, x: Tensor) -> Tensor:
        models, inputs, units, width = x.shape
        flat = x.reshape(models, inputs, units * width)
        share = (self.query @ flat).reshape(models, 1, units, width).softmax(2)
        pooled = (x * share).sum(2)
        own = (self.own.weight @ flat).reshape(models, -1, units, width) + self.own.bias[:, None, None]
        return own - (self.pooled.weight @ pooled).unsqueeze(2)


def linear(inputs: int, outputs: int, generator: torch.Generator | None, *, is_biased: bool = True) -> nn.Linear:
    """Return a linear map with the initial entries of the published code."""
    dense = nn.Linear(inputs, outputs, bias=is_biased, device="meta").to_empty(device="cpu")
    deviation = math.sqrt(2 / (inputs + outputs)) * math.sqrt(2 * inputs / outputs)
    nn.init.normal_(dense.weight, std=deviation, generator=generator)
    if is_biased:
        nn.init.uniform_(dense.bias, -BIAS, BIAS, generator=generator)
    return dense


def plain(inputs: int, outputs: int, generator: torch.Generator | None, *, is_biased: bool = True) -> nn.Linear:
    """Return a linear map with the initial entries of torch, which the published code uses for its last maps."""
    dense = nn.Linear(inputs, outputs, bias=is_biased, device="meta").to_empty(device="cpu")
    bound = 1 / math.sqrt(inputs)
    for parameter in dense.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return dense


def pooled(x: Tensor, axes: Iterable[int], config: ChainConfig) -> Tensor:
    """Return the maximum or mean of features over some axes."""
    return x.amax(tuple(axes)) if config.pooling == "max" else x.mean(tuple(axes))
