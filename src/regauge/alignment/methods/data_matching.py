"""The best of mixed, activation and weight matching, by the loss halfway on examples that no method has seen."""

from dataclasses import dataclass, fields, replace

import torch

from regauge.alignment.method import KEPT, require_kept
from regauge.alignment.methods.activation_matching import ActivationMatching, MixedMatching
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results


@dataclass(frozen=True)
class DataMatching(MixedMatching):
    """`MixedMatching`, `ActivationMatching` or `WeightMatching`, whichever has the lowest loss halfway on kept
    examples.

    On transformers weights help. On convolutional networks with batch normalization, activations alone are often
    better. With few examples, weights alone can be better. Only data can decide which method is best. A share of the
    examples is therefore kept from all methods and serves to choose between their elements. The objective is that of
    the chosen method, so objectives of different pairs may differ in their units.

    If the examples of a task cannot be split (`Task.split`), the choice uses the examples that the methods have seen. A
    note of the result then reports this.

    Attributes:
        kept: The share of the examples that choose; with 0 all do. Other settings are those of `MixedMatching`.
    """

    kept: float = KEPT

    def __post_init__(self) -> None:
        super().__post_init__()
        require_kept(self.kept)

    def match(self, problem: Problem) -> Results:
        """See `align`; every pair gets the element that is best for this pair."""
        problem.require_task(self)
        problem, told = problem.divided(self.kept)
        settings = {one.name: getattr(self, one.name) for one in fields(ActivationMatching)}
        methods = (ActivationMatching(**settings), WeightMatching(scales=self.scales))
        best = MixedMatching(**settings, share=self.share).match(problem)
        lowest = problem.line_losses(best.params)
        for method in methods:
            other = method.match(problem)
            losses = problem.line_losses(other.params)
            is_lower = (losses < lowest) | (lowest.isnan() & ~losses.isnan())
            notes = other.notes if bool(is_lower.all()) else best.notes
            best, lowest = replace(best.but(is_lower, other), notes=notes), torch.where(is_lower, losses, lowest)
        return replace(best, notes=(*told, *best.notes))
