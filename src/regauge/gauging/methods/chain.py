"""The method Chain, which applies several methods one after the other."""

from dataclasses import dataclass, replace

from regauge.gauging.gauge_method import GaugeMethod, GaugeProblem
from regauge.gauging.moves import Move
from regauge.gauging.result import Chosen


@dataclass(frozen=True)
class Chain(GaugeMethod):
    """A sequence of methods. Each method starts from the previous result, and the last method defines the objective.

    Scales must come before rotations, because rotations set gains to one, and scales would change the gains again.

    Attributes:
        methods: The methods, in the order in which they are applied.
    """

    methods: tuple[GaugeMethod, ...]

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("a chain without methods does nothing; give one or more")

    @property
    def label(self) -> str:  # type: ignore[override]
        """The name, in tables, of a network that the method transformed."""
        return ", ".join(method.label for method in self.methods)

    @property
    def needs_task(self) -> bool:  # type: ignore[override]
        """Whether one of the methods needs a task."""
        return any(method.needs_task for method in self.methods)

    def choose(self, problem: GaugeProblem) -> Chosen:
        """Return the moves of all methods."""
        moves: tuple[Move, ...] = ()
        fixed: dict[tuple[str, str], None] = {}
        notes: list[str] = []
        for method in self.methods:
            found = method.choose(problem)
            params = problem.params
            for move in found.moves:
                params = move(params)
            problem = replace(problem, params=params)
            moves += found.moves
            fixed |= dict.fromkeys(found.fixed)
            notes += found.notes
        return replace(found, moves=_join(moves), fixed=tuple(fixed), notes=tuple(dict.fromkeys(notes)))


def _join(moves: tuple[Move, ...]) -> tuple[Move, ...]:
    """Join consecutive moves of the same symmetry into one move."""
    joined: list[Move] = []
    for move in moves:
        last = joined[-1] if joined else None
        if last is not None and last.symmetry == move.symmetry and not last.ones:
            joined[-1] = replace(move, element=move.symmetry.compose(move.element, last.element))
        else:
            joined.append(move)
    return tuple(joined)
