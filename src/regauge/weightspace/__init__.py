"""Networks that read and write the weights of networks."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
