"""Checkpoints of commands that evaluate networks, and their tasks: for choosing between results, and for evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import regauge as rg
from regauge import Checkpoint
from regauge.cli.align_options import Matching
from regauge.cli.compare_options import Compare
from regauge.cli.line_options import Between, Judging, Line
from regauge.cli.models import require_model
from regauge.cli.options import ExampleInputs, Held, UsageError
from regauge.cli.output import show_status, tell
from regauge.connect import prepare_statistics
from regauge.core.task import arguments, choose_and_judge
from regauge.hub import Model, Networks, bring_together, convert, dtype_of, open_checkpoints, open_task


@dataclass(frozen=True)
class Judged:
    """Checkpoints of one architecture under the names of their model, and the task that evaluates them.

    If the model has batch normalization, the task recomputes its statistics.

    Attributes:
        choosing: The data for recomputing statistics and training paths; the data of `task` if a command does neither.
        statistics: The data for batch normalization statistics; empty if the model has no batch normalization.
    """

    model: Model
    checkpoints: tuple[Checkpoint, ...]
    task: rg.Task
    choosing: rg.Task
    statistics: str

    @property
    def networks(self) -> tuple[rg.Params, ...]:
        """The parameters of the checkpoints."""
        return tuple(checkpoint.params for checkpoint in self.checkpoints)

    def tell_data(self) -> None:
        """Report which data were used for choices, and which data for evaluating the result."""
        if self.statistics:
            tell(
                "in every network, including the given ones, the statistics of batch normalization were recomputed "
                f"from {self.statistics}"
            )
        if self.choosing is not self.task:
            tell(f"losses were measured on {self.task.name}")

    @property
    def symmetry(self) -> rg.Symmetry:
        """The symmetry of the model, traced with the first batch."""
        inputs = next(iter(self.task.batches))[0]
        args, kwargs = arguments(convert(inputs, dtype_of(self.model.module.state_dict())))
        return self.model.on(args, kwargs).symmetry.bind(self.networks[0])


def read(options: Judging, paths: Sequence[Path | Checkpoint], held: Held | None = None) -> Judged:
    """Build the model and read the checkpoints and the data."""
    with show_status("building the model and reading the checkpoints"):
        opened = bring_together([Checkpoint.open(path) for path in paths]).networks
        tracing = ExampleInputs(**vars(held or Held()), outputs=options.outputs)
        model = require_model(options.model, opened[0], tracing, values="always")
        checkpoints = open_checkpoints(opened, model)
        dtype = dtype_of(checkpoints[0].params)
        choosing, judging = _divide(options, model, dtype)
        source = _statistics(options, model) or choosing
    task = prepare_statistics(judging, source.batches)
    return Judged(
        model, checkpoints, task, task if choosing is judging else choosing, "" if task.prepare is None else source.name
    )


def _divide(options: Judging, model: Model, dtype: torch.dtype) -> tuple[rg.Task, rg.Task]:
    """Return the tasks for choosing a result and for evaluating it. Both tasks use all of DATA if nothing is chosen."""
    data = task_on(options, model, options.data, dtype)
    if options.test is not None:
        return data, task_on(options, model, options.test, dtype)
    is_elsewhere = isinstance(options, Between) and (options.statistics is not None or not _has_statistics(data))
    if is_elsewhere and not (isinstance(options, Line) and options.trains_on_data):
        return data, data
    seed = options.seed if isinstance(options, Line) else 0
    return choose_and_judge(data, generator=torch.Generator().manual_seed(seed))


def task_on(options: Matching | Judging | Compare, model: Model, data: str, dtype: torch.dtype) -> rg.Task:
    """Return the task of a model on the user's DATA, with the loss, the batches and the outputs of the options."""
    return open_task(model, data, loss=options.loss, batch=options.batch, outputs=options.outputs, dtype=dtype)


def matching_tasks(
    options: Matching | Compare, networks: Networks, *, is_matched: bool = True
) -> tuple[rg.Task | None, rg.Task | None]:
    """Return two tasks for a command that aligns: for choices and statistics, and for evaluating the result.

    If data are used neither for matching nor for statistics, all data are used for evaluating the result.
    """
    if options.data is None:
        if options.test is not None:
            raise UsageError("--test measures the result of a choice on --data: give --data, too")
        return None, None
    if networks.model is None:
        raise UsageError("--data needs a model that is run on the data: name it with --model")
    dtype = dtype_of(networks.checkpoints[0].params)
    task, test = (
        None if text is None else task_on(options, networks.model, text, dtype) for text in (options.data, options.test)
    )
    assert task is not None
    if not is_matched and not _has_statistics(task):
        return task, test or task
    choosing, judging = choose_and_judge(task, test, generator=torch.Generator().manual_seed(options.seed))
    return prepare_statistics(choosing), prepare_statistics(judging, choosing.batches)


def _statistics(options: Judging, model: Model) -> rg.Task | None:
    """Return the data for recomputing statistics, if the options name other data than the data of the task."""
    if not isinstance(options, Between) or options.statistics is None:
        return None
    task = task_on(options, model, options.statistics, dtype_of(model.module.state_dict()))
    if not _has_statistics(task):
        raise UsageError("--statistics is for models with batch normalization, which this model lacks: leave it out")
    return task


def _has_statistics(task: rg.Task) -> bool:
    return prepare_statistics(task) is not task
