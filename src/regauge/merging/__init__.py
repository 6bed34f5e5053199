"""Merging of several networks into one: means, soups, means on spheres, and sums of task vectors."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
