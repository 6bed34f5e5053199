"""Alignment: the element of a symmetry that brings one network closest to another."""

from regauge.alignment.align import AlignResult, align
from regauge.alignment.align_many import AlignManyResult, align_many
from regauge.alignment.align_pairs import AlignPairsResult, align_pairs
from regauge.alignment.many import ManyMatching, ManyMethod
from regauge.alignment.matching import Matching, Method
from regauge.alignment.methods.activation_matching import ActivationMatching, MixedMatching
from regauge.alignment.methods.best_of import BestOf
from regauge.alignment.methods.continuous_descent import ContinuousDescent
from regauge.alignment.methods.frank_wolfe import FrankWolfe
from regauge.alignment.methods.gaussian_matching import GaussianMatching
from regauge.alignment.methods.merge_many import MergeMany
from regauge.alignment.methods.sinkhorn import Sinkhorn
from regauge.alignment.methods.stack_matching import StackMatching, StackMethod
from regauge.alignment.methods.straight_through import StraightThrough
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.pairs import PairsMatching, PairsMethod
from regauge.alignment.widths.correspondence import Correspondence, correspond

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
