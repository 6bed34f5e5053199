"""Posteriors moved along their orbits: one to another, many into one universe, many merged into one Gaussian."""

from regauge.bayes.matching.barycenter import barycenter
from regauge.bayes.matching.many import PosteriorsAlignment, align_many
from regauge.bayes.matching.merging import OneGaussian, one_gaussian
from regauge.bayes.matching.pairs import PosteriorAlignment, align

__all__ = [
    "OneGaussian",
    "PosteriorAlignment",
    "PosteriorsAlignment",
    "align",
    "align_many",
    "barycenter",
    "one_gaussian",
]
