"""Posteriors as values: diagonal and Kronecker-factored Gaussians, low-rank Gaussians, particles."""

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.bayes.posteriors.posterior import Noise, Posterior

__all__ = [
    "GaussianPosterior",
    "KroneckerPosterior",
    "LowRankPosterior",
    "Noise",
    "ParticlePosterior",
    "Posterior",
]
