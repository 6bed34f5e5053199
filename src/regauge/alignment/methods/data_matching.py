"""Mixed, activation and weight matching, and of these what is lowest halfway on examples that none has seen."""

from dataclasses import dataclass, fields, replace

import torch

from regauge.alignment.methods.activation_matching import ActivationMatching, MixedMatching
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.task import Task


@dataclass(frozen=True)
class DataMatching(MixedMatching):
    """`MixedMatching`, `ActivationMatching` or `WeightMatching`: what has the lowest loss halfway on kept examples.

    On transformers weights help; on convolutional networks with batch normalization activations alone are often better;
    with few examples weights alone can be. Nothing but data says which: a share of the examples is kept from all
    methods and chooses between their elements. The objective is that of the chosen method, so objectives of different
    pairs may differ in their units.

    Where the examples of a task cannot be split (`Task.split`), those that the methods have seen choose.

    Attributes:
        kept: The share of the examples that choose; other settings are those of `MixedMatching`.
    """

    kept: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.kept < 1:
            raise ValueError(f"kept is {self.kept}, but the share of the examples that choose lies between 0 and 1")

    def match(self, problem: Problem) -> Results:
        """See `align`; every pair gets the element that is better for it."""
        seen, kept = self._divide(problem.require_task(self))
        settings = {one.name: getattr(self, one.name) for one in fields(ActivationMatching)}
        methods = (ActivationMatching(**settings), WeightMatching(scales=self.scales))
        best = MixedMatching(**settings, share=self.share).match(replace(problem, task=seen))
        judged = replace(problem, task=kept)
        lowest = judged.midpoint_losses(best.params)
        for method in methods:
            other = method.match(replace(problem, task=seen))
            losses = judged.midpoint_losses(other.params)
            is_lower = (losses < lowest) | (lowest.isnan() & ~losses.isnan())
            notes = other.notes if bool(is_lower.all()) else best.notes
            best, lowest = replace(best.but(is_lower, other), notes=notes), torch.where(is_lower, losses, lowest)
        return best

    def _divide(self, task: Task) -> tuple[Task, Task]:
        """The examples that the methods see, and those that choose."""
        try:
            return task.split(1 - self.kept)
        except ValueError:  # There is a single example.
            return task, task
