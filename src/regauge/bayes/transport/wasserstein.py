"""The squared 2-Wasserstein distance between two posteriors of one kind."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.bayes.posteriors.posterior import Posterior
from regauge.bayes.transport import couplings

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
    if isinstance(a, GaussianPosterior) and isinstance(b, GaussianPosterior):
        a, b = couplings.couple_gaussians(a, b)
        return SquaredDistance(_apart(a.mean, b.mean, skip), _apart(a.std, b.std, skip))
    if isinstance(a, KroneckerPosterior) and isinstance(b, KroneckerPosterior):
        a, b = couplings.couple_kronecker(a, b)
        spread = _apart(a.std, b.std, skip) + sum(_between_terms(a, b, name) for name in a.terms if name not in skip)
        return SquaredDistance(_apart(a.mean, b.mean, skip), spread)
    if isinstance(a, LowRankPosterior) and isinstance(b, LowRankPosterior):
        a, b = couplings.couple_low_rank(_without(a, skip), _without(b, skip))
        return SquaredDistance(_apart(a.mean, b.mean, skip), _low_rank_spread(a, b))
    if isinstance(a, ParticlePosterior) and isinstance(b, ParticlePosterior):
        a, b = couplings.couple_particles(a, b, skip)
        return _between_pairs(a, b, skip)
    couplings.refuse(a, b)


def _apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor], skip: Collection[str]) -> float:
    names = [name for name, tensor in a.items() if name not in skip and tensor.is_floating_point()]
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in names)


def _between_terms(a: KroneckerPosterior, b: KroneckerPosterior, name: str) -> float:
    """`|B_a (x) C_a - B_b (x) C_b|_F^2` for coupled roots, without differences of large numbers."""
    rows, columns = a.terms[name][0].rows.double(), a.terms[name][0].columns.double()
    other, others = b.terms[name][0].rows.double(), b.terms[name][0].columns.double()
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
    first, second = (_root(q, names) for q in (a, b))
    total = first.square().sum() + second.square().sum() - 2 * torch.linalg.svdvals(second @ first).sum()
    return max(0.0, float(total))


def _without(posterior: LowRankPosterior, skip: Collection[str]) -> LowRankPosterior:
    std, deviations = ({n: t for n, t in q.items() if n not in skip} for q in (posterior.std, posterior.deviations))
    return LowRankPosterior(posterior.mean, std, deviations)


def _root(posterior: LowRankPosterior, names: list[str]) -> Tensor:
    """The symmetric root of the full covariance, float64 `[n, n]`."""
    sizes = {name: posterior.mean[name].numel() for name in names}
    none = torch.zeros(posterior.rank, dtype=torch.float64)
    std = torch.cat(
        [posterior.std[n].flatten().double() if n in posterior.std else none[:1].expand(sizes[n]) for n in names]
    )
    rows = torch.cat(
        [
            posterior.deviations[n].flatten(1).double()
            if n in posterior.deviations
            else none[:, None].expand(-1, sizes[n])
            for n in names
        ],
        1,
    )
    values, vectors = torch.linalg.eigh(rows.mT @ rows + torch.diag(std.square()))
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    return root


def _between_pairs(a: ParticlePosterior, b: ParticlePosterior, skip: Collection[str]) -> SquaredDistance:
    left_out = {*a.buffers, *b.buffers, *skip}
    mean = spread = 0.0
    for name, stack in a.stack.items():
        if name in left_out or not stack.is_floating_point():
            continue
        step = max(1, couplings.CHUNK // a.count)
        for x, y in zip(
            torch.split(stack.flatten(1), step, 1), torch.split(b.stack[name].flatten(1), step, 1), strict=True
        ):
            difference = x.double() - y.double()
            common = difference.mean(0)
            mean += float(common.square().sum())
            spread += float((difference - common).square().sum()) / a.count
    return SquaredDistance(mean, spread)
