"""Which transformations of a model's parameters leave its function unchanged?"""

from regauge.discover.activations import Activations, activations
from regauge.discover.discover import discover
from regauge.discover.nullity import Nullity, nullity
from regauge.discover.registry import register_leaf, register_rule
from regauge.discover.rewrites.fold import Folded, fold
from regauge.discover.trace import TraceError

__all__ = [
    "Activations",
    "Folded",
    "Nullity",
    "TraceError",
    "activations",
    "discover",
    "fold",
    "nullity",
    "register_leaf",
    "register_rule",
]
