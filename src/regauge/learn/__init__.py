"""Trained networks over networks: predictors, learned matching."""

from regauge.learn.changes import Dropout, Noise, Rotation, Scaling, Translation
from regauge.learn.hyper_match import HyperMatching, hyper_match
from regauge.learn.predictor import Predictor, load_predictor
from regauge.learn.predictor_training import PredictorConfig, fit_predictor
from regauge.learn.rendering import grid

__all__ = [
    "Dropout",
    "HyperMatching",
    "Noise",
    "Predictor",
    "PredictorConfig",
    "Rotation",
    "Scaling",
    "Translation",
    "fit_predictor",
    "grid",
    "hyper_match",
    "load_predictor",
]
