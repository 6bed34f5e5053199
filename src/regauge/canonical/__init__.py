"""Canonical forms: one representative network for each orbit, and the manifold of all canonical networks."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
