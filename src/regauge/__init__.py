"""The symmetries of neural network weights: found in PyTorch models, checked numerically, and used."""

from regauge.names import VERSION, attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)

__version__ = VERSION
