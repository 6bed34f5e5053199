"""Posteriors of laplace-torch: Gaussians at a trained network with diagonal or Kronecker-factored curvature."""

from typing import Any

from torch import Tensor

from regauge.bayes.importers.checks import gaussian, names_of, split
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior, Term
from regauge.core.params import require_finite


def from_laplace(laplace: Any) -> GaussianPosterior | KroneckerPosterior:
    """The posterior of a fitted `DiagLaplace` or `KronLaplace`, over all weights or those that required gradients.

    `KronLaplace` has the precision `G (x) A + delta I` for a weight, whose inverse is no Kronecker product; it becomes
    the posterior with precision `(G + c/pi I) (x) (A + c pi I)`, c^2 = delta (`KroneckerPosterior.from_kfac`), which is
    a little narrower. Biases and other vectors keep their standard deviations and lose their correlations.

    Args:
        laplace: A fitted `laplace.Laplace(...)`.

    Raises:
        ValueError: It is not fitted, its covariance is neither diagonal nor Kronecker-factored, or it covers something
            else than parameters of its model (a last-layer approximation).

    References:
        Daxberger et al. (2021), Laplace redux, section 2; Ritter et al. (2018), section 3.
    """
    source = f"the {type(laplace).__name__}"
    flat = laplace.mean
    if not isinstance(flat, Tensor):
        raise ValueError(f"{source} is not fitted; call its `fit` with the training data first")
    names = names_of(laplace.params, laplace.model, source)
    parameters = dict(zip(names, laplace.params, strict=True))
    mean = {**laplace.model.state_dict(), **split(flat, parameters, f"the mean of {source}")}
    mean = {name: tensor.detach().clone() for name, tensor in mean.items()}
    require_finite(mean, f"the means of {source}")
    precision = laplace.posterior_precision
    if isinstance(precision, Tensor) and precision.ndim == 1:
        return gaussian(mean, split(precision.detach().rsqrt(), parameters, f"the precision of {source}"), source)
    blocks = getattr(precision, "eigenvalues", None)
    if blocks is None or isinstance(precision, Tensor):
        raise ValueError(
            f"{source} is neither diagonal nor Kronecker-factored; fit one with hessian_structure='diag' or 'kron', or "
            "draw samples and read them with `from_samples`"
        )
    if len(blocks) != len(names):
        raise ValueError(f"{source} has {len(blocks)} blocks of curvature for the {len(names)} parameters of its model")
    deltas = precision.deltas.detach().expand(len(names))
    terms: dict[str, tuple[Term, ...]] = {}
    std: dict[str, Tensor] = {}
    for name, values, vectors, delta in zip(names, blocks, precision.eigenvectors, deltas.tolist(), strict=True):
        if len(values) == 1:
            variance = vectors[0].detach().square() @ (values[0].detach() + delta).reciprocal()
            std[name] = variance.sqrt().view(mean[name].shape)
        else:
            over_rows, over_columns = ((q * v) @ q.mT for q, v in zip(vectors, values, strict=True))
            block = KroneckerPosterior.from_kfac(
                mean, {name: (over_rows.detach(), over_columns.detach())}, examples=1, prior_precision=delta
            )
            terms |= block.terms
    require_finite(std, f"the standard deviations of {source}")
    return KroneckerPosterior(mean, terms, std) if terms else gaussian(mean, std, source)
