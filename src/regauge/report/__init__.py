"""Figures and self-contained HTML pages, made only from result files."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
