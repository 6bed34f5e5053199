"""Couplings: two posteriors rewritten so that samples with the same noise are as close as they can be.

Every Gaussian here is a mean and a root of its covariance, `theta = m + L e` with white noise e, and any `L R` with
orthogonal R is another root. Among all couplings of two Gaussians the best one is

    theta_0 = m_0 + L_0 e,   theta_1 = m_1 + L_1 R e,   R = U V^T  for  L_1^T L_0 = U S V^T,

which gives `W2^2 = |m_0 - m_1|^2 + |L_0 - L_1 R|_F^2` and, where L_0 can be inverted, McCann's map `L_1 R L_0^-1`.
For Kronecker products the singular value decomposition, and so R, is a product over the factors.

References:
    Bhatia, Jain and Lim (2019), On the Bures-Wasserstein distance between positive definite matrices, theorem 1.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regauge.bayes.posteriors.gaussian import GaussianPosterior, Posterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior, Term
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.core.assignment import assign
from regauge.core.params import Params, require_same_shapes

CHUNK = 1 << 22
"""Numbers of particles that are held in float64 at once."""


def couple(a: Posterior, b: Posterior, skip: Collection[str] = ()) -> tuple[Any, Any]:
    """The best coupling of two posteriors of one kind; what only one is uncertain of has std zero in the other.

    Of low-rank Gaussians it is the best of those that keep the diagonal parts and the deviations apart, and the best of
    all where one of these vanishes; in general the best one mixes them by a map as large as the network squared. Names
    in `skip` do not count.
    """
    if type(a) is not type(b) or type(a) not in _COUPLINGS:
        raise ValueError(
            f"transport is defined between two posteriors of one kind, not from a {type(a).__name__} to a "
            f"{type(b).__name__}; give two of one kind (Gaussian, Kronecker, low-rank or particles), or the "
            "`moments()` of both"
        )
    return _COUPLINGS[type(a)](a, b, skip)


def with_zeros(std: Params, other: Params) -> Params:
    """`std`, and zeros for what only the other has; the same object where there is no such thing."""
    missing = {name: torch.zeros_like(tensor) for name, tensor in other.items() if name not in std}
    return {**std, **missing} if missing else std


def paired_pieces(a: ParticlePosterior, b: ParticlePosterior, skip: Collection[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """The values of all particles, `[particles, values]` in float64, a bounded number at a time."""
    for name, stack in a.stack.items():
        if name not in {*a.buffers, *b.buffers, *skip} and stack.is_floating_point():
            step = max(1, CHUNK // a.count)
            pieces = (torch.split(tensor.flatten(1), step, 1) for tensor in (stack, b.stack[name]))
            yield from ((x.double(), y.double()) for x, y in zip(*pieces, strict=True))


def _couple_gaussians(
    a: GaussianPosterior, b: GaussianPosterior, _: Collection[str]
) -> tuple[GaussianPosterior, GaussianPosterior]:
    """Independent parameters share their noise."""
    require_same_shapes(a.mean, b.mean)
    std_a, std_b = with_zeros(a.std, b.std), with_zeros(b.std, a.std)
    return (a if std_a is a.std else a._replace(std=std_a)), (b if std_b is b.std else b._replace(std=std_b))


def _couple_kronecker(
    a: KroneckerPosterior, b: KroneckerPosterior, _: Collection[str]
) -> tuple[KroneckerPosterior, KroneckerPosterior]:
    """One rotation of the noise for each factor of b."""
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


def _couple_low_rank(
    a: LowRankPosterior, b: LowRankPosterior, skip: Collection[str]
) -> tuple[LowRankPosterior, LowRankPosterior]:
    """Diagonal parts share their noise and deviations share theirs, rotated."""
    require_same_shapes(a.mean, b.mean)
    std_a, std_b = ({name: t for name, t in q.std.items() if name not in skip} for q in (a, b))
    rank, like = max(a.rank, b.rank), {**b.deviations, **a.deviations}
    rows_a, rows_b = ({name: _fill(q, name, rank, t) for name, t in like.items() if name not in skip} for q in (a, b))
    cross = sum(rows_b[name].flatten(1).double() @ rows_a[name].flatten(1).double().mT for name in rows_a)
    assert isinstance(cross, Tensor)
    turn = _rotation(cross)
    turned = {name: (turn.mT.to(rows) @ rows.flatten(1)).view(rows.shape) for name, rows in rows_b.items()}
    return (
        LowRankPosterior(a.mean, with_zeros(std_a, std_b), rows_a),
        LowRankPosterior(b.mean, with_zeros(std_b, std_a), turned),
    )


def _couple_particles(
    a: ParticlePosterior, b: ParticlePosterior, skip: Collection[str]
) -> tuple[ParticlePosterior, ParticlePosterior]:
    """Particles are paired so that the summed squared distance is smallest."""
    if a.count != b.count:
        raise ValueError(
            f"{a.count} particles cannot be paired with {b.count}; thin the longer chain, so that both have as many"
        )
    require_same_shapes(a.stack, b.stack)
    products = torch.zeros(a.count, b.count, dtype=torch.float64)
    for x, y in paired_pieces(a, b, skip):
        products += ((x - x.mean(0)) @ (y - y.mean(0)).mT).cpu()
    # |x - y|^2 summed over pairs is constant up to the products: means change all pairings alike.
    order = torch.from_numpy(assign(products.numpy()))
    paired = {name: tensor.index_select(0, order.to(tensor.device)) for name, tensor in b.stack.items()}
    return a, ParticlePosterior(paired, b.buffers)


_COUPLINGS: Mapping[type, Callable[[Any, Any, Collection[str]], tuple[Any, Any]]] = {
    GaussianPosterior: _couple_gaussians,
    KroneckerPosterior: _couple_kronecker,
    LowRankPosterior: _couple_low_rank,
    ParticlePosterior: _couple_particles,
}


def _couple_roots(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two roots `[n, p]` with as many columns, those of b rotated."""
    width = max(a.shape[1], b.shape[1])
    a, b = pad(a, (0, width - a.shape[1])), pad(b, (0, width - b.shape[1]))
    # Roots of one covariance differ by a rotation of the noise. |a - b R|^2 is smallest for the polar factor of b^T a,
    # and then is the squared Wasserstein distance of N(0, a a^T) and N(0, b b^T).
    turn = _rotation(b.double().mT @ a.double())
    return a, (b.double() @ turn).to(b.dtype)


def _rotation(cross: Tensor) -> Tensor:
    """The orthogonal R with the largest `<R, cross>`, in float64."""
    left, _, right = torch.linalg.svd(cross.double())
    product: Tensor = left @ right
    return product


def _fill(posterior: LowRankPosterior, name: str, rank: int, like: Tensor) -> Tensor:
    """The deviations of a parameter, filled up to a rank with zeros."""
    rows = posterior.deviations.get(name, like[:0])
    return torch.cat([rows, rows.new_zeros(rank - len(rows), *rows.shape[1:])]) if len(rows) < rank else rows
