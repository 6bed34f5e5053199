"""Matching of checkpoints on disk by their representatives, which are networks without translations and gains. Results
are in the coordinates of the first checkpoint.

Streamed checkpoints are matched in the same steps as networks in memory; see `regauge.alignment.representatives`. A
match by permutations decides whether residual streams are rotated. Near copies are also matched without
representatives. For copies, elements that keep the function only with the stored statistics are applied last.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from regauge.alignment.engine.frames import move_by
from regauge.alignment.engine.refit import is_near_copy
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.representatives import (
    COPY,
    Rotate,
    RotationChoice,
    add_difference,
    are_rotated,
    on_matched,
    rotated_tensors,
    write,
)
from regauge.alignment.streamed.balancing import balance_streamed
from regauge.alignment.streamed.match import StreamedResult
from regauge.alignment.streamed.passes import Passes
from regauge.alignment.streamed.plan import Plan
from regauge.alignment.streamed.source import Moved, measure_square
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.representative_checkpoint import MovedCheckpoint, RepresentativeCheckpoint
from regauge.core.balance import has_balance
from regauge.core.chart import chart_gains, into_coordinates
from regauge.core.element import Element
from regauge.core.families import dot, move_tensor, row_ranges
from regauge.core.params import work_dtype
from regauge.core.progress import ALONE, Crew, Progress
from regauge.core.symmetry import Symmetry

Run = Callable[[str, Checkpoint, Checkpoint, Plan, WeightMatching], StreamedResult]
"""A function that matches two checkpoints in one stage of the work. If an earlier run did not finish this stage, the
function resumes it."""


@dataclass(frozen=True)
class ChartPlans:
    """The plans of the stages in which representatives are matched.

    Attributes:
        symmetry: The symmetry of the networks. All sizes of its groups must be known.
        method: The alignment method.
        rotate: The caller's choice for rotations: "auto", "always" or "never".
        plans: The plan of each stage. The stage "orders" decides whether to rotate. The stages "reordered" and
            "rotated" match with the chosen method. For near copies, the stage "given" matches the stored networks.
    """

    symmetry: Symmetry
    method: WeightMatching
    rotate: Rotate
    plans: Mapping[str, Plan]

    @classmethod
    def make(
        cls, symmetry: Symmetry, method: WeightMatching, rotate: Rotate, plan: Callable[..., Plan]
    ) -> "ChartPlans":
        """Plan all stages of matching that may be needed, each by calling `plan(symmetry, method, chart)`."""
        data, is_open = on_matched(symmetry), rotate != "never" and bool(symmetry.rotatable)
        behind = data.on_representatives()
        plans = {"given": plan(data, _as_given(method), data), "reordered": plan(behind, method, data)}
        if is_open:
            plans["rotated"] = plan(data.on_representatives(rotate=True), method, data)
        plans["orders"] = plans["reordered"] if method == WeightMatching() else plan(behind, WeightMatching(), data)
        return cls(symmetry, method, rotate, plans)

    @property
    def first(self) -> Plan:
        """The plan of the first stage, which has the largest memory bound of all stages."""
        stage = "rotated" if self.rotate == "always" and "rotated" in self.plans else "orders"
        return replace(self.plans[stage], peak=max(plan.peak for plan in self.plans.values()))

    def match(
        self, checkpoints: Iterable[Checkpoint], runs: Iterable[Run], progress: Progress, crew: Crew = ALONE
    ) -> list[StreamedResult]:
        """Match all further checkpoints to the first checkpoint. Either all networks are rotated, or none."""
        first, *others = checkpoints
        pairs = [_ChartedPair(self, first, other, run, progress, crew) for other, run in zip(others, runs, strict=True)]
        choices = [pair.choose() for pair in pairs]
        is_rotated = are_rotated(choices)
        return [pair.match(choice, is_rotated) for pair, choice in zip(pairs, choices, strict=True)]


def _as_given(method: WeightMatching) -> WeightMatching:
    """Return the method that matches near copies as they are stored, without removing translations and gains."""
    return WeightMatching(scales=method.scales)


@dataclass
class _ChartedPair:
    """Two checkpoints that are matched by their representatives."""

    chart: ChartPlans
    a: Checkpoint
    b: Checkpoint
    run: Run
    progress: Progress
    crew: Crew

    def __post_init__(self) -> None:
        self._data = on_matched(self.chart.symmetry)
        self._timings: list[str] = []
        self._passes = Passes((self.a, self.b), self._timings, self.progress, self.crew)

    @cached_property
    def _behind(self) -> tuple[RepresentativeCheckpoint, RepresentativeCheckpoint]:
        return RepresentativeCheckpoint(self.a, self._data), RepresentativeCheckpoint(self.b, self._data)

    def choose(self) -> RotationChoice[StreamedResult]:
        """Choose between rotations and permutations of the residual streams."""
        return RotationChoice.of(self._data, self._behind, self.chart.rotate, self._explain)

    def match(self, choice: RotationChoice[StreamedResult], is_rotated: bool) -> StreamedResult:
        """Match the second network to the first, and map it to the coordinates of the first."""
        method, names = self.chart.method, self._data.rotatable if is_rotated else ()
        found = choice.known
        if found is None or is_rotated or method != WeightMatching():
            found = self._run("rotated" if is_rotated else "reordered", *self._behind, method)
        a, b = self._behind
        element, notes = write(self._data, found.element, names, self.a, (b.coordinates, a.coordinates))
        if not names:
            element = self._settle(element)
        if self.chart.symmetry != self._data:
            element = self._take_over_statistics(element)
        told = tuple(dict.fromkeys((*found.notes, *notes, *choice.notes)))
        return replace(found, symmetry=self.chart.symmetry, element=element, notes=told, timings=tuple(self._timings))

    def _run(self, stage: str, a: Checkpoint, b: Checkpoint, method: WeightMatching, plan: str = "") -> StreamedResult:
        found = self.run(f"{stage}.", a, b, self.chart.plans[plan or stage], method)
        self._timings += found.timings
        return found

    def _explain(self) -> tuple[tuple[Tensor, Tensor, Tensor], StreamedResult]:
        """Match by permutations, and measure how similar the matched networks are; see `RotationChoice.of`."""
        a, b = self._behind
        known = self._run("orders", a, b, WeightMatching())
        symmetry, plan = known.symmetry.on_sums, self.chart.plans["orders"]
        one, other = (
            Moved(x, partial(self._place, symmetry, element))
            for x, element in ((a, symmetry.identity()), (b, known.element))
        )
        with self._passes.timed("comparing streams", 2 * plan.sweep_bytes):
            left = right = symmetry.identity()
            if has_balance(symmetry):
                (left, right), _ = balance_streamed((one, other), symmetry, "keep", self._passes)

            def measure(name: str) -> list[Tensor]:
                dtype, found = work_dtype(*(x.stored[name].dtype for x in (a, b))), []
                for rows in row_ranges(symmetry, name):
                    x, y = (
                        move_by(symmetry, side, {name: z.read(name, rows=rows, dtype=dtype)})[name]
                        for z, side in ((one, left), (other, right))
                    )
                    found.append(torch.tensor([dot(x, x), dot(y, y), dot(x, y)], dtype=torch.float64))
                return found

            squares = torch.zeros(3, dtype=torch.float64)
            for own in self.crew.map(measure, rotated_tensors(symmetry, self._data.rotatable, plan.names)):
                for more in own:
                    squares += more
        xx, yy, xy = squares.reshape(3, 1)
        return (xx, yy, xy), known

    def _place(self, symmetry: Symmetry, element: Element, name: str, tensor: Tensor) -> Tensor:
        return move_tensor(symmetry, element, name, self._data.sums({name: tensor})[name])

    def _distance(self, a: Checkpoint, b: Checkpoint) -> tuple[float, float]:
        """Return the squared distance of two networks' compared tensors, and the first network's squared norm."""
        plan = self.chart.plans["given"]
        with self._passes.timed("distances", plan.sweep_bytes):
            return measure_square(a, b, plan.symmetry, plan.names, self._passes)

    def _moved(self, element: Element) -> MovedCheckpoint:
        return MovedCheckpoint(self.b, self._data, element)

    def _settle(self, there: Element) -> Element:
        """Return the element with the smallest remaining distance, if the networks are near copies."""
        left, norm = self._distance(self.a, self._moved(there))
        if not bool(is_near_copy(torch.tensor(left), torch.tensor(norm))):
            return there
        again = _as_given(self.chart.method)
        given = self._run("given", self.a, self.b, again)
        if self._distance(self.a, self._moved(given.element))[0] <= left:
            return given.element
        other = self._run("again", self.a, self._moved(there), again, "given")
        further = self._data.compose(other.element, there)
        return further if self._distance(self.a, self._moved(further))[0] < left else there

    def _take_over_statistics(self, element: Element) -> Element:
        """Extend an element by transformations that keep the function only with the stored statistics, if the network
        is a copy.
        """
        whole = self.chart.symmetry
        if element.translation:
            moves = element.translated({}).rotated({}), element
            before, after = (RepresentativeCheckpoint(self._moved(one), whole).coordinates for one in moves)
            element = add_difference(element, (before, after))
        first, second = (
            RepresentativeCheckpoint(one, whole) for one in (self.a, MovedCheckpoint(self.b, whole, element))
        )
        square, norm = self._distance(first, second)
        if square > COPY * norm:
            return element
        kept = {name: torch.zeros_like(first.coordinates[name], dtype=torch.bool) for name in chart_gains(whole)}
        further = into_coordinates(whole, whole.identity(), second.coordinates, first.coordinates, kept)
        return whole.compose(further, element)
