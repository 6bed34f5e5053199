"""Paper 004: Bayesian neural networks aligned as distributions.

References:
    Rossi, Singh and Hannagan (2023), On permutation symmetries in Bayesian neural network posteriors.
"""

from regauge_papers.bayesian import (
    appendix_figures,
    between_posteriors,
    ensembles,
    posterior_barriers,
    regression,
)
from regauge_papers.bayesian.barrier_figures import FIGURES
from regauge_papers.experiment import Experiment

EXPERIMENTS = {
    "figure1": Experiment("functions of a regression, before and after", regression.config, regression.measure),
    "figure2": Experiment(
        "a plane of the log posterior, MLP", between_posteriors.mlp_plane_config, between_posteriors.planes
    ),
    "figure3": Experiment("geodesics and mixtures", between_posteriors.mixture_config, between_posteriors.mixtures),
    "figure6": Experiment(
        "planes of the log posterior, also figure A16", between_posteriors.plane_config, between_posteriors.planes
    ),
    "figure10": Experiment(
        "variance collapse by layer", between_posteriors.collapse_config, between_posteriors.collapses
    ),
    **{
        name: Experiment(one.summary, one.config, posterior_barriers.measure, takes_device=True)
        for name, one in FIGURES.items()
    },
    "figureA13": Experiment(
        "three costs on two mirrored Gaussians", appendix_figures.mirrored_config, appendix_figures.match_mirrored
    ),
    "figureA14": Experiment(
        "seconds to align posteriors and points", appendix_figures.timing_config, appendix_figures.measure_times
    ),
    "one-gaussian": Experiment("ensemble members and posteriors merged into one", ensembles.config, ensembles.measure),
}
