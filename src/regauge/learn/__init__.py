"""Trained networks over networks: predictors, autoencoders, learned matching."""

from regauge.learn.autoencoder import Autoencoder, LatentPath, load_autoencoder
from regauge.learn.autoencoder_training import AutoencoderConfig, fit_autoencoder
from regauge.learn.changes import Dropout, Noise, Pruning, Rotation, Scaling, Translation
from regauge.learn.function_losses import Distillation, SquaredError
from regauge.learn.hyper_match import HyperMatching, hyper_match
from regauge.learn.learned_matching import LearnedMatching, load_matching
from regauge.learn.matching_training import MatchingConfig, fit_matching
from regauge.learn.predictor import Predictor, load_predictor
from regauge.learn.predictor_config import PredictorConfig
from regauge.learn.predictor_training import fit_predictor
from regauge.learn.rendering import grid

__all__ = [
    "Autoencoder",
    "AutoencoderConfig",
    "Distillation",
    "Dropout",
    "HyperMatching",
    "LatentPath",
    "LearnedMatching",
    "MatchingConfig",
    "Noise",
    "Predictor",
    "PredictorConfig",
    "Pruning",
    "Rotation",
    "Scaling",
    "SquaredError",
    "Translation",
    "fit_autoencoder",
    "fit_matching",
    "fit_predictor",
    "grid",
    "hyper_match",
    "load_autoencoder",
    "load_matching",
    "load_predictor",
]
