"""Which transformations of a model's parameters leave its function unchanged?"""

from regauge.discovery.activations import Activations, activations
from regauge.discovery.discover import discover
from regauge.discovery.nullity import Nullity, nullity
from regauge.discovery.registry import register_leaf, register_rule
from regauge.discovery.rewrites.fold import Folded, fold
from regauge.discovery.trace import TraceError

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
