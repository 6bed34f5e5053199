"""The result of choosing a gauge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from regauge.core.element import Element
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.gauging.certificate import Certificate
from regauge.gauging.moves import Move

AS_IT_IS = "as it is"
"""The name of the unchanged network among the compared networks."""


@dataclass(frozen=True)
class Trials:
    """Equivalent networks, compared by the damage that rounding causes.

    Attributes:
        measure: The quantity by which networks are compared. Lower values are better.
        values: The quantity for each network that was tried. The unchanged network comes first.
        kept: The name of the network that was kept.
        whole: The loss of the network without rounding, if networks are compared by a loss.
        judged: The quantity on held-out data, for the given network and for the kept network.
    """

    measure: str
    values: Mapping[str, float]
    kept: str
    whole: float | None = None
    judged: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        whole = "" if self.whole is None else f" ({self.whole:.4g} before rounding)"
        judged = f"; on data that were not used for this choice: {_list_values(self.judged)}" if self.judged else ""
        return f"{self.measure}: {_list_values(self.values)}{whole}; kept: {self.kept}{judged}"


def _list_values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.4g} {name}" for name, value in values.items())


@dataclass(frozen=True)
class Chosen:
    """The choice of a method: moves to a gauge, and the objective before and after the moves.

    Attributes:
        moves: The moves that transform the network to its gauge, in order.
        objective: The objective after the moves, which the method maximizes.
        initial: The objective of the given network.
        history: The objective at the start and after each step; it never decreases.
        unit: The unit of the objective.
        fixed: Groups and gains that the method did not change, each with the reason.
        notes: Messages about the choice.
        trials: The compared networks, if several networks were compared.
    """

    moves: tuple[Move, ...]
    objective: float
    initial: float
    history: tuple[float, ...]
    unit: str
    fixed: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    trials: Trials | None = None


@dataclass(frozen=True)
class GaugeResult:
    """A network in another gauge, which computes the same function with different weights.

    `params` is `apply_moves(moves, the given network)`. If there was a single move, and no gain prevented rotations,
    `params` is also `symmetry.act(element, the given network)`.

    Attributes:
        params: The transformed network, with the same names, shapes, dtypes and devices.
        moves: The moves to the gauge, in order.
        objective: The objective, which the method maximizes. The objective is never less than `initial`.
        initial: The objective of the given network.
        history: The objective at the start and after each step; it never decreases.
        unit: The unit of the objective, such as "dB" for a signal-to-noise ratio.
        fixed: Groups and gains that were not changed, each with the reason.
        notes: Messages about the choice.
        certificate: The change of the outputs, or None if no task was given.
        trials: The compared networks, if several networks were compared.
    """

    params: Params = field(repr=False)
    moves: tuple[Move, ...] = field(repr=False)
    objective: float
    initial: float
    history: tuple[float, ...] = field(repr=False)
    unit: str = ""
    fixed: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    certificate: Certificate | None = None
    trials: Trials | None = None

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the last move, to which `element` belongs."""
        return self.moves[-1].symmetry

    @property
    def element(self) -> Element:
        """The group element that was applied last."""
        return self.moves[-1].element

    @property
    def report(self) -> str:
        """Messages about the objective, the certificate, the notes, and the groups and gains that were not changed."""
        gained = f"objective {self.initial:.4g} -> {self.objective:.4g} {self.unit}".rstrip()
        gained = gained if self.trials is None else str(self.trials)
        certified = [str(self.certificate)] if self.certificate is not None else []
        return "\n".join([gained, *certified, *self.notes, *describe_fixed(self.fixed)])

    def __str__(self) -> str:
        return self.report


def describe_fixed(fixed: Sequence[tuple[str, str]]) -> list[str]:
    """Return messages about the groups and gains that were not changed, one message for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in fixed:
        by_reason.setdefault(reason, []).append(name)
    return [
        f"not changed: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}: {reason}"
        for reason, names in by_reason.items()
    ]
