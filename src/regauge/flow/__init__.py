"""Flows over weights: networks that were never trained."""

from regauge.flow.couplings import Coupling
from regauge.flow.files import load_flow, save_flow
from regauge.flow.fitting import Config, divide, fit
from regauge.flow.flow import Flow
from regauge.flow.guiding import BatchLoss
from regauge.flow.judgement import Judgement, Score
from regauge.flow.judging import judge
from regauge.flow.nets import NETS, Metanetwork, Perceptron, Tokens
from regauge.flow.priors import PRIORS, FullGaussian, MatchedGaussian, PlainGaussian, UniformSphere
from regauge.flow.sampling import Guidance
from regauge.flow.space import Representation, Space
from regauge.flow.thesis import thesis_config
from regauge.flow.times import TIMES, BetaTime, UniformTime

__all__ = [
    "NETS",
    "PRIORS",
    "TIMES",
    "BatchLoss",
    "BetaTime",
    "Config",
    "Coupling",
    "Flow",
    "FullGaussian",
    "Guidance",
    "Judgement",
    "MatchedGaussian",
    "Metanetwork",
    "Perceptron",
    "PlainGaussian",
    "Representation",
    "Score",
    "Space",
    "Tokens",
    "UniformSphere",
    "UniformTime",
    "divide",
    "fit",
    "judge",
    "load_flow",
    "save_flow",
    "thesis_config",
]
