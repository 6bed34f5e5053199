"""Alignment: the element of a symmetry that brings one network closest to another."""

from regauge.align.align import AlignResult, align
from regauge.align.align_many import AlignManyResult, align_many
from regauge.align.align_pairs import AlignPairsResult, align_pairs
from regauge.align.many import ManyMatching, ManyMethod
from regauge.align.matching import Matching, Method
from regauge.align.methods.activation_matching import ActivationMatching, MixedMatching
from regauge.align.methods.best_of import BestOf
from regauge.align.methods.continuous_descent import ContinuousDescent
from regauge.align.methods.frank_wolfe import FrankWolfe
from regauge.align.methods.gaussian_matching import GaussianMatching
from regauge.align.methods.merge_many import MergeMany
from regauge.align.methods.sinkhorn import Sinkhorn
from regauge.align.methods.stack_matching import StackMatching, StackMethod
from regauge.align.methods.straight_through import StraightThrough
from regauge.align.methods.weight_matching import WeightMatching
from regauge.align.pairs import PairsMatching, PairsMethod
from regauge.align.widths.correspondence import Correspondence, correspond

__all__ = [
    "ActivationMatching",
    "AlignManyResult",
    "AlignPairsResult",
    "AlignResult",
    "BestOf",
    "ContinuousDescent",
    "Correspondence",
    "FrankWolfe",
    "GaussianMatching",
    "ManyMatching",
    "ManyMethod",
    "Matching",
    "MergeMany",
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
    "align_many",
    "align_pairs",
    "correspond",
]
