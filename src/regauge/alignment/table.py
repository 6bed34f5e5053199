"""The table of methods, which the command line, the docs and the tests read. This module imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from regauge.alignment.method import Method


@dataclass(frozen=True)
class MethodRow:
    """A row of the table of methods: the module and class of a method, its inputs and its requirements.

    Attributes:
        module: The module of the method; a name without dots is a file in `alignment/methods`.
        name: The name of the class of the method.
        takes: "pairs" for a method that aligns pairs of networks, "many" for many networks at once, and "joint" for
            networks that each consist of several dictionaries.
        needs_data: Whether the method needs a task.
        without_data: Settings under which the method needs no task, if there are any.
    """

    module: str
    name: str
    takes: Literal["pairs", "many", "joint"] = "pairs"
    needs_data: bool = False
    without_data: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> "type[Method]":
        """Import the class of the method."""
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
"""Every public method, by its name on the command line; those that are "joint" have no command."""
