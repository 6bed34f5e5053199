"""Paper 004: Bayesian neural networks aligned as distributions.

References:
    Rossi, Singh and Hannagan (2023), On permutation symmetries in Bayesian neural network posteriors.
"""

from regauge.papers.bayesian import (
    alignment_time,
    between_posteriors,
    ensembles,
    mirrored_gaussians,
    posterior_barriers,
    regression,
)
from regauge.papers.bayesian.barrier_figures import FIGURES
from regauge.papers.experiment import Experiment

EXPERIMENTS = {
    "figure1": Experiment("functions of a regression, before and after", regression.config, regression.measure),
    "figure3": Experiment("geodesics and mixtures", between_posteriors.mixture_config, between_posteriors.mixtures),
    "figure6": Experiment(
        "planes of the log posterior, also figure A16", between_posteriors.plane_config, between_posteriors.planes
    ),
    "figure10": Experiment(
        "variance collapse by layer", between_posteriors.collapse_config, between_posteriors.collapses
    ),
    **{name: Experiment(one.summary, one.config, posterior_barriers.measure) for name, one in FIGURES.items()},
    "figureA13": Experiment(
        "three costs on two mirrored Gaussians", mirrored_gaussians.config, mirrored_gaussians.measure
    ),
    "figureA14": Experiment("seconds to align posteriors and points", alignment_time.config, alignment_time.measure),
    "one-gaussian": Experiment("ensemble members and posteriors merged into one", ensembles.config, ensembles.measure),
}
