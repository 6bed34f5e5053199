"""Couplings: two posteriors rewritten so that samples with the same noise are as close as they can be.

Every Gaussian here is a mean and a root of its covariance, `theta = m + L e` with white noise e, and any `L R` with
orthogonal R is another root. Among all couplings of two Gaussians the best one is

    theta_0 = m_0 + L_0 e,   theta_1 = m_1 + L_1 R e,   R = U V^T  for  L_1^T L_0 = U S V^T,

which gives `W2^2 = |m_0 - m_1|^2 + |L_0 - L_1 R|_F^2` and, where L_0 can be inverted, McCann's map `L_1 R L_0^-1`.
For Kronecker products the singular value decomposition, and so R, is a product over the factors.

References:
    Bhatia, Jain and Lim (2019), On the Bures-Wasserstein distance between positive definite matrices, theorem 1.
"""

from collections.abc import Collection, Mapping
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior, Term
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.core.assignment import assign
from regauge.core.params import Params, require_same_shapes

CHUNK = 1 << 22
"""Numbers of particles that are held in float64 at once."""


def couple_gaussians(a: GaussianPosterior, b: GaussianPosterior) -> tuple[GaussianPosterior, GaussianPosterior]:
    """Independent parameters share their noise; what only one of them is uncertain of has std zero in the other."""
    require_same_shapes(a.mean, b.mean)
    std_a, std_b = with_zeros(a.std, b.std), with_zeros(b.std, a.std)
    return (a if std_a is a.std else a._replace(std=std_a)), (b if std_b is b.std else b._replace(std=std_b))


def couple_kronecker(a: KroneckerPosterior, b: KroneckerPosterior) -> tuple[KroneckerPosterior, KroneckerPosterior]:
    """The best coupling: one rotation of the noise for each factor of b.

    Raises:
        ValueError: Other weights have factors in a than in b, or one of them is a point of a geodesic.
    """
    require_same_shapes(a.mean, b.mean)
    differing = sorted(a.terms.keys() ^ b.terms.keys())
    if differing:
        raise ValueError(
            f"{differing[:5]} have Kronecker factors in one posterior only; fit both with factors for the same "
            "weights, or compare their `moments()`"
        )
    terms_a, terms_b = {}, {}
    for name in a.terms:
        if len(a.terms[name]) > 1 or len(b.terms[name]) > 1:
            raise ValueError(
                f"the covariance of {name!r} is no Kronecker product, since a posterior is a point of a geodesic; "
                "compare the ends of geodesics, or `moments()`"
            )
        pairs = [_couple_roots(x, y) for x, y in zip(a.terms[name][0], b.terms[name][0], strict=True)]
        terms_a[name] = (Term(*(x for x, _ in pairs)),)
        terms_b[name] = (Term(*(y for _, y in pairs)),)
    std_a, std_b = with_zeros(a.std, b.std), with_zeros(b.std, a.std)
    return KroneckerPosterior(a.mean, terms_a, std_a), KroneckerPosterior(b.mean, terms_b, std_b)


def couple_low_rank(a: LowRankPosterior, b: LowRankPosterior) -> tuple[LowRankPosterior, LowRankPosterior]:
    """Diagonal parts share their noise and deviations share theirs, rotated.

    It is the best coupling of those that keep both parts apart, and the best of all where one part vanishes; in
    general the best one mixes them by a map as large as the network squared.
    """
    require_same_shapes(a.mean, b.mean)
    std_a, std_b = with_zeros(a.std, b.std), with_zeros(b.std, a.std)
    rank = max(a.rank, b.rank)
    zeros_a, zeros_b = ({name: t[:1] for name, t in q.deviations.items()} for q in (a, b))
    rows_a = {**a.deviations, **{n: t.new_zeros(a.rank, *t.shape[1:]) for n, t in zeros_b.items() if n not in zeros_a}}
    rows_b = {**b.deviations, **{n: t.new_zeros(b.rank, *t.shape[1:]) for n, t in zeros_a.items() if n not in zeros_b}}
    rows_a, rows_b = _with_rank(rows_a, rank), _with_rank(rows_b, rank)
    cross = sum(rows_b[name].flatten(1).double() @ rows_a[name].flatten(1).double().mT for name in rows_a)
    assert isinstance(cross, Tensor)
    turn = rotation(cross)
    turned = {name: (turn.mT.to(rows) @ rows.flatten(1)).view(rows.shape) for name, rows in rows_b.items()}
    return LowRankPosterior(a.mean, std_a, rows_a), LowRankPosterior(b.mean, std_b, turned)


def couple_particles(
    a: ParticlePosterior, b: ParticlePosterior, skip: Collection[str] = ()
) -> tuple[ParticlePosterior, ParticlePosterior]:
    """Particles are paired so that the summed squared distance is smallest.

    Raises:
        ValueError: The numbers of particles differ.
    """
    require_same_count(a, b)
    require_same_shapes(a.stack, b.stack)
    left_out = {*a.buffers, *b.buffers, *skip}
    products = torch.zeros(a.count, b.count, dtype=torch.float64)
    for name, stack in a.stack.items():
        if name in left_out or not stack.is_floating_point():
            continue
        one, other = stack.flatten(1), b.stack[name].flatten(1)
        step = max(1, CHUNK // a.count)
        for x, y in zip(torch.split(one, step, 1), torch.split(other, step, 1), strict=True):
            products += ((x.double() - x.double().mean(0)) @ (y.double() - y.double().mean(0)).mT).cpu()
    order = torch.from_numpy(assign(products.numpy()))
    paired = {name: tensor.index_select(0, order.to(tensor.device)) for name, tensor in b.stack.items()}
    return a, ParticlePosterior(paired, b.buffers)


def refuse(a: object, b: object) -> NoReturn:
    """No transport is known between these.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"transport is defined between two posteriors of one kind, not from a {type(a).__name__} to a "
        f"{type(b).__name__}; give two of one kind (Gaussian, Kronecker, low-rank or particles), or the `moments()` "
        "of both"
    )


def require_same_count(a: ParticlePosterior, b: ParticlePosterior) -> None:
    """Particles are paired one to one.

    Raises:
        ValueError: Their numbers differ.
    """
    if a.count != b.count:
        raise ValueError(
            f"{a.count} particles cannot be paired with {b.count}; thin the longer chain, so that both have as many"
        )


def rotation(cross: Tensor) -> Tensor:
    """The orthogonal R with the largest `<R, cross>`, in float64."""
    left, _, right = torch.linalg.svd(cross.double())
    product: Tensor = left @ right
    return product


def with_zeros(std: Params, other: Params) -> Params:
    """`std`, and zeros for what only the other has; the same object where there is no such thing."""
    missing = {name: torch.zeros_like(tensor) for name, tensor in other.items() if name not in std}
    return {**std, **missing} if missing else std


def _couple_roots(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two roots `[n, p]` with as many columns, those of b rotated."""
    width = max(a.shape[1], b.shape[1])
    a, b = pad(a, (0, width - a.shape[1])), pad(b, (0, width - b.shape[1]))
    turn = rotation(b.double().mT @ a.double())
    return a, (b.double() @ turn).to(b.dtype)


def _with_rank(deviations: Mapping[str, Tensor], rank: int) -> Params:
    """Filled up by deviations that are zero."""
    return {
        name: torch.cat([t, t.new_zeros(rank - len(t), *t.shape[1:])]) if len(t) < rank else t
        for name, t in deviations.items()
    }
