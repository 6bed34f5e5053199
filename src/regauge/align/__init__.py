"""Alignment: the element of a symmetry that brings one network closest to another."""

from regauge.align.activation_matching import ActivationMatching, MixedMatching
from regauge.align.align import AlignResult, align
from regauge.align.align_pairs import AlignPairsResult, align_pairs
from regauge.align.best_of import BestOf
from regauge.align.correspondence import Correspondence, correspond
from regauge.align.gaussian_matching import GaussianMatching
from regauge.align.matching import Matching, Method
from regauge.align.pairs import PairsMatching, PairsMethod
from regauge.align.sinkhorn import Sinkhorn
from regauge.align.stack_matching import StackMatching, StackMethod
from regauge.align.straight_through import StraightThrough
from regauge.align.weight_matching import WeightMatching

__all__ = [
    "ActivationMatching",
    "AlignPairsResult",
    "AlignResult",
    "BestOf",
    "Correspondence",
    "GaussianMatching",
    "Matching",
    "Method",
    "MixedMatching",
    "PairsMatching",
    "PairsMethod",
    "Sinkhorn",
    "StackMatching",
    "StackMethod",
    "StraightThrough",
    "WeightMatching",
    "align",
    "align_pairs",
    "correspond",
]
