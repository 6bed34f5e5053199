"""Posteriors over the weights of networks, aligned as distributions.

References:
    Rossi, Singh and Hannagan (2023), On permutation symmetries in Bayesian neural network posteriors.
"""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
