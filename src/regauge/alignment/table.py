"""The table of methods, which the command line, the documentation and the tests read.

This module imports no large packages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from regauge.alignment.method import Method


@dataclass(frozen=True)
class MethodRow:
    """A row of the table of methods: the module and class of a method, and the inputs that it takes and needs.

    Attributes:
        module: The module of the method. A name without dots is the name of a file in `alignment/methods`.
        name: The class name of the method.
        takes: "pairs" if the method aligns pairs of networks, "many" if it aligns many networks at once, and "joint" if
            each network consists of several dictionaries.
        needs_data: Whether the method needs a task.
        without_data: Settings with which the method needs no task, if there are any.
    """

    module: str
    name: str
    takes: Literal["pairs", "many", "joint"] = "pairs"
    needs_data: bool = False
    without_data: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> "type[Method]":
        """Import and return the class of the method."""
        module = self.module if "." in self.module else f"regauge.alignment.methods.{self.module}"
        method: type[Method] = getattr(import_module(module), self.name)
        return method


METHODS = {
    "weights": MethodRow("weight_matching", "WeightMatching"),
    "activations": MethodRow("activation_matching", "ActivationMatching", needs_data=True),
    "data": MethodRow("data_matching", "DataMatching", needs_data=True),
    "mixed": MethodRow("activation_matching", "MixedMatching", needs_data=True),
    "frank-wolfe": MethodRow("frank_wolfe", "FrankWolfe", takes="many"),
    "straight-through": MethodRow("straight_through", "StraightThrough", needs_data=True),
    "sinkhorn": MethodRow("sinkhorn", "Sinkhorn", needs_data=True, without_data={"loss": "l2"}),
    "continuous-descent": MethodRow("continuous_descent", "ContinuousDescent", needs_data=True),
    "best-of": MethodRow("best_of", "BestOf", needs_data=True),
    "merge-many": MethodRow("merge_many", "MergeMany", takes="many"),
    "gaussian": MethodRow("gaussian_matching", "GaussianMatching", takes="joint"),
    "joint": MethodRow("joint_matching", "JointMatching", takes="joint"),
}
"""Every public method, by its name on the command line. Methods that take "joint" networks are not on the command
line."""
