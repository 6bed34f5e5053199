"""Mixed and activation matching, and of both what is lower halfway on examples that neither has seen."""

from dataclasses import dataclass, fields, replace

from regauge.alignment.methods.activation_matching import ActivationMatching, MixedMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.task import Task


@dataclass(frozen=True)
class DataMatching(MixedMatching):
    """`MixedMatching` or `ActivationMatching`, whichever has the lower loss halfway on kept examples.

    On transformers weights help; on convolutional networks with batch normalization activations alone are often better.
    Nothing but data says which: a share of the examples is kept from both methods and chooses between their elements.
    The objective is that of the chosen method, so objectives of different pairs may differ in their units.

    Where the examples of a task cannot be split (`Task.split`), those that both methods have seen choose.

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
        methods = (MixedMatching(**settings, share=self.share), ActivationMatching(**settings))
        mixed, other = (method.match(replace(problem, task=seen)) for method in methods)
        judged = replace(problem, task=kept)
        first, second = (judged.midpoint_losses(found.params) for found in (mixed, other))
        is_lower = (second < first) | (first.isnan() & ~second.isnan())
        notes = other.notes if bool(is_lower.all()) else mixed.notes
        return replace(mixed.but(is_lower, other), notes=notes)

    def _divide(self, task: Task) -> tuple[Task, Task]:
        """The examples that the methods see, and those that choose."""
        try:
            return task.split(1 - self.kept)
        except ValueError:  # There is a single example.
            return task, task
