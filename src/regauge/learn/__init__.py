"""Neural networks trained on networks: predictors, autoencoders and learned matching."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__, moved={"HyperMatching": "regauge.learn:HyperMatchingConfig"})
