"""Posteriors over the weights of networks, and the alignment of posteriors by symmetry.

References:
    Rossi, Singh and Hannagan (2023), On permutation symmetries in Bayesian neural network posteriors.
"""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved=dict.fromkeys(
        ("PosteriorCollapse", "PosteriorPath", "PosteriorSlice"), "regauge.bayes.prediction.posterior_landscape"
    )
    | dict.fromkeys(("Bin", "Calibration", "Entropy"), "regauge.bayes.prediction.predictive")
    | {
        "Diagnostics": "regauge.bayes.variational.diagnostics",
        "Displacement": "regauge.bayes.transport.wasserstein",
        "MixturePath": "regauge.bayes.transport.posterior_mixtures",
        "OneGaussian": "regauge.bayes.matching",
        "SquaredDistance": "regauge.bayes.posteriors.couplings",
        "Variational": "regauge.bayes:VariationalConfig",
        "align": "regauge.bayes:align_posteriors",
        "align_many": "regauge.bayes:align_many_posteriors",
    },
)
