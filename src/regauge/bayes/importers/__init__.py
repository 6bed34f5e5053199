"""Posteriors of other libraries, read from their objects; none of the libraries is imported."""

from regauge.bayes.importers.bayesian_torch import from_bayesian_torch
from regauge.bayes.importers.ivon import from_ivon
from regauge.bayes.importers.laplace import from_laplace
from regauge.bayes.importers.posteriors_library import from_posteriors, log_posterior
from regauge.bayes.importers.samples import from_ensemble, from_samples
from regauge.bayes.importers.swag import from_swag

__all__ = [
    "from_bayesian_torch",
    "from_ensemble",
    "from_ivon",
    "from_laplace",
    "from_posteriors",
    "from_samples",
    "from_swag",
    "log_posterior",
]
