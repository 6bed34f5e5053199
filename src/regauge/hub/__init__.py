"""Models, networks and data by name, and the model, inputs, tokens and configuration of a transformers folder."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
