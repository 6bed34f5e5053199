"""Couplings, which rewrite two posteriors such that samples with the same noise are as close as possible.

A Gaussian is described by a mean and a root of its covariance, `theta = m + L e` with white noise e. For any orthogonal
R, `L R` is another root. The best coupling of two Gaussians is

    theta_0 = m_0 + L_0 e,   theta_1 = m_1 + L_1 R e,   R = U V^T  for  L_1^T L_0 = U S V^T,

which gives `W2^2 = |m_0 - m_1|^2 + |L_0 - L_1 R|_F^2` and, if L_0 is invertible, McCann's map `L_1 R L_0^-1`. For
Kronecker products, the singular value decomposition and R are products over the factors.

References:
    Bhatia, Jain and Lim (2019), On the Bures-Wasserstein distance between positive definite matrices, theorem 1.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from regauge.core.params import Params


class SquaredDistance(NamedTuple):
    """`W2^2` and its two terms: the distance between the means, and the distance that remains if the means agree.

    Attributes:
        mean: `|m_a - m_b|^2`.
        spread: The distance `W2^2` between the two distributions after their means are subtracted.
    """

    mean: float
    spread: float

    @property
    def total(self) -> float:
        """The whole distance `W2^2`."""
        return self.mean + self.spread


def sum_squares(a: Mapping[str, Tensor], b: Mapping[str, Tensor], skip: Collection[str] = ()) -> float:
    """Return the squared distance `|a - b|^2` of two dictionaries, without integer tensors and the names in `skip`."""
    names = [name for name, tensor in a.items() if name not in skip and tensor.is_floating_point()]
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in names)


def with_zeros(std: Params, other: Params) -> Params:
    """Return `std`, extended by zeros for names that only `other` has. If `other` has no further names, return `std`
    itself.
    """
    missing = {name: torch.zeros_like(tensor) for name, tensor in other.items() if name not in std}
    return {**std, **missing} if missing else std


def find_rotation(cross: Tensor) -> Tensor:
    """Return the orthogonal R with the largest `<R, cross>`, in float64."""
    left, _, right = torch.linalg.svd(cross.double())
    product: Tensor = left @ right
    return product
