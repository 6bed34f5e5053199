"""Selection among several methods by the loss at the midpoint between the two networks."""

from dataclasses import dataclass

from regauge.alignment.method import KEPT, Candidates, Method, require_kept
from regauge.alignment.methods.activation_matching import MixedMatching
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results


@dataclass(frozen=True)
class BestOf(Method):
    """A method that tries several methods and keeps the element with the lowest task loss at the midpoint.

    The objectives of different methods cannot be compared, but the task loss at the midpoint can. The inner product of
    the weights does not predict the barrier. In residual networks, results with a larger inner product can even have a
    higher barrier. The objective of `BestOf` is minus the midpoint loss, on examples that no method has seen. The
    identity is also a candidate. The result is therefore never worse than no alignment.

    Attributes:
        methods: The methods, in the order in which they are tried. If several methods are equally good, the first of
            them is kept.
        kept: The fraction of the examples that no method sees and that select the element. If 0, all examples are used
            both by the methods and for the selection.
    """

    methods: tuple[Method, ...] = (WeightMatching(), MixedMatching())
    kept: float = KEPT

    def __post_init__(self) -> None:
        require_kept(self.kept)
        if not self.methods:
            raise ValueError("there is no method to choose from; give at least one")

    def match(self, problem: Problem) -> Results:
        """Match each pair of networks; see `align`."""
        problem.require_task(self)
        problem, notes = problem.divided(self.kept)
        candidates = Candidates(problem, notes=notes)
        for method in self.methods:
            found = method.match(problem)
            candidates.offer(found.element, found.params, (*notes, *found.notes))
        return candidates.result()
