"""The base class of methods that learn an element from a task by gradient descent, and losses between networks."""

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
from regauge.core.given import as_pair, given_or_seed
from regauge.core.params import Params
from regauge.core.task import Batch, Task
from regauge.training import PlainProgram, descend
from regauge.training.descent import Clock, cycle

PROGRAM = 1 << 24
"""About how many parameters of second networks are optimized in one program; more pairs take turns."""
LINE_POINTS = (0.25, 0.5, 0.75)
"""Points of the line at which elements are judged that are learned at random ones."""
RECENT = 3
"""The mean over the steps gives step k of n a weight that grows about as `k ** RECENT`."""


@dataclass(frozen=True)
class DescentCourse:
    """The number of steps of one descent, and the seed of its random choices.

    Attributes:
        steps: Number of steps.
        every: Number of steps between two evaluations of the learned element.
        seconds: Seconds of wall-clock time after which the descent ends at the next evaluation.
        seed: Seed of the points of the line.
    """

    steps: int
    every: int
    seconds: float | None
    seed: int

    def rounds(self, program: PlainProgram[Any], task: Task | None) -> Iterator[Params]:
        """Take steps on the batches of a task, or on None; yield the learned value at every evaluation.

        The learned value is a mean over the latest steps. This mean replaces a learning rate that falls to zero at the
        end, because such a rate would make each step depend on the number of steps.
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
        """Yield the point of the line for each step, shared by all pairs: random in (0, 1), or one half."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield float(torch.rand((), generator=generator)) if loss == "random" else 0.5


@dataclass(frozen=True, kw_only=True)
class DescentMethod(Method):
    """A method that learns an element by descent on a part of the examples of a task, and chooses it by the rest.

    After every `every` steps the element is evaluated on the kept examples. The method returns the best of these
    elements, the start and the identity. The number of steps only decides when the descent ends: a shorter run is the
    beginning of a longer one. A longer run is therefore never worse on the kept examples. If the examples cannot be
    split, the method learns from all of them and also chooses by all of them. A note of the result then reports this.

    Subclasses define `learn`, and a setting `init`: an element, or a method whose result is the start; None is the
    identity.

    Attributes:
        steps: Number of steps, rounded up to a multiple of `every`.
        every: Number of steps after which the element is judged.
        kept: The share of the examples that choose, and from which nothing is learned; with 0 all do both.
        seconds: Seconds of the clock after which the descent ends, when it is judged next; no limit by default. All
            pairs share them.
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
        """Return the best elements of a descent from the start of each pair; `notes` are the notes on the start."""

    @property
    def needs_task(self) -> bool:
        """Whether the descent needs a task."""
        return True

    def planned(self, job: FileJob, task: Task | None) -> FileJob:
        """See `Method.planned`; the method, and then methods among its settings, have phases of their own."""
        if task is None or not self.needs_task or job.is_streamed:
            return super().planned(job, task)
        batch = held_by_batch(task, job.checkpoints[0].params)
        phases = [(one.copies, int(one.activations * batch)) for one in self._parts]
        return job.learned(type(self).__name__, phases)

    @property
    def _size(self) -> int:
        """Return roughly how many parameters of second networks are moved at once."""
        return PROGRAM

    def match(self, problem: Problem) -> Results:
        """See `align` and `align_pairs`."""
        if self.needs_task:
            problem.require_task(self)
        problem, told = problem.divided(self.kept)
        start, notes = start_of(
            vars(self)["init"], problem
        )  # As a field here it would come before those of subclasses.
        parts = chunks(problem, self._size)
        seconds = None if self.seconds is None else self.seconds / len(parts)
        chance = given_or_seed(problem.generator)
        seed = int(torch.randint(1 << 62, (), generator=chance, device=chance.device))
        course = DescentCourse(self.steps, self.every, seconds, seed)
        return join([self.learn(problem[part], start.rows(part), (*told, *notes), course) for part in parts])


def line_measure(problem: Problem, loss: str) -> Measure | None:
    """Return the objective of elements on a line; None stands for the default, minus the loss halfway.

    For random points, the objective is minus the mean loss on the line.
    """
    return (lambda params: -problem.line_losses(params, LINE_POINTS)) if loss == "random" else None


def losses_at(problem: Problem, between: Params, point: float, batch: Batch) -> Tensor:
    """Return the loss of each pair on one batch at a point of its line, `[pairs]`; differentiable.

    Args:
        problem: The problem, with a task; without targets the loss is that of `Problem.line_losses`.
        between: The networks at this point.
        point: The point t on every line, between 0 and 1.
        batch: Inputs and targets.
    """
    task = problem.task
    assert task is not None
    if task.has_targets:
        return _each(lambda params: task.loss(params, batch), between)
    with torch.no_grad():  # The second networks compute what they did before they were moved.
        first, second = (_each(lambda params: task.run(params, batch[0]), ends) for ends in (problem.a, problem.b))
        wanted = torch.lerp(first, second, point)
    return _each(lambda params, target: mse_loss(task.run(params, batch[0]), target), between, wanted)


def held_by_batch(task: Task, params: Mapping[str, Tensor]) -> int:
    """Return the bytes that automatic differentiation holds for the batch with most inputs, besides the parameters.

    The model runs once, and nothing is held: every saved tensor is counted and given up.
    """
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in params.items()}
    # Weak references, because memory that was given up is used again for other tensors.
    counted = WeakIdKeyDictionary({t.untyped_storage(): 0 for t in leaves.values()})
    held = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal held
        storage = tensor.untyped_storage()
        if storage not in counted:
            counted[storage] = storage.nbytes()
            held += storage.nbytes()
        return torch.empty(0)

    def values(batch: Batch) -> int:
        return sum(leaf.numel() for leaf in pytree.tree_leaves(batch[0]) if isinstance(leaf, Tensor))

    largest = max(map(as_pair, task.batches), key=values)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda empty: empty):
        task.loss(leaves, largest) if task.has_targets else task.run(leaves, largest[0])
    return held


def _each(function: Callable[..., Tensor], networks: Mapping[str, Tensor], *values: Any) -> Tensor:
    """Return the value of a function for each pair; a single pair runs without `vmap`, because this is faster."""
    if len(next(iter(networks.values()))) == 1:
        return function(*pytree.tree_map(lambda tensor: tensor[0], (networks, *values))).unsqueeze(0)
    return torch.func.vmap(function)(networks, *values)
