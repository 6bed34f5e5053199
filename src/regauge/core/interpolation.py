"""Interpolation, means and distances of networks, and shares of one network that another network explains.

Half precision is computed in float32 and rounded once. Tensors without floating-point values (positions, masks) must be
equal in all networks. Counters are taken from the first network.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.core.families import average, dot
from regauge.core.params import VALUES, Params, require_same_names, require_shared
from regauge.core.symmetry import Symmetry

CONSTANT_TENSOR = 1e-10
"""Below this share of its squares nothing in a tensor tells units apart."""


def interpolate(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float | Tensor = 0.5) -> Params:
    """Return `(1 - t) a + t b`, with exactly a and b at the ends.

    At t = 1, integer buffers are taken from the second network. For populations, t may be a tensor `[models]`.
    """
    return combine((params_a, params_b), (1 - t, t))


def combine(networks: Sequence[Mapping[str, Tensor]], weights: Sequence[float | Tensor]) -> Params:
    """Return `sum_k weights[k] networks[k]`, with exactly network k if its weight is one and all other weights are
    zero.

    A ValueError names parameters that only one network has, or a tensor without floating-point values that differs.
    """
    used = [(network, w) for network, w in zip(networks, weights, strict=True) if isinstance(w, Tensor) or w != 0]
    if len(used) == 1 and not isinstance(used[0][1], Tensor) and used[0][1] == 1:
        return dict(used[0][0])
    for network, _ in used:
        if not networks[0].keys() <= network.keys():
            require_same_names(networks[0], network)
    lead = max((weight.ndim for _, weight in used if isinstance(weight, Tensor)), default=0)
    result = {}
    for name, first in networks[0].items():
        if first.dtype not in VALUES:
            require_shared(name, [first, *(network[name] for network, _ in used)], lead=lead)
            result[name] = first
            continue
        total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
        for network, weight in used:
            if isinstance(weight, Tensor):
                weight = weight.reshape(*weight.shape, *[1] * (first.ndim - weight.ndim)).to(total)
            total = total + weight * network[name].to(total)
        result[name] = total.to(first.dtype)
    return result


def mean(networks: Sequence[Mapping[str, Tensor]], shares: Sequence[float] | None = None) -> Params:
    """Return the mean of networks with these shares, which are equal by default. The mean shares no memory with the
    networks.
    """
    result = combine(networks, shares_of(None, len(networks)) if shares is None else shares)
    return {name: t.clone() if any(t is n[name] for n in networks) else t for name, t in result.items()}


def shares_of(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Return the weights of `count` networks as shares that sum to one; equal by default.

    A ValueError is raised if the number of weights is wrong, or if weights are negative, not finite, or all zero.
    """
    given = [1.0] * count if weights is None else [float(w) for w in weights]
    if len(given) != count or any(not 0 <= w < math.inf for w in given) or sum(given) <= 0:
        raise ValueError(
            f"weights are {given} for {count} networks; give one finite weight for each, none negative and not all zero"
        )
    return tuple(w / sum(given) for w in given)


def distance(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], buffers: Collection[str] = ()) -> float:
    """Return the Euclidean distance of two networks, computed in float64.

    Args:
        params_a: The first network; its floating-point tensors are compared.
        params_b: The second network.
        buffers: Names of tensors that are left out. `regauge align`, `regauge merge` and model cards leave out
            `symmetry.buffers`, because the values of running statistics would hide the distance of the weights.
    """
    squares = 0.0
    for name, tensor in params_a.items():
        if tensor.is_floating_point() and name not in buffers:
            difference = tensor.to(torch.float64, copy=True)
            difference -= params_b[name].to(difference)
            squares += float(difference.square_().sum())
    return math.sqrt(squares)


@dataclass(frozen=True)
class ExplainedTensor:
    """One tensor of two networks.

    Attributes:
        name: The name of the tensor.
        shape: The shape of the tensor.
        before: The share of the first network's tensor that the second network's tensor explains as stored. It is the
            squared correlation, or zero if the correlation is negative. None if units cannot be told apart in one of
            the tensors.
        after: The same share after the second network was moved.
        weight: The squared norm of the first network's tensor minus the part that no element changes.
        squares: Squared distances as stored and moved, and the squared norm of the first network's tensor.
    """

    name: str
    shape: tuple[int, ...]
    before: float | None
    after: float | None
    weight: float
    squares: tuple[float, float, float] = field(repr=False)


class ExplainedSums:
    """Sums of squares and products of a tensor of two networks, with and without the part that every element keeps.

    The second network counts twice, as stored and as moved. The part that every element keeps, such as the mean over
    units, carries no information about units. Networks for one purpose share this part, for example gains around one,
    or the frequency of a symbol. So correlations are computed after this part is subtracted.
    """

    def __init__(self) -> None:
        self._first = self._own = 0.0
        self._gaps, self._second, self._others, self._products = ([0.0, 0.0] for _ in range(4))

    def add(self, symmetry: Symmetry, name: str, x: Tensor, y: Tensor, moved: Tensor) -> None:
        """Add a piece of a tensor of both networks, and the same piece of the moved second network."""
        centered = x - _kept(symmetry, name, x)
        self._first += dot(x, x)
        self._own += dot(centered, centered)
        for k, second in enumerate((y, moved)):
            other = second - _kept(symmetry, name, second)
            self._gaps[k] += dot(second - x, second - x)
            self._second[k] += dot(second, second)
            self._others[k] += dot(other, other)
            self._products[k] += dot(centered, other)

    def tensor(self, name: str, shape: Sequence[int]) -> ExplainedTensor:
        """Return the shares and squared distances of a tensor from the sums over its pieces."""
        is_constant = self._own <= CONSTANT_TENSOR * self._first or self._others[0] <= CONSTANT_TENSOR * self._second[0]
        before, after = (None if is_constant else self._squared_correlation(k) for k in range(2))
        return ExplainedTensor(name, tuple(shape), before, after, self._own, (*self._gaps, self._first))  # type: ignore[arg-type]

    def _squared_correlation(self, k: int) -> float:
        size = self._own * self._others[k]
        return min(1.0, max(0.0, self._products[k]) ** 2 / size) if size > 0 else 0.0


def mean_share(shares: Sequence[ExplainedTensor], *, is_after: bool = True) -> float | None:
    """Return the mean share over matrices, each counted once.

    If there is no matrix, the mean is over vectors. If there are no vectors either, the result is None.
    """
    known = [share for share in shares if share.after is not None and share.before is not None]
    counted = [share for share in known if len(share.shape) > 1] or known
    values = [share.after if is_after else share.before for share in counted]
    return sum(value for value in values if value is not None) / len(values) if values else None


def _kept(symmetry: Symmetry, name: str, tensor: Tensor) -> Tensor:
    """Return the part of a tensor that no element changes: its average over all elements."""
    sites = symmetry.sites.get(name, ())
    if not sites:
        return tensor.new_zeros(())
    for site in sites:
        tensor = average(tensor, site)
    return tensor
