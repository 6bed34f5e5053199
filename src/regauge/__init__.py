"""The symmetries of neural network weights: found in any PyTorch model, proved numerically, and used."""

from regauge.core.element import Element, Value
from regauge.core.groups import Group, Placement
from regauge.core.params import Params
from regauge.core.symmetry import Frozen, Symmetry
from regauge.core.verification import Check

__version__ = "0.1.0"

__all__ = [
    "Check",
    "Element",
    "Frozen",
    "Group",
    "Params",
    "Placement",
    "Symmetry",
    "Value",
    "__version__",
]
