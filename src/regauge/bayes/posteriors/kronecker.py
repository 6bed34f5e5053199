"""Kronecker-factored Gaussians, with one covariance over a layer's outputs and one over its inputs."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regauge.bayes.posteriors.couplings import SquaredDistance, find_rotation, sum_squares, with_zeros
from regauge.bayes.posteriors.gaussian import GaussianPosterior, bind, move_noise, move_std, sample
from regauge.core.act import Site
from regauge.core.element import Element
from regauge.core.groups import Group
from regauge.core.interpolation import interpolate
from regauge.core.params import Params, require_same_shapes
from regauge.core.symmetry import Symmetry


class KroneckerTerm(NamedTuple):
    """Two matrices (roots) that map the noise E of a weight to a deviation `rows @ E @ columns^T` from its mean.

    The rows `[out, p]` belong to the first axis of the weight. The columns `[in, q]` belong to all other axes,
    flattened.
    """

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True, eq=False)
class KroneckerPosterior:
    """A Gaussian of weights `W = M + B E C^T` with white noise E. All other parameters are independent.

    Let `G = B B^T` be the covariance over the first axis of the weight, and `A = C C^T` the covariance over its other
    axes. The weight flattened row by row, `W.flatten()`, has covariance `kron(G, A)`. If the weight is flattened column
    by column, the covariance is `kron(A, G)`. Instead of G and A, the posterior stores the roots B and C, which are not
    unique. A transformation of one axis of the weight acts only on the rows of one root, and leaves the noise
    unchanged.

    On a geodesic between two Kronecker-factored posteriors, the deviation from the mean has two terms with the same
    noise, `B E C^T + B' E C'^T`. The covariance of a deviation with two terms is not a Kronecker product.

    Attributes:
        mean: A whole network, including buffers.
        terms: The terms of each weight, usually one. The sum of the terms maps the noise to the deviation from the
            mean, so all terms of a weight use noise of the same shape.
        std: Standard deviations of parameters without terms, such as biases. Parameters in neither `terms` nor `std`
            have no uncertainty.

    Raises:
        ValueError: A root does not fit its weight or the other terms of this weight. The error is also raised if a
            parameter has terms and also standard deviations.

    References:
        Ritter et al. (2018), A scalable Laplace approximation for neural networks, section 3.
    """

    mean: Params
    terms: Mapping[str, tuple[KroneckerTerm, ...]]
    std: Params

    def __post_init__(self) -> None:
        twice = sorted(self.terms.keys() & self.std.keys())
        if twice or not self.terms:
            raise ValueError(
                f"parameters {twice[:5]} have Kronecker factors and standard deviations; give one of the two"
                if twice
                else "no weight has Kronecker factors; give a `GaussianPosterior` instead"
            )
        for name, terms in self.terms.items():
            shape = self.mean[name].shape
            expected = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else None
            sides = {(len(rows), len(columns)) for rows, columns in terms}
            noises = {(rows.shape[1], columns.shape[1]) for rows, columns in terms}
            if sides != {expected} or len(noises) != 1:
                raise ValueError(
                    f"the roots of the factors of {name!r} have {sorted(sides)} rows for noise of {sorted(noises)}, "
                    f"but the weight has shape {tuple(shape)}; give roots for its first axis and for all its others "
                    "together, those of all terms with the same columns"
                )

    @classmethod
    def from_kfac(
        cls,
        mean: Mapping[str, Tensor],
        factors: Mapping[str, tuple[Tensor, Tensor]],
        *,
        examples: float,
        prior_precision: float,
        std: Mapping[str, Tensor] | None = None,
    ) -> "KroneckerPosterior":
        """Return the Laplace approximation from Kronecker-factored curvature. The prior is added to the two Kronecker
        factors.

        The precision of a weight is approximated by

            N (G + c I / pi) (x) (A + c pi I),    c^2 = prior_precision / N,    pi^2 = mean(diag A) / mean(diag G),

        The inverse of the approximate precision is a Kronecker product. The inverse of the exact sum `N G (x) A +
        prior_precision I` is not a Kronecker product. The approximate precision is at least as large as the exact sum,
        so the posterior is never wider than with the exact sum.

        Args:
            mean: The trained network.
            factors: Two matrices for each weight, averaged over examples. G `[out, out]` contains mean products of
                gradients with respect to the outputs. A `[in, in]` contains mean products of inputs.
            examples: N, the number of training examples.
            prior_precision: The positive precision of the prior of every weight.
            std: Standard deviations of parameters without factors.

        Raises:
            ValueError: A factor is not symmetric and positive semidefinite, or a number is not positive.

        References:
            Martens and Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature,
            section 6.3; Ritter et al. (2018), section 3.
        """
        if not (examples > 0 and prior_precision > 0):
            raise ValueError(f"{examples} examples and a prior precision of {prior_precision}: both must be positive")
        damping = math.sqrt(prior_precision / examples)
        terms = {}
        for name, (over_rows, over_columns) in factors.items():
            g, a = (_spectrum(name, factor) for factor in (over_rows, over_columns))
            traces = [float(values.mean()) for values, _ in (a, g)]
            pi = math.sqrt(traces[0] / traces[1]) if min(traces) > 0 else 1.0
            # (N G (x) A)^-1 = N^-1 G^-1 (x) A^-1: the root of N goes into one factor alone.
            rows = _inverse_root(g, damping / pi) / math.sqrt(examples)
            terms[name] = (KroneckerTerm(rows.to(mean[name]), _inverse_root(a, damping * pi).to(mean[name])),)
        return cls(dict(mean), terms, dict(std or {}))

    def draw(self, count: int, generator: torch.Generator) -> Params:
        """Sample standard normal noise: `[count, p, q]` for weights with factors, otherwise `[count, ...]`."""
        shapes = dict(self.std)
        for name, terms in self.terms.items():
            rows, columns = terms[0]
            shapes[name] = rows.new_empty(()).expand(rows.shape[1], columns.shape[1])
        return GaussianPosterior({}, shapes).draw(count, generator)

    def at(self, noise: Params) -> Params:
        """See `Posterior`."""
        count = next(iter(noise.values())).shape[0]
        samples = {}
        for name, mean in self.mean.items():
            if name in self.terms:
                total = mean.flatten(1).expand(count, -1, -1)
                for k, (rows, columns) in enumerate(self.terms[name]):
                    deviation = rows.expand(count, -1, -1), noise[name] @ columns.mT
                    total = total.baddbmm_(*deviation) if k else total.baddbmm(*deviation)
                samples[name] = total.view(count, *mean.shape)
            else:
                samples[name] = sample(name, mean, self.std, noise, count)
        return samples

    def push(self, symmetry: Symmetry, element: Element) -> "KroneckerPosterior":
        """Transform the means like parameters, and the rows of each root like the weight's axis, without translations.

        Rotations are possible if they act only on weights with factors.

        Raises:
            ValueError: The element rotates standard deviations, or adds products of uncertain parameters. The error is
                also raised if a group acts differently on different columns of a weight, as in grouped convolutions.
                With other rotations, the covariance would not be a Kronecker product.
        """
        symmetry, element, linear = bind(symmetry, element, self.mean)
        std = move_std(symmetry, linear, self.std)
        for name in self.terms:
            for site in symmetry.sites.get(name, []):
                _require_one_side(name, site)
        roots: Params = {}
        for name, terms in self.terms.items():
            for k, (rows, columns) in enumerate(terms):
                roots[_name(name, k, 0)] = rows
                roots[_name(name, k, 1)] = columns.view(*self.mean[name].shape[1:], -1)
        groups = tuple(self._on_roots(group) for group in symmetry.groups)
        shapes = {name: tuple(root.shape) for name, root in roots.items()}
        roots = Symmetry(groups, shapes).act(linear, roots)
        moved = {
            name: tuple(
                KroneckerTerm(roots[_name(name, k, 0)], roots[_name(name, k, 1)].reshape(term.columns.shape))
                for k, term in enumerate(terms)
            )
            for name, terms in self.terms.items()
        }
        return KroneckerPosterior(symmetry.act(element, self.mean), moved, std)

    def push_noise(self, symmetry: Symmetry, element: Element, noise: Params) -> Params:
        """Transform the noise of standard deviations by permutations and signs; keep the noise of factored weights."""
        return move_noise(self.mean, self.std, symmetry, element, noise)

    def moments(self) -> GaussianPosterior:
        """Return the diagonal Gaussian with the same means and, for weights with one term, std `sqrt(G_ii A_jj)`."""
        std = dict(self.std)
        for name, terms in self.terms.items():
            variance = sum(
                torch.outer((b.rows * c.rows).sum(1), (b.columns * c.columns).sum(1)) for b in terms for c in terms
            )
            assert isinstance(variance, Tensor)
            std[name] = variance.clamp(min=0).sqrt().view(self.mean[name].shape)
        return GaussianPosterior(self.mean, std)

    def couple(
        self, other: "KroneckerPosterior", skip: Collection[str] = ()
    ) -> "tuple[KroneckerPosterior, KroneckerPosterior]":
        """Rotate the noise of `other`, separately for each factor; see `Transportable`."""
        require_same_shapes(self.mean, other.mean)
        differing = sorted(self.terms.keys() ^ other.terms.keys())
        if differing:
            raise ValueError(
                f"{differing[:5]} have Kronecker factors in only one posterior; fit both with factors for the same "
                "weights, or compare their `moments()`"
            )
        own, others = {}, {}
        for name in self.terms:
            if len(self.terms[name]) > 1 or len(other.terms[name]) > 1:
                raise ValueError(
                    f"the covariance of {name!r} is not a Kronecker product, because a posterior is an inner point of "
                    "a geodesic; compare the ends of geodesics, or `moments()`"
                )
            pairs = [_couple_roots(x, y) for x, y in zip(self.terms[name][0], other.terms[name][0], strict=True)]
            own[name] = (KroneckerTerm(*(x for x, _ in pairs)),)
            others[name] = (KroneckerTerm(*(y for _, y in pairs)),)
        first = KroneckerPosterior(self.mean, own, with_zeros(self.std, other.std))
        return first, KroneckerPosterior(other.mean, others, with_zeros(other.std, self.std))

    def squared_distance(self, other: "KroneckerPosterior", skip: Collection[str] = ()) -> SquaredDistance:
        """Add `|B_a (x) C_a - B_b (x) C_b|_F^2` of each weight's coupled roots to the spread; see `Transportable`.

        The squared distance equals `tr G_a tr A_a + tr G_b tr A_b - 2 |B_b^T B_a|_* |C_b^T C_a|_*`. In these formulas,
        B and C are the roots of the factors G and A before the coupling. The norm `|X|_*` is the sum of the singular
        values.
        """
        terms = [name for name in self.terms if name not in skip]
        spread = sum_squares(self.std, other.std, skip)
        spread += sum(_between_terms(self.terms[name][0], other.terms[name][0]) for name in terms)
        return SquaredDistance(sum_squares(self.mean, other.mean, skip), spread)

    def between(self, other: "KroneckerPosterior", t: float) -> "KroneckerPosterior":
        """Return the distribution at one position t of the geodesic.

        The distribution has two terms for each weight, because its covariance is not a Kronecker product.
        """
        terms = {
            name: tuple(KroneckerTerm((1 - t) * rows, columns) for rows, columns in own)
            + tuple(KroneckerTerm(t * rows, columns) for rows, columns in other.terms[name])
            for name, own in self.terms.items()
        }
        mean, std = interpolate(self.mean, other.mean, t), interpolate(self.std, other.std, t)
        return KroneckerPosterior(mean, terms, std)

    def _on_roots(self, group: Group) -> Group:
        """Return the group with its action on the rows of the roots. Translations change only the mean, so they are
        left out.
        """
        places = [
            replace(place, parameter=_name(place.parameter, k, min(place.axis, 1)), axis=max(place.axis - 1, 0))
            for place in group.without("shift").placements
            for k in range(len(self.terms.get(place.parameter, ())))
        ]
        return replace(group, placements=tuple(places))


def _name(parameter: str, k: int, side: int) -> str:
    return f"{parameter}/{k}/{side}"


def _require_one_side(name: str, site: Site) -> None:
    is_first = site.placement.axis == 0
    if any(axis is not None and (axis == 0) != is_first for axis, _ in site.bases):
        raise ValueError(
            f"group {site.group.name!r} acts on axis {site.placement.axis} of {name!r} by a different element for each "
            "index of another axis, so the result has no Kronecker factors; give this weight standard deviations "
            "instead"
        )


def _spectrum(name: str, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors in float64, where eigenvalues that are negative only by rounding
    become zero.
    """
    factor = factor.double()
    if factor.ndim != 2 or not torch.allclose(factor, factor.mT, rtol=1e-4, atol=1e-5 * float(factor.abs().max())):
        raise ValueError(
            f"a Kronecker factor of {name!r} is not a symmetric matrix (shape {tuple(factor.shape)}); give mean "
            "products of inputs or gradients"
        )
    values, vectors = torch.linalg.eigh((factor + factor.mT) / 2)
    if float(values[0]) < -1e-5 * float(values.abs().max()):
        raise ValueError(
            f"a Kronecker factor of {name!r} has the eigenvalue {float(values[0]):.3g}; give mean products of inputs "
            "or gradients, whose eigenvalues are not negative"
        )
    return values.clamp(min=0), vectors


def _inverse_root(spectrum: tuple[Tensor, Tensor], damping: float) -> Tensor:
    """Return L with `L L^T = (factor + damping I)^-1`."""
    values, vectors = spectrum
    return vectors * (values + damping).rsqrt()


def _couple_roots(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two roots `[n, p]` with equal numbers of columns; the columns of b are rotated to be closest to a."""
    width = max(a.shape[1], b.shape[1])
    a, b = pad(a, (0, width - a.shape[1])), pad(b, (0, width - b.shape[1]))
    # Roots of one covariance differ by a rotation of the noise. |a - b R|^2 is smallest for the polar factor of b^T a,
    # and then is the squared Wasserstein distance of N(0, a a^T) and N(0, b b^T).
    turn = find_rotation(b.double().mT @ a.double())
    return a, (b.double() @ turn).to(b.dtype)


def _between_terms(a: KroneckerTerm, b: KroneckerTerm) -> float:
    """Return `|B_a (x) C_a - B_b (x) C_b|_F^2` for coupled roots, without differences of large numbers."""
    rows, columns, other, others = (root.double() for root in (*a, *b))
    # B (x) C - B' (x) C' = B (x) (C - C') + (B - B') (x) C', and <X (x) Y, X' (x) Y'> = <X, X'> <Y, Y'>.
    by_rows, by_columns = rows - other, columns - others
    squares = rows.square().sum() * by_columns.square().sum() + by_rows.square().sum() * others.square().sum()
    return float(squares + 2 * (rows * by_rows).sum() * (by_columns * others).sum())
