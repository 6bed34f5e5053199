"""Models, networks and data, opened by name. The package also reads models, inputs, tokens and configurations of
transformers folders."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
