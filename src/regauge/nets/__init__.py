"""The small model families that the examples, tests and papers use."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__, moved={"Training": "regauge.nets:ClassifierConfig"})
