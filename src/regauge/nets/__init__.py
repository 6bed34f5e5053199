"""The small model families used in the examples, tests and papers."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__, moved={"Training": "regauge.nets:ClassifierConfig"})
