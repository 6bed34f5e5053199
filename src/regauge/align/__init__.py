"""Alignment: the element of a symmetry that brings one network closest to another."""

from regauge.align.align import AlignResult, align
from regauge.align.matching import Matching, Method
from regauge.align.weight_matching import WeightMatching

__all__ = ["AlignResult", "Matching", "Method", "WeightMatching", "align"]
