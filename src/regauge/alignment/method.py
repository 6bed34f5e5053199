"""The base classes of alignment methods, which are frozen dataclasses of settings, and shared helper functions."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias, get_args, get_origin

import torch
from torch import Tensor

from regauge.alignment.joint import Role
from regauge.alignment.problem import ManyProblem, Problem
from regauge.alignment.result import ManyResult, Results, join
from regauge.checkpoints.job import FileJob
from regauge.core.element import Element
from regauge.core.given import is_plain, require_plain
from regauge.core.params import Params, batch_of_one
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


class Method(ABC):
    """A method that aligns networks. Subclasses are frozen dataclasses of settings and define `match`.

    Attributes:
        copies: The number of float32 copies of each network that the method holds, measured with transformers
            (`benchmarks/learning_memory.py`).
        activations: The memory for the activations of a batch, as a multiple of the bytes that automatic
            differentiation holds for one network, measured by the same benchmark as `copies`.
    """

    copies: ClassVar[float] = 8
    activations: ClassVar[float] = 1

    def __post_init__(self) -> None:
        """Raise an error if a setting has a wrong type or an unknown value."""
        for field in fields(self):  # type: ignore[arg-type]  # Methods are dataclasses.
            if is_plain(field.type):
                require_plain(field.name, getattr(self, field.name), field.type)
        for name, choices in _choices(type(self)).items():
            if getattr(self, name) not in choices:
                *others, last = map(repr, choices)
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose {', '.join(others)} or {last}")

    def __str__(self) -> str:
        """Return the method as a Python expression. Settings with default values are omitted."""
        own: tuple[Field[Any], ...] = fields(self)  # type: ignore[arg-type]  # Methods are dataclasses.
        told = [(one.name, getattr(self, one.name)) for one in own if getattr(self, one.name) != _default(one)]
        texts = [f"{name}={value if isinstance(value, Method) else repr(value)}" for name, value in told]
        return f"{type(self).__name__}({', '.join(texts)})"

    @abstractmethod
    def match(self, problem: Problem) -> Results:
        """Return one element for each pair, which brings the second network of the pair close to the first network."""

    def match_many(self, problem: ManyProblem) -> ManyResult:
        """Return one element for each of two or more networks by aligning every network to the first one, pair by pair.

        The objective is the sum of the objectives of all pairs.
        """
        first = batch_of_one(problem.networks[0])
        setting = (problem.symmetry, problem.task, problem.generator)
        found = [self.match(Problem(first, batch_of_one(other), *setting)).item(0) for other in problem.networks[1:]]
        steps = max(len(one.history) for one in found)
        rows = [(*one.history, *[one.history[-1]] * (steps - len(one.history))) for one in found] if steps else []
        ends = [one.is_converged for one in found]
        return problem.result(
            (problem.symmetry.identity(), *(one.element for one in found)),
            objective=sum(one.objective for one in found),
            initial=sum(one.initial for one in found),
            history=[sum(column) for column in zip(*rows, strict=True)],
            is_converged=None if None in ends else all(ends),
            params=(dict(problem.networks[0]), *(one.params for one in found)),
            notes=tuple(dict.fromkeys(note for one in found for note in one.notes)),
        )

    def reads_representatives(self, symmetry: Symmetry, *, has_task: bool) -> bool:
        """Return whether `align` passes representatives (see `Symmetry.split`) and their symmetry to the method.

        If a method keeps scales, `align` passes the networks themselves, because setting gains to one changes scales.
        `align` also passes the networks themselves if a method among this method's settings needs them.
        """
        is_kept = self.joint_roles or getattr(self, "scales", "") == "keep"
        return not is_kept and all(one.reads_representatives(symmetry, has_task=has_task) for one in self._within)

    @property
    def _within(self) -> tuple["Method", ...]:
        """Return the methods among this method's settings."""
        settings = [getattr(self, name) for name in self.__dict__]
        several = [one for value in settings for one in (value if isinstance(value, tuple) else (value,))]
        return tuple(one for one in several if isinstance(one, Method))

    @property
    def _parts(self) -> tuple["Method", ...]:
        """Return this method, the methods among its settings, the methods among their settings, and so on."""
        return (self, *(part for one in self._within for part in one._parts))

    def planned(self, job: FileJob, task: Task | None) -> FileJob:
        """Return a job that also counts the memory for running the model, if this method or its settings run it.

        Raises:
            ValueError: The job does not allow enough memory.
        """
        if task is None or job.is_streamed:
            return job
        found = [(type(one).__name__, phase) for one in self._parts for phase in one._phases(job, task)]
        return job.learned(found[0][0], [phase for _, phase in found]) if found else job

    def _phases(self, job: FileJob, task: Task) -> list[tuple[float, int]]:
        """Return the memory of each phase that runs the model: float32 copies of each network, and further bytes.

        Phases of the methods among the settings are not included.
        """
        return []

    @property
    def joint_roles(self) -> tuple[Role, ...]:
        """The role of each dictionary, for methods that align several dictionaries together; see `JointMatching`."""
        return ()


def _default(setting: Field[Any]) -> Any:
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


@cache
def _choices(method: type[Any]) -> dict[str, tuple[Any, ...]]:
    return {field.name: get_args(field.type) for field in fields(method) if get_origin(field.type) is Literal}


class ManyMethod(Method):
    """A method that aligns any number of networks with one another. Subclasses define `match_many`."""

    @abstractmethod
    def match_many(self, problem: ManyProblem) -> ManyResult:
        """Return one element for each of two or more networks. The elements bring all networks close to one another."""

    def match(self, problem: Problem) -> Results:
        """Return one element for each pair, by aligning each pair as a set of two networks."""
        return join([self._match_two(problem[k : k + 1]) for k in range(problem.pairs)])

    def _match_two(self, problem: Problem) -> Results:
        found = self.match_many(ManyProblem(problem.pair(0), problem.symmetry, problem.task, problem.generator))
        return problem.result(
            found.element.item(1),
            objective=found.objective,
            initial=found.initial,
            history=found.history,
            starts=found.starts,
            is_converged=found.is_converged,
            moved=batch_of_one(found.params[1]),
            notes=found.notes,
        )


KEPT = 0.25
"""The fraction of a task's examples that are held out to select among elements."""


def require_kept(kept: float) -> None:
    """Raise an error unless some examples remain for learning after the held-out share is removed."""
    if not 0 <= kept < 1:
        raise ValueError(f"kept is {kept}, but this share of the examples must be at least 0 and less than 1")


def chunks(problem: Problem, size: int) -> list[slice]:
    """Split the pairs into chunks of at least one pair, with roughly `size` parameters of second networks in each."""
    count = max(1, size // max(1, sum(tensor[0].numel() for tensor in problem.b.values())))
    return [slice(first, first + count) for first in range(0, problem.pairs, count)]


Start: TypeAlias = Element | Method | None
"""The initial element of a method: an element, a method that finds it, or None for the identity."""


def start_of(start: Start, problem: Problem) -> tuple[Element, tuple[str, ...]]:
    """Return the initial element of each pair, and notes on groups that a method does not change."""
    if start is None:
        return problem.symmetry.identity((problem.pairs,)), ()
    if isinstance(start, Method):
        found = start.match(problem)
        return found.element, found.notes
    return (start if start.batch else start.expand(problem.pairs)), ()


def are_alike(x: Element, y: Element) -> Tensor:
    """Return whether the elements of two batches have equal permutations and signs, as booleans `[*batch]`."""
    same = torch.ones(x.batch, dtype=torch.bool)
    for name in x:
        for left, right in ((x[name].perm, y[name].perm), (x[name].sign, y[name].sign)):
            if left is not None and right is not None:
                same = same & (left == right).flatten(len(x.batch)).all(-1)
    return same


Measure = Callable[[Params], Tensor]
"""A function that maps transformed second networks to the objective, float64 `[pairs]`, which is maximized."""


class Candidates:
    """The best element of each pair, among the identity and all elements that were offered.

    Args:
        problem: The pairs of networks.
        start: The first element that is offered for each pair. The first offered element is preferred to the identity
            if both are equally good.
        measure: The objective to maximize. Default: minus the loss at the midpoint between the networks, which needs a
            task.
        notes: The notes on the first offered element. Each later element comes with its own notes.

    Attributes:
        initial: The objective of the identity, float64 `[pairs]`.
        objective: The best objective of each pair so far.
    """

    def __init__(
        self,
        problem: Problem,
        start: Element | None = None,
        measure: Measure | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._problem = problem
        self._notes = {0: notes}
        self._kept = torch.zeros(problem.pairs, dtype=torch.int64)  # The index of the element that each pair keeps.
        self._is_start = torch.ones(problem.pairs, dtype=torch.bool)
        self._begin, self._offers = "the identity" if start is None else "the start", 0
        self._measure = (lambda params: -problem.line_losses(params)) if measure is None else measure
        self._best = problem.symmetry.identity((problem.pairs,))
        self.initial = self.objective = self._measure(dict(problem.b))
        self._reached: list[Tensor] = []
        if start is not None:
            self._reached.append(self._measure(problem.move(start)))
            self._best = start.where(self._reached[0] >= self.initial, self._best)
            self.objective = torch.maximum(self.initial, self._reached[0])
        self._history = [self.objective]

    def offer(
        self,
        element: Element,
        params: Params | None = None,
        notes: tuple[str, ...] | None = None,
        *,
        is_kept: bool = False,
    ) -> Tensor:
        """Evaluate one element for each pair, given the transformed second networks `params`.

        Elements that are better than all earlier elements are kept, and all objectives are returned. If `is_kept`, the
        offered element replaces earlier elements even if it is worse. By default, `notes` are the notes on the first
        offered element.
        """
        reached = self._measure(self._problem.move(element) if params is None else params)
        is_better = torch.ones_like(self._kept, dtype=torch.bool) if is_kept else reached > self.objective
        self._best = element.where(is_better, self._best)
        self._is_start, self._offers = self._is_start & ~is_better, self._offers + 1
        number = 0 if notes is None else len(self._notes)
        self._notes[number] = self._notes[0] if notes is None else notes
        self._kept = torch.where(is_better, number, self._kept)
        self.objective = torch.where(is_better, reached, self.objective)
        self._reached.append(reached)
        self._history.append(self.objective)
        return reached

    def result(self, is_converged: Tensor | bool | None = None) -> Results:
        """Return the result with the best elements. The history of the result is the objective after each offered
        element. The notes of the result include the number of pairs that did not improve.
        """
        notes = [note for k in set(self._kept.tolist()) for note in self._notes[k]]
        if self._offers and bool(self._is_start.any()):
            same, pairs = int(self._is_start.sum()), len(self._is_start)
            where = f" in {same} of {pairs} pairs" if pairs > 1 else ""
            notes.append(
                f"nothing changed{where}: of {self._offers} elements that were tried, none is better than {self._begin}"
            )
        return self._problem.result(
            self._best,
            objective=self.objective,
            initial=self.initial,
            history=torch.stack(self._history),
            starts=torch.stack(self._reached) if self._reached else (),
            is_converged=is_converged,
            notes=tuple(dict.fromkeys(notes)),
        )
