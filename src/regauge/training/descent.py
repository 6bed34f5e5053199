"""Gradient descent on a loss: the loop that all training uses.

`descend` is a generator that yields the state after each step. The generator trains a `Program`, which consists of
parameters and their optimizer. `PlainProgram` has the parameters of one network or any other parameters, and
`regauge.training.stacks.Stack` has the parameters of many networks. `minimize` trains a plain program to the end.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from regauge.checkpoints.state_file import StateFile, copy_exactly
from regauge.core.outputs import evaluating
from regauge.core.params import Params, below
from regauge.core.progress import Progress, no_progress
from regauge.core.task import Batch, Task
from regauge.training.optimizers import SGD, Optimizer, load_moments, moments_of, require_numbers, set_rate
from regauge.training.schedules import Constant, Rate, Schedule
from regauge.training.training_configs import DescentConfig

B = TypeVar("B")
B_contra = TypeVar("B_contra", contravariant=True)

Loss = Callable[[Params, B], Tensor]
"""A function from parameters and a batch to a loss, or to one loss per network if several networks are trained."""
Gradient = Callable[[Params, B], tuple[Tensor, Sequence[Tensor | None]]]
"""A function from parameters and a batch to the loss and the gradients. The gradient is None for parameters that do not
affect the loss."""


class Clock:
    """The clock of a training run, with an optional time limit.

    Args:
        limit: The number of seconds after which training ends; None for no limit.
        is_cpu_time: Whether CPU seconds of this process are counted instead of wall-clock seconds. With CPU seconds,
            the time limit allows the same work on a busy machine.
        spent: The number of seconds that the training run took before an interruption.
    """

    def __init__(self, limit: float | None = None, *, is_cpu_time: bool = False, spent: float = 0.0) -> None:
        self.limit = limit
        self._now = time.process_time if is_cpu_time else time.monotonic
        self._begun = self._now() - spent

    @property
    def seconds(self) -> float:
        """The number of seconds that the training run has taken."""
        return self._now() - self._begun

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self.limit is not None and self.seconds >= self.limit

    def pace(self, step: int, steps: int) -> int:
        """Return the position in the schedule, from 0 to `steps - 1`: by steps or by time, whichever is further."""
        if self.limit is None:
            return step
        return min(steps - 1, max(step, int(steps * self.seconds / self.limit) if self.limit else steps))


class Program(Protocol[B_contra]):
    """Parameters that are trained, with their optimizer."""

    def step(self, batch: B_contra, rate: Rate) -> Tensor:
        """Take a step at the scheduled rate, and return the loss before the step."""

    def params(self) -> Params:
        """Return copies of the current parameters and buffers."""


class PlainProgram(Generic[B]):
    """Parameters that one torch optimizer trains.

    Args:
        gradient: A function for loss and gradients, such as `differentiate(loss)`.
        params: The initial parameters, which are not changed.
        optimizer: The optimizer. The settings of the optimizer must be numbers, not distributions.
        lrs: Learning rates by parameter, which replace the optimizer's learning rate.
    """

    def __init__(
        self,
        gradient: Gradient[B],
        params: Mapping[str, Tensor],
        optimizer: Optimizer,
        *,
        lrs: Mapping[str, float] | None = None,
    ) -> None:
        self._gradient = gradient
        # The fused kernels ignore strides, so parameters and gradients need the same strides.
        self._params = {n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in params.items()}
        settings = require_numbers(optimizer)
        self._lrs = [(lrs or {}).get(name, settings["lr"]) for name in self._params]
        self._optimizer = optimizer.make(
            [{"params": [t], "lr": lr} for t, lr in zip(self._params.values(), self._lrs, strict=True)]
            if len(set(self._lrs)) > 1
            else list(self._params.values()),
            settings,
            # Torch's fused SGD fails where some parameters have their first gradient later than others.
            is_fused=not isinstance(optimizer, SGD),
        )

    def step(self, batch: B, rate: Rate) -> Tensor:
        """Take a step at the scheduled rate, and return the loss before the step."""
        loss, gradients = self._gradient(self._params, batch)
        for param, gradient in zip(self._params.values(), gradients, strict=True):
            param.grad = None if gradient is None else gradient.contiguous()
        for group, lr in zip(self._optimizer.param_groups, self._lrs, strict=False):
            set_rate(group, lr, rate)
        self._optimizer.step()
        return loss

    def params(self) -> Params:
        """Return copies of the current parameters."""
        return {name: tensor.detach().clone() for name, tensor in self._params.items()}

    def tensors(self) -> Params:
        """Return all tensors that steps change, without copying: the parameters and the optimizer state."""
        parameters = {f"parameter/{name}": tensor for name, tensor in self._params.items()}
        return {**parameters, **{f"optimizer/{name}": tensor for name, tensor in moments_of(self._optimizer).items()}}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the `tensors` of another program with the same parameters and optimizer."""
        copy_exactly(below("parameter/", tensors), self._params)
        load_moments(self._optimizer, below("optimizer/", tensors))


class State(NamedTuple):
    """The state of a training run after a step.

    Attributes:
        step: The number of completed steps.
        steps: The total number of steps, if the time limit is not reached before.
        loss: The loss before the last step; for a stack, one loss per network.
        rate: The scheduled rate of the last step. The rate's `factor` multiplies every learning rate.
        is_last: Whether no step follows, because all steps are completed or the time limit is reached.
        networks: The ids of the trained networks of a population, in the order of their losses.
    """

    step: int
    steps: int
    loss: Tensor
    rate: Rate
    is_last: bool
    networks: tuple[int, ...] = ()


OnStep = Callable[[State], object]
"""A function that is called after every training step, for example to write losses to a log."""


class Minimum(NamedTuple):
    """The parameters after the last step of `minimize`, and the loss of every batch before its step, `[steps]`."""

    params: Params
    losses: Tensor


def differentiate(loss: Loss[B]) -> Gradient[B]:
    """Return gradients of a loss by automatic differentiation; for several losses, the gradients of their sum."""

    def run(params: Params, batch: B) -> tuple[Tensor, Sequence[Tensor | None]]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        with torch.enable_grad():
            value = loss(leaves, batch)
        return value.detach(), torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)

    return run


def descend(
    program: Program[B],
    batches: Iterable[B],
    *,
    steps: int,
    schedule: Schedule | None = None,
    clock: Clock | None = None,
    done: int = 0,
    on_step: OnStep | None = None,
) -> Iterator[State]:
    """Take steps until the number of steps or the time limit is reached; take at least one step.

    Args:
        program: The program that is trained. Every step changes the program.
        batches: One batch for each step; the batch is read just before the step.
        steps: The number of steps, if the time limit is not reached before.
        schedule: The schedule of the learning rate; constant by default.
        clock: The clock. When the time limit is reached, training ends after the current step. By default, there is no
            time limit. The schedule follows the number of steps or the time, whichever is closer to its limit.
        done: The number of steps that were completed before. `batches` contains only the batches of later steps.
        on_step: A function that is called with the state after each step.

    Yields:
        The state after each step.
    """
    schedule, clock = schedule or Constant(), clock or Clock()
    for step, batch in zip(range(done + 1, steps + 1), batches, strict=False):
        rate = schedule.rate(clock.pace(step - 1, steps), steps)
        loss = program.step(batch, rate)
        is_last = step == steps or clock.is_over
        state = State(step, steps, loss, rate, is_last)
        if on_step is not None:
            on_step(state)
        yield state
        if is_last:
            return


def minimize(
    gradient: Gradient[B],
    params: Mapping[str, Tensor],
    batches: Iterable[B],
    descent: DescentConfig,
    *,
    examples: int = 1,
    lrs: Mapping[str, float] | None = None,
    state_file: StateFile | None = None,
    progress: Progress = no_progress,
    label: str = "training",
    on_step: OnStep | None = None,
) -> Minimum:
    """Minimize a loss by gradient descent, and return the final parameters and the losses.

    Args:
        gradient: A function for loss and gradients, such as `differentiate(loss)`.
        params: The initial parameters, which are not changed.
        batches: One batch for each step.
        descent: The settings: steps or epochs, optimizer and schedule.
        examples: The number of examples, which determines the number of steps in an epoch.
        lrs: Learning rates by parameter, which replace the optimizer's learning rate.
        state_file: A file in which the descent is saved between epochs. If the file exists, the descent continues from
            the saved state. Batches then come from `shuffle` with the generator that the file contains. Only the
            program's tensors, buffers and the generator state may change between epochs.
        progress: The display of the steps and their losses.
        label: The label of the progress bar.
        on_step: A function that is called after each step with the state.

    Raises:
        ValueError: The loss becomes NaN or Inf, or the file does not contain a state of this descent.
    """
    program = PlainProgram(gradient, params, descent.optimizer, lrs=lrs)
    steps, epoch = descent.count_steps(examples), math.ceil(examples / (descent.batch or examples))
    values = sum(tensor.numel() for tensor in params.values())
    inputs, losses = {"settings": repr(descent), "values": values, "examples": examples}, list[float]()
    if state_file is not None and (kept := state_file.read(inputs)) is not None:
        with state_file.continuing():
            program.restore(below("program/", kept[0]))
            losses = list(map(float, kept[0]["losses"][:steps]))
    advance = progress(label, steps)
    if losses:
        advance(len(losses))
    states = descend(program, batches, steps=steps, schedule=descent.schedule, done=len(losses), on_step=on_step)
    for state in states:
        losses.append(require_finite_loss(state, steps, descent.optimizer))
        advance(loss=losses[-1])
        if state_file is not None and state.step % epoch == 0 and state_file.is_due:
            tensors = {f"program/{name}": tensor for name, tensor in program.tensors().items()}
            state_file.write(tensors | {"losses": torch.tensor(losses, dtype=torch.float64)}, {}, inputs)
    return Minimum(program.params(), torch.tensor(losses, dtype=torch.float64))


def require_finite_loss(state: State, steps: int, optimizer: Optimizer) -> float:
    """Return the loss of a step. Raise a ValueError if the loss is NaN or Inf."""
    loss = float(state.loss)
    if not math.isfinite(loss):
        raise ValueError(
            f"training diverged: in step {state.step} of {steps} the loss is {loss}; try a smaller lr than "
            f"{optimizer.lr}, or check that parameters and data are finite"
        )
    return loss


def cycle(task: Task) -> Iterator[Batch]:
    """Yield the batches of a task repeatedly; raise a ValueError if the task has no batches."""
    batches = iter(task.batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("the task has no batches to optimize on; give at least one")
    yield from itertools.chain([first], batches)
    while True:
        yield from task.batches


def shuffle(examples: int, batch: int | None, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield index batches, in a new random order in each epoch. The last batch of an epoch may be smaller."""
    while True:
        order = torch.randperm(examples, generator=generator, device=generator.device)
        yield from torch.split(order, batch or examples)


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into training mode within a context; afterwards, restore the mode of every submodule."""
    with evaluating(module):
        module.train()
        yield
