"""Paper 004: Bayesian neural networks aligned as distributions.

References:
    Rossi, Singh and Hannagan (2023), On permutation symmetries in Bayesian neural network posteriors.
"""

from regauge.papers.experiment import Experiment
from regauge.papers.posteriors import barriers, between, ensembles, regression, timing, toy
from regauge.papers.posteriors.configs import CONFIGS

SUMMARIES = {
    "figure4": "barriers of posteriors with and without alignment, on three data sets",
    "figure5": "barriers by width",
    "figure7": "barriers by the prior's variance",
    "figure8": "barriers by temperature",
    "figure9": "posteriors beside points, by width",
    "figure11": "filter response and layer normalization, and what their symmetries are worth",
}
EXPERIMENTS = {
    "figure1": Experiment("functions of a regression, before and after", regression.config, regression.measure),
    "figure3": Experiment("geodesics and mixtures", between.mixture_config, between.mixtures),
    "figure6": Experiment("planes of the log posterior, also figure A16", between.plane_config, between.planes),
    "figure10": Experiment("variance collapse by layer", between.collapse_config, between.collapses),
    **{name: Experiment(SUMMARIES[name], config, barriers.measure) for name, config in CONFIGS.items()},
    "figureA13": Experiment("three costs on two mirrored Gaussians", toy.config, toy.measure),
    "figureA14": Experiment("seconds to align posteriors and points", timing.config, timing.measure),
    "one-gaussian": Experiment("ensemble members and posteriors merged into one", ensembles.config, ensembles.measure),
}
