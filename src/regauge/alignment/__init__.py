"""Alignment: the element of a symmetry that brings one network closest to another."""

from regauge.alignment.align import align
from regauge.alignment.align_many import align_many
from regauge.alignment.align_pairs import align_pairs
from regauge.alignment.method import ManyMethod, Method
from regauge.alignment.methods.activation_matching import ActivationMatching, MixedMatching
from regauge.alignment.methods.best_of import BestOf
from regauge.alignment.methods.continuous_descent import ContinuousDescent
from regauge.alignment.methods.frank_wolfe import FrankWolfe
from regauge.alignment.methods.gaussian_matching import GaussianMatching
from regauge.alignment.methods.joint_matching import JointMatching
from regauge.alignment.methods.merge_many import MergeMany
from regauge.alignment.methods.sinkhorn import Sinkhorn
from regauge.alignment.methods.straight_through import StraightThrough
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import ManyProblem, Problem
from regauge.alignment.result import ManyResult, Result, Results
from regauge.alignment.widths.correspondence import Correspondence, correspond

__all__ = [
    "ActivationMatching",
    "BestOf",
    "ContinuousDescent",
    "Correspondence",
    "FrankWolfe",
    "GaussianMatching",
    "JointMatching",
    "ManyMethod",
    "ManyProblem",
    "ManyResult",
    "MergeMany",
    "Method",
    "MixedMatching",
    "Problem",
    "Result",
    "Results",
    "Sinkhorn",
    "StraightThrough",
    "WeightMatching",
    "align",
    "align_many",
    "align_pairs",
    "correspond",
]
