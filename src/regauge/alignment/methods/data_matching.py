"""Selection among mixed, activation and weight matching by the midpoint loss on examples that no method has seen."""

from dataclasses import dataclass, replace

import torch

from regauge.alignment.method import KEPT, require_kept
from regauge.alignment.methods.activation_matching import TIES, MixedMatching
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results


@dataclass(frozen=True)
class DataMatching(MixedMatching):
    """The best of `MixedMatching`, `ActivationMatching` and `WeightMatching`, selected by the midpoint loss.

    For transformers, weights improve the match. For convolutional networks with batch normalization, activations alone
    are often better. With few examples, weights alone can be better. Only data can show which method is best. Therefore
    a fraction of the examples is hidden from all three methods, and selects the best of their elements. The reported
    objective is the objective of the selected method. Two pairs may have different selected methods, so their
    objectives are not comparable.

    If the examples of a task cannot be split (`Task.split`), the selection uses examples that the methods have seen. If
    matching and selection use the same examples, a note in the result states this.

    Attributes:
        kept: The fraction of the examples that are held out for the selection. If 0, all examples are used both for
            matching and for the selection. All other settings are those of `MixedMatching`.
    """

    kept: float = KEPT

    def __post_init__(self) -> None:
        super().__post_init__()
        require_kept(self.kept)

    def match(self, problem: Problem) -> Results:
        """Match each pair of networks; see `align`. Every pair gets the element that is best for this pair."""
        problem.require_task(self)
        problem, told = problem.divided(self.kept)
        best, activation = self._match_weighted(problem, (1 - self.share, TIES))
        lowest = problem.line_losses(best.params)
        for other in (activation, WeightMatching(scales=self.scales).match(problem)):
            losses = problem.line_losses(other.params)
            is_lower = (losses < lowest) | (lowest.isnan() & ~losses.isnan())
            notes = other.notes if bool(is_lower.all()) else best.notes
            best, lowest = replace(best.but(is_lower, other), notes=notes), torch.where(is_lower, losses, lowest)
        return replace(best, notes=(*told, *best.notes))
