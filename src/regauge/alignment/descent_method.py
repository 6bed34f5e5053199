"""The base class of methods that learn an element by gradient descent on a task, and losses between networks."""

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from regauge.alignment.method import KEPT, Measure, Method, chunks, require_kept, start_of
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results, join
from regauge.checkpoints.job import FileJob
from regauge.core.element import Element
from regauge.core.given import given_or_seed
from regauge.core.params import Params
from regauge.core.task import Batch, Task, largest_batch
from regauge.training import PlainProgram, descend
from regauge.training.descent import Clock, cycle

PROGRAM = 1 << 24
"""The approximate number of parameters, over all second networks, that are optimized together.

If the pairs of networks have more parameters, they are optimized in several chunks.
"""
LINE_POINTS = (0.25, 0.5, 0.75)
"""If an element was learned at random points of the linear path, it is evaluated at these points."""
RECENT = 3
"""The exponent of the weights in the mean over steps, in which step k has a weight of about `k ** RECENT`."""


@dataclass(frozen=True)
class DescentCourse:
    """The number of steps of one descent, and the seed of its random choices.

    Attributes:
        steps: The number of steps.
        every: The number of steps between two evaluations of the learned element.
        seconds: A limit in seconds of wall-clock time. The descent ends at the first evaluation after this limit.
        seed: The seed of the random points on linear paths.
    """

    steps: int
    every: int
    seconds: float | None
    seed: int

    def rounds(self, program: PlainProgram[Any], task: Task | None) -> Iterator[Params]:
        """Take steps on the batches of a task, and yield the learned parameters whenever the element is evaluated.

        The learned parameters are a mean over the latest steps. A mean over the latest steps has a similar effect as a
        learning rate that decays to zero. But with a decaying rate, each step would depend on the total number of
        steps.
        """
        batches: Iterator[Any] = itertools.repeat(None) if task is None else cycle(task)
        clock, mean = Clock(self.seconds), program.params()
        for state in descend(program, batches, steps=math.ceil(self.steps / self.every) * self.every):
            weight = (1 + RECENT) / (state.step + RECENT)
            mean = {name: torch.lerp(mean[name], value, weight) for name, value in program.params().items()}
            if state.step % self.every == 0:
                yield mean
                if clock.is_over:
                    return

    def points(self, loss: str) -> Iterator[float]:
        """Yield one point of the linear path for each step: random in (0, 1), or always one half."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield float(torch.rand((), generator=generator)) if loss == "random" else 0.5


@dataclass(frozen=True, kw_only=True)
class DescentMethod(Method):
    """A method that learns an element by descent on some examples of a task, and selects it on held-out examples.

    After every `every` steps, the element is evaluated on the held-out examples. The method returns the best of all
    evaluated elements, the initial element and the identity. The steps do not depend on their total number, so a
    shorter run takes exactly the first steps of a longer run. A longer run is therefore never worse on the held-out
    examples. If the examples cannot be split, the method learns and selects on all examples. If learning and selection
    use the same examples, a note in the result states this.

    Subclasses define `learn` and a setting `init`: an element, a method whose result is the initial element, or None
    for the identity.

    Attributes:
        steps: The number of steps, rounded up to a multiple of `every`.
        every: The number of steps between two evaluations of the element.
        kept: The fraction of the examples that are held out to select an element. If 0, all examples are used both for
            learning and for selection.
        seconds: A limit in seconds of wall-clock time. The descent ends at the first evaluation after this limit.
            Default: no time limit. All pairs of networks share the time limit.
    """

    steps: int = 100
    every: int = 10
    kept: float = KEPT
    seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_kept(self.kept)
        if self.steps < 1 or self.every < 1:
            raise ValueError(f"steps={self.steps}, every={self.every}: both must be at least 1")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds}, but a limit must be positive and finite")

    @abstractmethod
    def learn(self, problem: Problem, start: Element, notes: tuple[str, ...], course: DescentCourse) -> Results:
        """Return the best element that descent finds for each pair of networks.

        `notes` are the notes on the initial elements.
        """

    @property
    def needs_task(self) -> bool:
        """Whether the descent needs a task."""
        return True

    def _phases(self, job: FileJob, task: Task) -> list[tuple[float, int]]:
        if not self.needs_task:
            return []
        return [(self.copies, int(self.activations * held_by_batch(task, job.checkpoints[0].params)))]

    @property
    def _size(self) -> int:
        """Return the approximate number of parameters of second networks that are optimized at once."""
        return PROGRAM

    def match(self, problem: Problem) -> Results:
        """Match the pairs of a problem; see `align` and `align_pairs`."""
        if self.needs_task:
            problem.require_task(self)
        problem, told = problem.divided(self.kept)
        start, notes = start_of(
            vars(self)["init"], problem
        )  # A dataclass field would come before the fields of subclasses.
        parts = chunks(problem, self._size)
        seconds = None if self.seconds is None else self.seconds / len(parts)
        chance = given_or_seed(problem.generator)
        seed = int(torch.randint(1 << 62, (), generator=chance, device=chance.device))
        course = DescentCourse(self.steps, self.every, seconds, seed)
        return join([self.learn(problem[part], start.rows(part), (*told, *notes), course) for part in parts])


def line_measure(problem: Problem, loss: str) -> Measure | None:
    """Return the function that evaluates elements on linear paths, or None for the default: minus the loss at the
    midpoint.

    If points are random, the objective is minus the mean loss on the linear path.
    """
    return (lambda params: -problem.line_losses(params, LINE_POINTS)) if loss == "random" else None


def losses_at(problem: Problem, between: Params, point: float, batch: Batch) -> Tensor:
    """Return the loss of each pair on one batch at a point of its linear path, `[pairs]`.

    The returned losses are differentiable.

    Args:
        problem: The pairs of networks, with a task. If the task has no targets, the loss is that of
            `Problem.line_losses`.
        between: The networks at the point `point` of the paths.
        point: The point t on every path, between 0 and 1.
        batch: A pair of inputs and targets.
    """
    task = problem.task
    assert task is not None
    if task.has_targets:
        return _each(lambda params: task.loss(params, batch), between)
    with torch.no_grad():  # Elements do not change the outputs of the second networks.
        first, second = (_each(lambda params: task.run(params, batch[0]), ends) for ends in (problem.a, problem.b))
        wanted = torch.lerp(first, second, point)
    return _each(lambda params, target: mse_loss(task.run(params, batch[0]), target), between, wanted)


def held_by_batch(task: Task, params: Mapping[str, Tensor]) -> int:
    """Return the bytes that automatic differentiation holds for the largest batch, in addition to the parameters.

    This function counts the bytes in one run of the model. Every tensor that automatic differentiation would save is
    counted and immediately released.
    """
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in params.items()}
    # Weak references, because torch reuses freed memory for other tensors.
    counted = WeakIdKeyDictionary({t.untyped_storage(): 0 for t in leaves.values()})
    held = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal held
        storage = tensor.untyped_storage()
        if storage not in counted:
            counted[storage] = storage.nbytes()
            held += storage.nbytes()
        return torch.empty(0)

    largest = largest_batch(task)
    if largest is None:
        return 0  # the descent raises an error
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda empty: empty):
        task.loss(leaves, largest) if task.has_targets else task.run(leaves, largest[0])
    return held


def _each(function: Callable[..., Tensor], networks: Mapping[str, Tensor], *values: Any) -> Tensor:
    """Return the result of a function for each pair of networks. A single pair runs without `vmap`, which is faster."""
    if len(next(iter(networks.values()))) == 1:
        return function(*pytree.tree_map(lambda tensor: tensor[0], (networks, *values))).unsqueeze(0)
    return torch.func.vmap(function)(networks, *values)
