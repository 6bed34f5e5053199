"""The symmetries of neural network weights: found in any PyTorch model, proved numerically, and used.

The names below are imported when they are first used, so that `regauge --help` answers without loading torch.
To make a name public, add it to the imports for type checkers and to the table of homes.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regauge import bayes, connect, inr, learn, weightspace, zoo
    from regauge.alignment import (
        ActivationMatching,
        AlignManyResult,
        AlignPairsResult,
        AlignResult,
        BestOf,
        ContinuousDescent,
        Correspondence,
        FrankWolfe,
        GaussianMatching,
        MergeMany,
        MixedMatching,
        Sinkhorn,
        StackMatching,
        StraightThrough,
        WeightMatching,
        align,
        align_many,
        align_pairs,
        correspond,
    )
    from regauge.canonical import (
        Manifold,
        canonical_element,
        canonical_manifold,
        canonicalize,
        normalize_logits,
        orbit_distance,
    )
    from regauge.connect import (
        Bezier,
        Curve,
        Geodesic,
        Plane,
        PolygonalChain,
        Repaired,
        Straight,
        VarianceCollapse,
        WassersteinGeodesic,
        line,
        plane,
        repair,
        reset_batchnorm,
        train_path,
        variance_collapse,
    )
    from regauge.core.element import Element, Value
    from regauge.core.groups import Group, Placement
    from regauge.core.params import Params
    from regauge.core.symmetry import Frozen, Symmetry
    from regauge.core.task import Task
    from regauge.core.verification import Check
    from regauge.discovery import Folded, Nullity, TraceError, discover, fold, nullity, register_leaf, register_rule
    from regauge.merging import (
        Average,
        Dare,
        GreedySoup,
        Merged,
        MergeRecord,
        TaskArithmetic,
        Ties,
        merge,
        merge_widths,
        merged,
    )

__version__ = "0.1.0"

_HOMES = {
    "ActivationMatching": "regauge.alignment",
    "AlignManyResult": "regauge.alignment",
    "AlignPairsResult": "regauge.alignment",
    "AlignResult": "regauge.alignment",
    "Average": "regauge.merging",
    "BestOf": "regauge.alignment",
    "Bezier": "regauge.connect",
    "Check": "regauge.core.verification",
    "ContinuousDescent": "regauge.alignment",
    "Correspondence": "regauge.alignment",
    "Curve": "regauge.connect",
    "Dare": "regauge.merging",
    "Element": "regauge.core.element",
    "Folded": "regauge.discovery",
    "FrankWolfe": "regauge.alignment",
    "Frozen": "regauge.core.symmetry",
    "GaussianMatching": "regauge.alignment",
    "Geodesic": "regauge.connect",
    "GreedySoup": "regauge.merging",
    "Group": "regauge.core.groups",
    "Manifold": "regauge.canonical",
    "MergeMany": "regauge.alignment",
    "MergeRecord": "regauge.merging",
    "Merged": "regauge.merging",
    "MixedMatching": "regauge.alignment",
    "Nullity": "regauge.discovery",
    "Params": "regauge.core.params",
    "Placement": "regauge.core.groups",
    "Plane": "regauge.connect",
    "PolygonalChain": "regauge.connect",
    "Repaired": "regauge.connect",
    "Sinkhorn": "regauge.alignment",
    "StackMatching": "regauge.alignment",
    "Straight": "regauge.connect",
    "StraightThrough": "regauge.alignment",
    "Symmetry": "regauge.core.symmetry",
    "Task": "regauge.core.task",
    "TaskArithmetic": "regauge.merging",
    "Ties": "regauge.merging",
    "TraceError": "regauge.discovery",
    "Value": "regauge.core.element",
    "VarianceCollapse": "regauge.connect",
    "WassersteinGeodesic": "regauge.connect",
    "WeightMatching": "regauge.alignment",
    "align": "regauge.alignment",
    "align_many": "regauge.alignment",
    "align_pairs": "regauge.alignment",
    "canonical_element": "regauge.canonical",
    "canonical_manifold": "regauge.canonical",
    "canonicalize": "regauge.canonical",
    "correspond": "regauge.alignment",
    "discover": "regauge.discovery",
    "fold": "regauge.discovery",
    "line": "regauge.connect",
    "merge": "regauge.merging",
    "merge_widths": "regauge.merging",
    "merged": "regauge.merging",
    "normalize_logits": "regauge.canonical",
    "nullity": "regauge.discovery",
    "orbit_distance": "regauge.canonical",
    "plane": "regauge.connect",
    "register_leaf": "regauge.discovery",
    "register_rule": "regauge.discovery",
    "repair": "regauge.connect",
    "reset_batchnorm": "regauge.connect",
    "train_path": "regauge.connect",
    "variance_collapse": "regauge.connect",
}

__all__ = [
    "ActivationMatching",
    "AlignManyResult",
    "AlignPairsResult",
    "AlignResult",
    "Average",
    "BestOf",
    "Bezier",
    "Check",
    "ContinuousDescent",
    "Correspondence",
    "Curve",
    "Dare",
    "Element",
    "Folded",
    "FrankWolfe",
    "Frozen",
    "GaussianMatching",
    "Geodesic",
    "GreedySoup",
    "Group",
    "Manifold",
    "MergeMany",
    "MergeRecord",
    "Merged",
    "MixedMatching",
    "Nullity",
    "Params",
    "Placement",
    "Plane",
    "PolygonalChain",
    "Repaired",
    "Sinkhorn",
    "StackMatching",
    "Straight",
    "StraightThrough",
    "Symmetry",
    "Task",
    "TaskArithmetic",
    "Ties",
    "TraceError",
    "Value",
    "VarianceCollapse",
    "WassersteinGeodesic",
    "WeightMatching",
    "__version__",
    "align",
    "align_many",
    "align_pairs",
    "bayes",
    "canonical_element",
    "canonical_manifold",
    "canonicalize",
    "connect",
    "correspond",
    "discover",
    "fold",
    "inr",
    "learn",
    "line",
    "merge",
    "merge_widths",
    "merged",
    "normalize_logits",
    "nullity",
    "orbit_distance",
    "plane",
    "register_leaf",
    "register_rule",
    "repair",
    "reset_batchnorm",
    "train_path",
    "variance_collapse",
    "weightspace",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in ("bayes", "connect", "inr", "learn", "weightspace", "zoo"):
        return import_module(f"regauge.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'regauge' has no attribute {name!r}; its names are {__all__}")
    value = getattr(import_module(_HOMES[name]), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
