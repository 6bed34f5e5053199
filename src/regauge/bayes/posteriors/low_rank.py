"""Low-rank Gaussians, with a diagonal component and a few directions in which all parameters vary together."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regauge.alignment.joint import role_symmetry
from regauge.bayes.posteriors.couplings import SquaredDistance, find_rotation, sum_squares, with_zeros
from regauge.bayes.posteriors.gaussian import GaussianPosterior, bind, move_noise, move_std, sample
from regauge.core.element import Element
from regauge.core.interpolation import interpolate
from regauge.core.params import Params, require_same_shapes
from regauge.core.symmetry import Symmetry

DENSE_LIMIT = 2000
"""The largest number of uncertain parameters for which posteriors are compared by full covariances."""
COEFFICIENTS = "(coefficients)"
"""The name of the noise entry with the coefficients of the deviations, `[count, K]`, which no parameter has."""


@dataclass(frozen=True, eq=False)
class LowRankPosterior:
    """The Gaussian `theta = mean + std * e + sum_k z_k D_k` with independent standard normal e and z.

    Each parameter has its own e; the K coefficients z are shared by the whole network. The covariance is `diag(std^2) +
    D^T D`.

    Attributes:
        mean: A whole network, including buffers.
        std: Nonnegative standard deviations of the diagonal component. Parameters without an entry have no diagonal
            component.
        deviations: The matrix D, with a leading axis of length K on every tensor. Parameters without an entry have no
            deviations.

    Raises:
        ValueError: There are no deviations, or the tensors have different numbers of deviations.

    References:
        Maddox et al. (2019), A simple baseline for Bayesian uncertainty in deep learning, section 3.2.
    """

    mean: Params
    std: Params
    deviations: Params

    def __post_init__(self) -> None:
        ranks = {tensor.shape[0] if tensor.ndim else 0 for tensor in self.deviations.values()}
        if len(ranks) != 1 or 0 in ranks:
            raise ValueError(
                f"the deviations of the parameters have {sorted(ranks)} rows; give all of them the same leading axis "
                "of directions, or use a `GaussianPosterior` if there are no directions"
            )

    @property
    def rank(self) -> int:
        """The number K of deviations."""
        return next(iter(self.deviations.values())).shape[0]

    def draw(self, count: int, generator: torch.Generator) -> Params:
        """Sample standard normal noise: `[count, ...]` for standard deviations, `[count, K]` for the deviations."""
        one = next(iter(self.deviations.values()))
        shared = torch.empty(self.rank, dtype=one.dtype, device=one.device)
        return GaussianPosterior({}, {COEFFICIENTS: shared, **self.std}).draw(count, generator)

    def at(self, noise: Params) -> Params:
        """See `Posterior`."""
        coefficients = noise[COEFFICIENTS]
        count = len(coefficients)
        samples = {}
        for name, mean in self.mean.items():
            if name in self.deviations:
                moved = torch.addmm(mean.flatten(), coefficients, self.deviations[name].flatten(1))
                samples[name] = moved = moved.view(count, *mean.shape)
                if name in self.std:
                    moved.addcmul_(self.std[name], noise[name])
            else:
                samples[name] = sample(name, mean, self.std, noise, count)
        return samples

    def push(self, symmetry: Symmetry, element: Element) -> "LowRankPosterior":
        """Transform means like parameters, standard deviations by magnitudes, and deviations like differences.

        Raises:
            ValueError: The element rotates parameters with a diagonal component, or adds products of uncertain
                parameters.
        """
        symmetry, element, linear = bind(symmetry, element, self.mean)
        std = move_std(symmetry, linear, self.std)
        # Shifts flip signs of differences of parameters, but add nothing to them.
        moving = symmetry.on_changes
        moving = replace(moving, groups=tuple(group.without("shift") for group in moving.groups))
        deviations = role_symmetry(moving, "parameters", self.deviations).act(linear, self.deviations)
        return LowRankPosterior(symmetry.act(element, self.mean), std, deviations)

    def push_noise(self, symmetry: Symmetry, element: Element, noise: Params) -> Params:
        """Transform the noise of the diagonal component by permutations and signs; keep the noise of the deviations."""
        return move_noise(self.mean, self.std, symmetry, element, noise)

    def moments(self) -> GaussianPosterior:
        """Return the diagonal Gaussian with the means of the posterior, and with standard deviations `sqrt(std^2 +
        sum_k D_k^2)`.
        """
        std = dict(self.std)
        for name, tensor in self.deviations.items():
            spread = torch.linalg.vector_norm(tensor, dim=0)
            std[name] = torch.hypot(spread, std[name]) if name in std else spread
        return GaussianPosterior(self.mean, std)

    def couple(
        self, other: "LowRankPosterior", skip: Collection[str] = ()
    ) -> "tuple[LowRankPosterior, LowRankPosterior]":
        """Couple the diagonal components and the rotated deviations, each with shared noise; see `Transportable`.

        The coupling is the best among couplings that do not mix the diagonal and the low-rank component. If one
        component is zero, the returned coupling is the best of all couplings. In general, the best coupling mixes the
        components, and its matrix has as many entries as the squared number of parameters.
        """
        require_same_shapes(self.mean, other.mean)
        std, std_b = ({name: t for name, t in q.std.items() if name not in skip} for q in (self, other))
        rank, like = max(self.rank, other.rank), {**other.deviations, **self.deviations}
        rows, rows_b = (
            {name: _fill(q, name, rank, t) for name, t in like.items() if name not in skip} for q in (self, other)
        )
        cross = sum(rows_b[name].flatten(1).double() @ rows[name].flatten(1).double().mT for name in rows)
        assert isinstance(cross, Tensor)
        turn = find_rotation(cross)
        turned = {name: (turn.mT.to(one) @ one.flatten(1)).view(one.shape) for name, one in rows_b.items()}
        return (
            LowRankPosterior(self.mean, with_zeros(std, std_b), rows),
            LowRankPosterior(other.mean, with_zeros(std_b, std), turned),
        )

    def squared_distance(self, other: "LowRankPosterior", skip: Collection[str] = ()) -> SquaredDistance:
        """Return the distance; see `Transportable`. If `couple` is not optimal, full covariances are computed.

        Raises:
            ValueError: The diagonal and the low-rank component are both nonzero, and more than `DENSE_LIMIT` parameters
                are uncertain.
        """
        is_flat = not any(bool(std.any()) for q in (self, other) for std in q.std.values())
        is_alone = not any(bool(rows.any()) for q in (self, other) for rows in q.deviations.values())
        if is_flat or is_alone:
            spread = sum_squares(self.std, other.std) + sum_squares(self.deviations, other.deviations)
        else:
            spread = _spread(self, other)
        return SquaredDistance(sum_squares(self.mean, other.mean, skip), spread)

    def between(self, other: "LowRankPosterior", t: float) -> "LowRankPosterior":
        """Interpolate means, standard deviations and rotated deviations."""
        parts = ((self.mean, other.mean), (self.std, other.std), (self.deviations, other.deviations))
        return LowRankPosterior(*(interpolate(a, b, t) for a, b in parts))


def _spread(a: LowRankPosterior, b: LowRankPosterior) -> float:
    """Return the spread between two posteriors, computed from their full covariances."""
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
    """Return the symmetric root of the full covariance, float64 `[n, n]`."""
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


def _fill(posterior: LowRankPosterior, name: str, rank: int, like: Tensor) -> Tensor:
    """Return the deviations of a parameter, with zeros appended up to a given number of deviations."""
    rows = posterior.deviations.get(name, like[:0])
    return torch.cat([rows, rows.new_zeros(rank - len(rows), *rows.shape[1:])]) if len(rows) < rank else rows
