"""Predictions of posteriors: their loss with its Monte Carlo error, calibration, barriers, slices, collapse."""

from regauge.bayes.prediction.calibration import Bin, Calibration
from regauge.bayes.prediction.collapse import PosteriorCollapse, posterior_collapse
from regauge.bayes.prediction.likelihoods import Categorical, Likelihood, Normal
from regauge.bayes.prediction.line import PosteriorCurve, PosteriorPath, posterior_line
from regauge.bayes.prediction.predict import predict
from regauge.bayes.prediction.predictive import Entropy, Predictive
from regauge.bayes.prediction.slices import PosteriorSlice, posterior_slice

__all__ = [
    "Bin",
    "Calibration",
    "Categorical",
    "Entropy",
    "Likelihood",
    "Normal",
    "PosteriorCollapse",
    "PosteriorCurve",
    "PosteriorPath",
    "PosteriorSlice",
    "Predictive",
    "posterior_collapse",
    "posterior_line",
    "posterior_slice",
    "predict",
]
