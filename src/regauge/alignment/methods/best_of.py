"""The best of several methods by the loss halfway between the two networks."""

from dataclasses import dataclass

from regauge.alignment.method import KEPT, Candidates, Method, require_kept
from regauge.alignment.methods.activation_matching import MixedMatching
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results


@dataclass(frozen=True)
class BestOf(Method):
    """Every method is tried, and the element with the lowest task loss at the midpoint is kept.

    The objectives of different methods cannot be compared. The inner product of the weights does not predict the
    barrier; on residual networks a larger product can even come with a higher barrier. The loss halfway between the
    networks can be compared. The objective of this method is minus that loss, on examples that no method has seen. The
    identity is also a candidate, so the result is never worse than no alignment.

    Attributes:
        methods: The methods in the order in which they are tried; the first of equally good ones is kept.
        kept: The share of the examples that choose and that no method sees; with 0 all choose.
    """

    methods: tuple[Method, ...] = (WeightMatching(), MixedMatching())
    kept: float = KEPT

    def __post_init__(self) -> None:
        require_kept(self.kept)
        if not self.methods:
            raise ValueError("there is no method to choose from; give at least one")

    def match(self, problem: Problem) -> Results:
        """See `align`."""
        problem.require_task(self)
        problem, notes = problem.divided(self.kept)
        candidates = Candidates(problem, notes=notes)
        for method in self.methods:
            found = method.match(problem)
            candidates.offer(found.element, found.params, (*notes, *found.notes))
        return candidates.result()
