"""The method LearnedRotation: gradient descent on the error by rounding, over networks that compute the same
function.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from regauge.gauging.gauge_method import GaugeMethod, GaugeProblem
from regauge.gauging.methods.orbit_part import OrbitPart, Point
from regauge.gauging.methods.rounding_losses import Expected, OfFunction, OfWeights, RoundingLoss
from regauge.gauging.methods.spreading_rotations import Hadamard
from regauge.gauging.result import Chosen
from regauge.gauging.rounding import FOUR_BITS, RoundToNearest

STRETCHING = 5
"""The learning rate of scales and whole linear groups, relative to the learning rate of rotations."""
EVERY = 10
"""The number of steps after which the current point is evaluated with true rounding."""
RATES = (0.3, 0.1, 0.03)
"""Learning rates of the rounds of descent by function, divided by the learning rate of descent by weights."""
ON_EXPECTED = 150
"""The largest number of steps on the expected distance, which come before the steps on the rounded outputs."""


@dataclass(frozen=True)
class LearnedRotation(GaugeMethod):
    """Rotations of every orthogonal and linear group, found by gradient descent; with data, also scales and invertible
    matrices.

    If `by="weights"`, the method uses no data. Descent starts at the identity or at Hadamard matrices, whichever gives
    the smaller error. Rotations are `C(A) R_0` with the Cayley map `C(A) = (1 - A)^-1 (1 + A)` of a skew-symmetric
    matrix A for each copy of a group. The descent reduces the expected rounding error, `sum over scales of range^2`,
    relative to the norm of each layer. The objective is the signal-to-noise ratio of the rounded weights of all layers,
    in dB.

    If `by="function"`, descent reduces the distance between the outputs of the rounded network and of the given network
    on the task's batches. If the task uses cross entropy, the distance is the Kullback-Leibler divergence of the
    softmax in nats. For other tasks, the distance is the relative squared error. The descent optimizes not only
    rotations, but also the complete linear groups (between queries and keys, and between values and outputs) by matrix
    exponentials, and all positive scales. Two descents follow each other, and the first begins at the given network.
    The first descent reduces the expected distance, to second order in the rounding errors. As a result, weights to
    which the outputs are sensitive get small quantization steps. The second descent reduces the distance of the rounded
    network directly. The second descent uses straight-through gradients of the rounding and gradients of the
    quantization steps, which depend on the ranges. The objective is the negative distance on the last quarter of the
    batches, which neither descent uses. Targets are not needed. Signs are not optimized, because they do not change the
    rounding. The method holds `PROBES` gradients of the layers in memory.

    For both values of `by`, the method evaluates steps with true rounding and keeps the best element. Because of
    rounding, the distance has many local minima. Therefore the second descent consists of rounds. Each round starts at
    the best element so far, with a lower learning rate than the previous round.

    Attributes:
        scheme: The rounding scheme for weights.
        steps: The number of Adam steps. If `by="function"`, at most `ON_EXPECTED` further steps, which come first,
            reduce the expected distance.
        lr: The initial learning rate of Adam. The learning rate falls linearly to zero in each round.
        by: The error that is minimized, of the "weights" or of the "function". The error of the function requires a
            task.

    References:
        Liu et al. (2024), SpinQuant, section 3.2, for descent on rotations by Cayley's map; Shao et al. (2024),
        OmniQuant, section 3.3, for learned scales; Esser et al. (2020), Learned step size quantization, equation 3.
    """

    scheme: RoundToNearest = FOUR_BITS
    steps: int = 100
    lr: float = 0.01
    by: Literal["weights", "function"] = "weights"

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0:
            raise ValueError(f"steps is {self.steps} and lr is {self.lr}, but both must be positive")

    @property
    def label(self) -> str:  # type: ignore[override]
        """The name, in tables, of a network that the method transformed."""
        return "learned" if self.by == "weights" else "learned by function"

    @property
    def needs_task(self) -> bool:  # type: ignore[override]
        """Whether the method evaluates the model, which `by="function"` requires."""
        return self.by == "function"

    def choose(self, problem: GaugeProblem) -> Chosen:
        """Return the moves to the best element that any step reached."""
        is_function = self.by == "function"
        reach = OrbitPart(problem, is_scaled=is_function)
        loss: OfFunction | OfWeights = OfWeights(self.scheme)
        if is_function:
            assert problem.task is not None
            loss = OfFunction(problem.params, self.scheme, problem.task)
        initial = loss.score(problem.params, problem.symmetry)
        if not reach.layers:
            return Chosen((), initial, initial, (initial,), loss.unit, reach.fixed, ("there is nothing to rotate",))
        if isinstance(loss, OfWeights):
            symmetry = reach.found.symmetry
            ways = [symmetry.identity(), Hadamard(self.scheme).rotate(symmetry, problem.generator)]
            best, scores = self._climb(loss, reach, [Point(way, None) for way in ways], [(self.steps, self.lr)])
        else:
            expected = Expected(loss, reach, self.scheme, problem.generator)
            near, scores = self._climb(expected, reach, [reach.as_it_is], [(min(self.steps, ON_EXPECTED), self.lr)])
            each = -(-self.steps // len(RATES))
            best, more = self._climb(loss, reach, [near], [(each, self.lr * rate) for rate in RATES])
            scores += more
        history = (initial, *(max(score, initial) for score in scores))
        if history[-1] == initial:
            notes = ("the network was not changed, because no learned rotation makes rounding better",)
            return Chosen((), initial, initial, history, loss.unit, reach.fixed, notes)
        return Chosen(reach.moves(best), history[-1], initial, history, loss.unit, reach.fixed)

    def _climb(
        self, loss: RoundingLoss, reach: OrbitPart, starts: Sequence[Point], rounds: Sequence[tuple[int, float]]
    ) -> tuple[Point, list[float]]:
        """Return the best point of several descents, and the best score up to each evaluation.

        Each descent starts from the best point so far. `rounds` contains the number of steps and the initial learning
        rate of each descent.
        """
        symmetry = reach.symmetry
        scored = [(loss.score(reach.params(start), symmetry), start) for start in starts]
        reached, best = max(scored, key=lambda one: one[0])
        history = [reached]
        for steps, rate in rounds:
            tangents = reach.tangents(best)
            groups: list[dict[str, Any]] = [
                {"params": tangents.turns},
                {"params": tangents.stretches, "lr": STRETCHING * rate},
            ]
            optimizer = torch.optim.Adam(groups, lr=rate)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
            for step in range(1, steps + 1):
                with torch.enable_grad():
                    optimizer.zero_grad()
                    loss.descend(reach, tangents.point()).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                tangents.clip()
                if step % EVERY == 0 or step == steps:
                    with torch.no_grad():
                        point = tangents.point()
                    score = loss.score(reach.params(point), symmetry)
                    if score > reached:
                        reached, best = score, point
                    history.append(reached)
        return best, history
