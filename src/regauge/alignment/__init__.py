"""Alignment: functions that find the element of a symmetry that brings one network closest to another."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
