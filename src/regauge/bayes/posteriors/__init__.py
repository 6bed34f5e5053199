"""Posteriors as values: diagonal and Kronecker-factored Gaussians, low-rank Gaussians, particles."""

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.posterior import Noise, Posterior

__all__ = ["GaussianPosterior", "Noise", "Posterior"]
