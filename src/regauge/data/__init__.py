"""Data sets as tensors, verified by checksums."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
