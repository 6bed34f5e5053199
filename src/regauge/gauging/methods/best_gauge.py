"""The method BestGauge, which tries several methods and keeps the network with the smallest damage by rounding."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regauge.core.params import Params
from regauge.core.task import Task, choose_and_try_to_judge
from regauge.gauging.gauge_method import GaugeMethod, GaugeProblem
from regauge.gauging.methods.equalize import Equalize
from regauge.gauging.methods.learned_rotation import LearnedRotation
from regauge.gauging.methods.spreading_rotations import Hadamard
from regauge.gauging.moves import take_out_translations
from regauge.gauging.result import AS_IT_IS, Chosen, Trials
from regauge.gauging.rounding import FOUR_BITS, REPORTED, RoundToNearest, layer_rows, mean_error, round_network

MOST_LEARNED = 20_000_000
"""The largest number of weights in layers for which rotations are learned by default. In larger networks, rotations are
learned only if the caller requests it."""

NOTHING_BETTER = "the network was not changed, because no method loses less; `is_kept_always=True` changes it anyway"
"""The note if no method improves the given network."""
OF_LOSS, OF_WEIGHTS = "loss, sign turned", "relative squared error, sign turned"
"""Units of the objective, for a loss and for weights."""


@dataclass(frozen=True)
class BestGauge(GaugeMethod):
    """A method that tries several methods and keeps the network with the smallest damage by rounding.

    The objectives of different methods cannot be compared, and a smaller rounding error of weights does not imply a
    smaller loss. With a task, networks are compared by the loss of the task over all batches, with rounded weights in
    all layers. Without a task, networks are compared by the relative squared rounding error of their weights, averaged
    over layers. Without a task, a network is also rejected if its error at 8, 4 or 3 bits per row is larger than for
    the unchanged network. The unchanged network is also a candidate, so the result is never worse than the unchanged
    network. The objective is the negative of the compared quantity.

    Methods start from the network without translations, which is also a candidate. Therefore copies of a network that
    differ by a translation get the same gauge, unless the unchanged copy is best. Translations of 16-bit tensors are
    not removed, because 16-bit tensors would lose precision.

    Attributes:
        scheme: The rounding scheme for weights.
        methods: The methods, in the order in which they are tried. If several networks are equally good, the first of
            them is kept. By default, the methods equalize scales, rotate all possible groups by Hadamard matrices, and
            learn rotations by the error of the weights. With a task, rotations are also learned from the outputs of the
            model.
        by: Whether networks are compared by the task's loss or by the rounding error of the weights. If a task is
            given, the default is the loss.
        steps: The number of steps for learned rotations, if `methods` is not given.
        is_kept_always: Whether the best transformed network is kept even if rounding damages it more than the unchanged
            network.
    """

    scheme: RoundToNearest = FOUR_BITS
    methods: tuple[GaugeMethod, ...] | None = None
    by: Literal["loss", "weights"] | None = None
    steps: int = 100
    is_kept_always: bool = False

    label = "best"

    def __post_init__(self) -> None:
        if self.methods is not None and not self.methods:
            raise ValueError("there is no method to choose from; give one or more, or leave them out")

    @property
    def needs_task(self) -> bool:  # type: ignore[override]
        """Whether networks are compared by the loss, or one of the methods needs a task."""
        return self.by == "loss" or any(method.needs_task for method in self.methods or ())

    def choose(self, problem: GaugeProblem) -> Chosen:
        """Return the moves of the best method."""
        is_loss = problem.task is not None and problem.task.has_targets and self.by != "weights"
        if is_loss and problem.task is not None:
            choosing, judging = choose_and_try_to_judge(problem.task, problem.test)
            problem = replace(problem, task=choosing, test=judging)
        methods, notes = self._methods(problem, is_loss=is_loss)
        measures = self._measures(problem, is_loss=is_loss)
        start = [measure(problem.moved(())) for measure in measures]
        found, values, allowed = {AS_IT_IS: Chosen((), 0.0, 0.0, (), "")}, {AS_IT_IS: start[0]}, [AS_IT_IS]
        centered, first = problem, take_out_translations(problem.symmetry, problem.params, problem.dtypes)
        if first is not None:
            centered, methods = replace(problem, params=first(problem.params)), (TranslationsTakenOut(), *methods)
        for method in methods:
            chosen = method.choose(centered)
            chosen = chosen if first is None else replace(chosen, moves=(first, *chosen.moves))
            name = method.label if method.label not in found else f"{method.label} ({len(found)})"
            errors = [measure(problem.moved(chosen.moves)) for measure in measures] if chosen.moves else start
            found[name], values[name] = chosen, errors[0]
            if all(error <= before for error, before in zip(errors, start, strict=True)):
                allowed.append(name)
        among = [name for name in values if name != AS_IT_IS] if self.is_kept_always else allowed
        kept = min(among, key=values.__getitem__)
        notes += (NOTHING_BETTER,) if kept == AS_IT_IS else ()
        measure = "loss with weights" if is_loss else "mean relative squared error of weights"
        compared = {name: found[name] for name in (AS_IT_IS, kept)}
        whole, judged = self._judge(problem, compared) if is_loss else (None, {})
        return replace(
            found[kept],
            objective=-values[kept],
            initial=-values[AS_IT_IS],
            history=tuple(-min(values[name] for name in allowed[: k + 1]) for k in range(len(allowed))),
            unit=OF_LOSS if is_loss else OF_WEIGHTS,
            notes=(*found[kept].notes, *notes),
            trials=Trials(f"{measure} rounded to {self.scheme}", values, kept, whole, judged),
        )

    def _methods(self, problem: GaugeProblem, *, is_loss: bool) -> tuple[tuple[GaugeMethod, ...], tuple[str, ...]]:
        """Return the methods that are tried, and messages about methods that are not tried."""
        if self.methods is not None:
            return self.methods, ()
        size = sum(problem.params[name].numel() for name in layer_rows(problem.symmetry) if name in problem.params)
        is_learned = size <= MOST_LEARNED
        methods = default_methods(
            self.scheme, self.steps, is_loss=is_loss, is_learned=is_learned, is_by_function=problem.can_learn
        )
        note = f"rotations were not learned, because layers have {size:,} values; LearnedRotation learns them"
        return methods, () if is_learned else (note,)

    def _judge(self, problem: GaugeProblem, compared: Mapping[str, Chosen]) -> tuple[float, dict[str, float]]:
        """Return the loss without rounding. If there are held-out data, also return the losses of some networks on
        held-out data.
        """
        whole = self._loss(problem, problem.task, is_rounded=False)(problem.moved(()))
        if problem.test is None:
            return whole, {}
        test = self._loss(problem, problem.test)
        return whole, {name: test(problem.moved(chosen.moves)) for name, chosen in compared.items()}

    def _measures(self, problem: GaugeProblem, *, is_loss: bool) -> list[Callable[[Params], float]]:
        """Return measures of a network. The first measure compares methods, and a method must not increase any of the
        measures.
        """
        if is_loss:
            return [self._loss(problem, problem.task)]
        schemes = dict.fromkeys((self.scheme, *REPORTED))
        return [partial(_error, problem, scheme) for scheme in schemes]

    def _loss(self, problem: GaugeProblem, task: Task | None, *, is_rounded: bool = True) -> Callable[[Params], float]:
        """Return a function from a network to its loss on a task; infinity if the loss is NaN."""
        assert task is not None
        dtype = next((t.dtype for t in problem.params.values() if t.is_floating_point()), torch.float32)
        wide = _in_precision(task, dtype)

        def loss(params: Params) -> float:
            rounded = round_network(params, problem.symmetry, self.scheme) if is_rounded else params
            return _number(wide.evaluate(rounded)["loss"])

        return loss


class TranslationsTakenOut(GaugeMethod):
    """The network without translations, from which all other methods start."""

    label = "translations taken out"

    def choose(self, problem: GaugeProblem) -> Chosen:
        """Return an empty list of moves."""
        return Chosen((), 0.0, 0.0, (), "")


def default_methods(
    scheme: RoundToNearest, steps: int, *, is_loss: bool, is_learned: bool = True, is_by_function: bool = True
) -> tuple[GaugeMethod, ...]:
    """Return the methods that are tried by default.

    If networks are compared by the loss, Hadamard matrices rotate all groups, and rotations are also learned with
    `by="function"`. If networks are compared by rounding errors, a group is rotated only if its rounding error does not
    increase.

    Args:
        scheme: The rounding scheme of weights.
        steps: The number of steps for learned rotations.
        is_loss: Whether networks are compared by a loss.
        is_learned: Whether rotations are learned.
        is_by_function: Whether rotations may also be learned from the model's outputs, which needs memory for many
            gradients.
    """
    methods: list[GaugeMethod] = [Equalize(), Hadamard(scheme, is_kept_always=is_loss)]
    if is_learned:
        methods.append(LearnedRotation(scheme, steps))
    if is_learned and is_loss and is_by_function:
        methods.append(LearnedRotation(scheme, steps, by="function"))
    return tuple(methods)


def _error(problem: GaugeProblem, scheme: RoundToNearest, params: Mapping[str, Tensor]) -> float:
    return _number(mean_error(params, problem.symmetry, scheme))


def _number(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _in_precision(task: Task, dtype: torch.dtype) -> Task:
    """Return the task with its model and data converted to the precision in which networks are compared."""

    def converted(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    batches = [pytree.tree_map_only(Tensor, converted, (inputs, targets)) for inputs, targets in task.batches]
    return replace(task, module=copy.deepcopy(task.module).to(dtype), batches=batches)
