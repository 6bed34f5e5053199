"""Posteriors over the weights of networks, aligned as distributions.

References:
    Rossi, Singh and Hannagan (2023), On permutation symmetries in Bayesian neural network posteriors.
"""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved={"Variational": "regauge.bayes:VariationalConfig"}
    | {"OneGaussian": "regauge.bayes.matching"}
    | {"PosteriorPath": "regauge.bayes.prediction.posterior_landscape"}
    | dict.fromkeys(("Bin", "Calibration", "Entropy"), "regauge.bayes.prediction.predictive")
    | {"MixturePath": "regauge.bayes.transport.posterior_mixtures"}
    | {"SquaredDistance": "regauge.bayes.posteriors.couplings"}
    | {"Displacement": "regauge.bayes.transport.wasserstein"}
    | {"Diagnostics": "regauge.bayes.variational.diagnostics"},
)
