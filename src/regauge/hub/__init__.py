"""What a folder of transformers is: its model, inputs, tokens and configuration; models, networks and data by name."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
