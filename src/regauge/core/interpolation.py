"""Interpolation, means, distances and correlations of networks.

Networks in half precision are combined in float32, and the result is rounded once. Integer and boolean tensors
(positions, masks) must be equal in all networks. Counters, such as numbers of seen batches, are copied from the first
network.
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
"""A tensor counts as constant if the differences between units are less than this fraction of the sum of squares."""


def interpolate(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float | Tensor = 0.5) -> Params:
    """Return `(1 - t) a + t b` for networks a and b: exactly a at t = 0, and exactly b at t = 1.

    At t = 1, integer buffers are copied from the second network. For populations, t may be a tensor of shape
    `[models]`.
    """
    return combine((params_a, params_b), (1 - t, t))


def combine(networks: Sequence[Mapping[str, Tensor]], weights: Sequence[float | Tensor]) -> Params:
    """Return `sum_k weights[k] networks[k]`.

    If one weight is one and all others are zero, the result equals the network with weight one exactly. If only one
    network has a parameter, or an integer tensor differs, a ValueError names this tensor.
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
    """Return the weighted mean of networks.

    Default: all networks have equal weights. The mean shares no memory with the networks.
    """
    result = combine(networks, shares_of(None, len(networks)) if shares is None else shares)
    return {name: t.clone() if any(t is n[name] for n in networks) else t for name, t in result.items()}


def shares_of(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Return the weights of `count` networks, scaled to sum to one. Default: all networks have equal weights.

    A ValueError is raised if the number of weights is wrong, a weight is negative or not finite, or all weights are
    zero.
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
        params_a: The first network, whose floating-point tensors are compared.
        params_b: The second network.
        buffers: The names of tensors to leave out. `regauge align`, `regauge merge` and model cards leave out
            `symmetry.buffers`, because running statistics would dominate the distance.
    """
    squares = 0.0
    for name, tensor in params_a.items():
        if tensor.is_floating_point() and name not in buffers:
            difference = tensor.detach().to(torch.float64, copy=True)
            difference -= params_b[name].detach().to(difference)
            squares += float(difference.square_().sum())
    return math.sqrt(squares)


@dataclass(frozen=True)
class ExplainedTensor:
    """The similarity of one tensor in two networks, before and after alignment.

    Attributes:
        name: The name of the tensor.
        shape: The shape of the tensor.
        before: The squared correlation of the two tensors before alignment (the explained share), or zero if the
            correlation is negative. None if one of the two tensors is the same for all units.
        after: The squared correlation after an element has acted on the second network, in the same form as `before`.
        weight: The squared norm of the first network's tensor after its average over all elements of the symmetry is
            subtracted.
        squares: Three numbers: the squared distances before and after alignment, and the squared norm of the first
            network's tensor.
    """

    name: str
    shape: tuple[int, ...]
    before: float | None
    after: float | None
    weight: float
    squares: tuple[float, float, float] = field(repr=False)


class ExplainedSums:
    """Sums of squares and products of one tensor in two networks, with and without the part that no element changes.

    The sums contain the second network twice, before and after alignment. The part that no element changes, such as the
    mean over units, contains no information about units. Networks that were trained on similar data share this part.
    For example, gains are around one in all networks, and embeddings reflect the frequencies of tokens. Correlations
    are computed after the part that no element changes is subtracted.
    """

    def __init__(self) -> None:
        self._first = self._own = 0.0
        self._gaps, self._second, self._others, self._products = ([0.0, 0.0] for _ in range(4))

    def add(self, symmetry: Symmetry, name: str, x: Tensor, y: Tensor, moved: Tensor) -> None:
        """Add a chunk of the tensor from both networks, and the same chunk of the aligned second network."""
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
        """Return the explained shares (squared correlations) and squared distances of a tensor, computed from the
        sums.
        """
        is_constant = self._own <= CONSTANT_TENSOR * self._first or self._others[0] <= CONSTANT_TENSOR * self._second[0]
        before, after = (None if is_constant else self._squared_correlation(k) for k in range(2))
        return ExplainedTensor(name, tuple(shape), before, after, self._own, (*self._gaps, self._first))  # type: ignore[arg-type]

    def _squared_correlation(self, k: int) -> float:
        size = self._own * self._others[k]
        return min(1.0, max(0.0, self._products[k]) ** 2 / size) if size > 0 else 0.0


def mean_share(shares: Sequence[ExplainedTensor], *, is_after: bool = True) -> float | None:
    """Return the unweighted mean of the explained shares (squared correlations) of all matrices of a network.

    If there are no matrices, return the mean share over vectors. If there are no vectors either, return None.
    """
    known = [share for share in shares if share.after is not None and share.before is not None]
    counted = [share for share in known if len(share.shape) > 1] or known
    values = [share.after if is_after else share.before for share in counted]
    return sum(value for value in values if value is not None) / len(values) if values else None


def _kept(symmetry: Symmetry, name: str, tensor: Tensor) -> Tensor:
    """Return the part of a tensor that no element changes, which is its average over all elements."""
    sites = symmetry.sites.get(name, ())
    if not sites:
        return tensor.new_zeros(())
    for site in sites:
        tensor = average(tensor, site)
    return tensor
