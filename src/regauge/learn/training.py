"""Training of a net on networks: epochs of batches, validation, the best weights, and a state for resuming."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regauge.checkpoints.state_file import StateFile, copy_exactly
from regauge.core.params import below
from regauge.core.progress import Advance, Progress, no_progress
from regauge.core.typed_json import require_fields
from regauge.learn.course import Course, Trained, Validation
from regauge.storage.loader import Batch, Loader
from regauge.training.descent import Clock, OnStep, descend, require_finite_loss
from regauge.training.net_program import NetProgram
from regauge.training.optimizers import AdamW
from regauge.training.training_configs import NetTrainingConfig


def train(
    net: nn.Module,
    loader: Loader,
    loss: Callable[[Batch, torch.Generator], Tensor],
    validate: Callable[[], Validation],
    config: NetTrainingConfig,
    *,
    seed: int,
    state: Path | None = None,
    continues: bool = True,
    inputs: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
    on_step: OnStep | None = None,
) -> Trained:
    """Train a net in place. Afterwards, the net has the weights of the epoch with the best validation.

    All random numbers, including the random numbers of dropout, depend only on `seed` and the step number. Therefore a
    resumed training run has bitwise the same result as an uninterrupted run.

    Args:
        net: The net. All parameters of the net that require gradients are trained.
        loader: The batches of networks. The first batch must be the first of an epoch.
        loss: A function from a batch and a random generator to the mean loss.
        validate: A function that validates the net. The net is in evaluation mode during the call.
        config: Settings.
        seed: The seed of all random numbers in `loss`.
        state: A `.safetensors` file in which the training state is saved during training. If the file exists, training
            continues from the saved state.
        continues: Whether training continues from the file `state`. If `continues` is false, the training run replaces
            the file.
        inputs: Everything on which the training depends, as JSON. A saved state with different inputs raises an error.
        on_step: A function that is called after each step with the state.

    Raises:
        ValueError: A loss is not finite, or the saved state belongs to a training run with other inputs.
    """
    optimizer, steps = AdamW(config.lr, weight_decay=config.weight_decay), config.epochs * len(loader)
    program = NetProgram(net, loss, optimizer, seed=seed, clip=config.clip, average=config.average)
    file, course = None if state is None else StateFile(state), Course(program.params())
    if file is not None and continues and (kept := file.read(inputs or {})) is not None:
        tensors, known = kept
        with file.continuing():
            loader.load_state_dict(known.pop("loader"))
            require_fields(known, Course, "the training")
            copy_exactly(below("best/", tensors), course.best)
            course = Course(course.best, **known)
            program.restore(below("program/", tensors), course.step)
    clock = Clock(config.seconds, is_cpu_time=config.is_cpu_time, spent=course.seconds)
    bar = _Bar.of(progress, course, config, steps)
    batches, schedule = loader.stream(), config.schedule
    states = descend(
        *(program, batches), steps=steps, schedule=schedule, clock=clock, done=course.step, on_step=on_step
    )
    for at in () if course.ended else states:
        value = require_finite_loss(at, steps, optimizer)
        course.add(value, at.rate.factor * config.lr)
        bar.show(at.step if config.seconds is None else clock.seconds, loss=value)
        is_epoch = at.is_last or at.step % len(loader) == 0
        if is_epoch:
            net.eval()
            with program.averaged(), torch.no_grad():
                if course.is_better(validate()):
                    course.best = program.params()
            course.ended = "patience" if course.is_stale(config.patience) else ""
        if at.is_last:
            course.ended = "epochs" if at.step == steps else "seconds"
        course.seconds = clock.seconds
        if is_epoch:
            course.history[-1]["seconds"] = course.seconds
        if file is not None and (course.ended or file.is_due):
            tensors = {f"program/{name}": tensor for name, tensor in program.tensors().items()}
            tensors |= {f"best/{name}": tensor for name, tensor in course.best.items()}
            file.write(tensors, course.known | {"loader": loader.state_dict()}, inputs or {})
        if course.ended:
            break
    if config.seconds is not None:
        bar.show(course.seconds)
    net.load_state_dict(course.best)
    net.eval()
    return course.trained


class _Bar:
    """The progress bar of a training run. The unit of the bar is seconds if the training has a time limit, otherwise
    steps.
    """

    def __init__(self, advance: Advance, total: float) -> None:
        self._advance, self._total, self._shown = advance, total, 0.0

    @classmethod
    def of(cls, progress: Progress, course: Course, config: NetTrainingConfig, steps: int) -> "_Bar":
        """Return the progress bar of a training run, which may already have begun."""
        if config.seconds is None:
            made, done = cls(progress("training", steps), steps), float(course.step)
        else:
            made, done = cls(progress("training, seconds", config.seconds), config.seconds), course.seconds
        if done:
            made.show(done)
        return made

    def show(self, done: float, *, loss: float | None = None) -> None:
        """Update the progress bar to the current state of the training."""
        place = min(done, self._total)
        self._advance(place - self._shown, loss=loss)
        self._shown = place
