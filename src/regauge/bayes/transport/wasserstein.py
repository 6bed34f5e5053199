"""The squared 2-Wasserstein distance between two posteriors of one kind, and its geodesics."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regauge.bayes.posteriors.gaussian import GaussianPosterior, Posterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior, Term
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.bayes.transport.couplings import couple, paired_pieces
from regauge.connect.paths import WassersteinGeodesic
from regauge.core.interpolation import interpolate

DENSE_LIMIT = 2000
"""Largest number of uncertain parameters for which low-rank Gaussians are compared by full covariances."""


class SquaredDistance(NamedTuple):
    """`W2^2` and its two parts: what a shift of the whole distribution costs, and what remains when means agree.

    Attributes:
        mean: `|m_a - m_b|^2`.
        spread: `W2^2` between the two distributions with their means taken away.
    """

    mean: float
    spread: float

    @property
    def total(self) -> float:
        """`W2^2`."""
        return self.mean + self.spread


def distance(a: Posterior, b: Posterior, *, skip: Collection[str] = ()) -> SquaredDistance:
    """`W2^2` between two posteriors of one kind, exactly.

    | kind | spread |
    | --- | --- |
    | diagonal | `|s_a - s_b|^2`: standard deviations, not variances |
    | Kronecker | for each weight `tr G_a tr A_a + tr G_b tr A_b - 2 |B_b^T B_a|_* |C_b^T C_a|_*` |
    | low rank | from inner products of the deviations if there are no diagonal parts, from full covariances if small |
    | particles | the best pairing of as many particles |

    Here `|X|_*` is the sum of the singular values, and B and C are roots of the factors G and A.

    With full covariances the spread is `tr(S_a + S_b - 2 (S_a^(1/2) S_b S_a^(1/2))^(1/2))`. Rossi et al. (2023) print
    `|S_a - S_b|_F^2` for covariances that commute (equation 16, second line), which is wrong: it is
    `|S_a^(1/2) - S_b^(1/2)|_F^2`. Their equation 17, with standard deviations, is right.

    Args:
        a: Any posterior.
        b: One of the same kind and architecture.
        skip: Names that do not count: `symmetry.buffers`, if there are any. Integers never count.

    Raises:
        ValueError: The posteriors are of different kinds or architectures, or the exact distance is out of reach (low
            rank and a diagonal part on more than 2,000 parameters).

    References:
        Takatsu (2011), Wasserstein geometry of Gaussian measures; Rossi et al. (2023), equations 9, 16 and 17.
    """
    first, last = couple(a, b, skip)
    if isinstance(first, ParticlePosterior):
        return _between_pairs(first, last, skip)
    if isinstance(first, LowRankPosterior):
        spread = _low_rank_spread(first, last)
    else:
        terms = [name for name in getattr(first, "terms", ()) if name not in skip]
        spread = _apart(first.std, last.std, skip) + sum(_between_terms(first, last, name) for name in terms)
    return SquaredDistance(_apart(first.mean, last.mean, skip), spread)


@dataclass(frozen=True, eq=False)
class Displacement:
    """The distribution of `(1 - t) theta_0 + t theta_1` for two posteriors sampled with the same noise.

    Noise of the first fits every point of the path, and a sample moves along a straight line when t grows: the last, of
    the same kind, is written for it.

    References:
        McCann (1997), A convexity principle for interacting gases; Rossi et al. (2023), equation 6.
    """

    first: Posterior
    last: Posterior

    def at(self, t: float) -> Posterior:
        """The posterior a share t of the way; the first and the last themselves at the ends.

        Raises:
            ValueError: t is outside of [0, 1].
        """
        require_share(t)
        if t in (0, 1):
            return self.last if t else self.first
        first: Any = self.first
        last: Any = self.last
        if isinstance(first, GaussianPosterior):
            return GaussianPosterior(*WassersteinGeodesic().at(first, last, t))
        if isinstance(first, ParticlePosterior):
            return ParticlePosterior(interpolate(first.stack, last.stack, t), first.buffers)
        mean, std = interpolate(first.mean, last.mean, t), interpolate(first.std, last.std, t)
        if isinstance(first, LowRankPosterior):
            return LowRankPosterior(mean, std, interpolate(first.deviations, last.deviations, t))
        terms = {
            name: tuple(Term((1 - t) * rows, columns) for rows, columns in own)
            + tuple(Term(t * rows, columns) for rows, columns in last.terms[name])
            for name, own in first.terms.items()
        }
        return KroneckerPosterior(mean, terms, std)


def geodesic(a: Posterior, b: Posterior) -> Displacement:
    """The shortest path of distributions from one posterior to another of the same kind.

    | kind | the point at t |
    | --- | --- |
    | diagonal | means and standard deviations are interpolated; the ends are a and b as they are |
    | Kronecker | McCann's map is a product T_G (x) T_A of maps of the factors; samples move along straight lines |
    | low rank | standard deviations and rotated deviations are interpolated |
    | particles | particles are interpolated in pairs, which the best assignment chose |

    A point between Kronecker posteriors has two terms, since its covariance is no Kronecker product. Between low-rank
    Gaussians the path is a geodesic if there is no diagonal part or no deviation, and otherwise the shortest path that
    keeps both parts apart.

    The ends have the distributions of a and b. That of b is written with rotated roots or in another order of
    particles, so that noise drawn once shows the whole path: a loss along it has the same Monte Carlo error
    everywhere. What only one of the two is uncertain of has zero standard deviations in the other.

    Raises:
        ValueError: The posteriors are of different kinds or architectures, Kronecker factors belong to different
            weights, or the numbers of particles differ.

    References:
        McCann (1997); Takatsu (2011), Wasserstein geometry of Gaussian measures; Rossi et al. (2023), section 3,
        equations 6 and 7.
    """
    return Displacement(*couple(a, b))


def require_share(t: float) -> None:
    """Raise a ValueError unless t lies in [0, 1]."""
    if not 0 <= t <= 1:
        raise ValueError(f"t is {t}; it is a share of the way between two posteriors, from 0 to 1")


def _apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor], skip: Collection[str]) -> float:
    names = [name for name, tensor in a.items() if name not in skip and tensor.is_floating_point()]
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in names)


def _between_terms(a: KroneckerPosterior, b: KroneckerPosterior, name: str) -> float:
    """`|B_a (x) C_a - B_b (x) C_b|_F^2` for coupled roots, without differences of large numbers."""
    rows, columns = a.terms[name][0].rows.double(), a.terms[name][0].columns.double()
    other, others = b.terms[name][0].rows.double(), b.terms[name][0].columns.double()
    # B (x) C - B' (x) C' = B (x) (C - C') + (B - B') (x) C', and <X (x) Y, X' (x) Y'> = <X, X'> <Y, Y'>.
    by_rows, by_columns = rows - other, columns - others
    squares = rows.square().sum() * by_columns.square().sum() + by_rows.square().sum() * others.square().sum()
    return float(squares + 2 * (rows * by_rows).sum() * (by_columns * others).sum())


def _low_rank_spread(a: LowRankPosterior, b: LowRankPosterior) -> float:
    """The cost of the coupling where that is the best, the full computation elsewhere."""
    is_flat = not any(bool(std.any()) for q in (a, b) for std in q.std.values())
    is_alone = not any(bool(rows.any()) for q in (a, b) for rows in q.deviations.values())
    if is_flat or is_alone:
        return _apart(a.std, b.std, ()) + _apart(a.deviations, b.deviations, ())
    names = list(dict.fromkeys([*a.std, *a.deviations]))
    size = sum(a.mean[name].numel() for name in names)
    if size > DENSE_LIMIT:
        raise ValueError(
            f"the distance between low-rank Gaussians with diagonal parts needs the full covariances of {size} "
            f"parameters (at most {DENSE_LIMIT}); compare their `moments()`, or give posteriors whose `std` is empty"
        )
    # tr (S_a^1/2 S_b S_a^1/2)^1/2 is the sum of the singular values of S_b^1/2 S_a^1/2.
    first, second = (_root(q, names) for q in (a, b))
    total = first.square().sum() + second.square().sum() - 2 * torch.linalg.svdvals(second @ first).sum()
    return max(0.0, float(total))


def _root(posterior: LowRankPosterior, names: list[str]) -> Tensor:
    """The symmetric root of the full covariance, float64 `[n, n]`."""
    std, rows = [], []
    for name in names:
        size, none = posterior.mean[name].numel(), torch.zeros(1, dtype=torch.float64)
        std.append(posterior.std[name].flatten().double() if name in posterior.std else none.expand(size))
        own = posterior.deviations.get(name)
        rows.append(none.expand(posterior.rank, size) if own is None else own.flatten(1).double())
    deviations = torch.cat(rows, 1)
    values, vectors = torch.linalg.eigh(deviations.mT @ deviations + torch.diag(torch.cat(std).square()))
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    return root


def _between_pairs(a: ParticlePosterior, b: ParticlePosterior, skip: Collection[str]) -> SquaredDistance:
    mean = spread = 0.0
    for x, y in paired_pieces(a, b, skip):
        # Over pairs mean |d|^2 = |mean d|^2 + mean |d - mean d|^2: the shift, and the rest.
        difference = x - y
        common = difference.mean(0)
        mean += float(common.square().sum())
        spread += float((difference - common).square().sum()) / a.count
    return SquaredDistance(mean, spread)
