"""Figures and self-contained HTML pages, from result files only."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
