"""Commands that evaluate networks: their checkpoints and task."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import regauge as rg
from regauge.cli.models import Model, load_module, name_model
from regauge.cli.options import Judging, UsageError
from regauge.cli.progress import show_status
from regauge.cli.tasks import convert, dtype_of, task_on, with_reset
from regauge.core.params import Params
from regauge.core.task import arguments
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.names import match


@dataclass(frozen=True)
class Judged:
    """Checkpoints of one architecture, and the task that judges them.

    Attributes:
        model: How to run them.
        checkpoints: In the order of the command line, with the names of the model.
        task: On the data; it recomputes the statistics of batch normalization where the model has any.
    """

    model: Model
    checkpoints: tuple[Checkpoint, ...]
    task: rg.Task

    @property
    def networks(self) -> tuple[Params, ...]:
        """The parameters of the checkpoints."""
        return tuple(checkpoint.params for checkpoint in self.checkpoints)

    @property
    def symmetry(self) -> rg.Symmetry:
        """The symmetry of the model, traced with the first batch.

        Raises:
            UsageError: The model cannot be traced.
        """
        inputs = next(iter(self.task.batches))[0]
        args, kwargs = convert(arguments(inputs), dtype_of(self.model.module.state_dict()))
        try:
            return rg.discover(self.model.module, args, kwargs, outputs=self.task.outputs).bind(self.networks[0])
        except rg.TraceError as error:
            raise UsageError(str(error)) from error


def read(options: Judging, paths: Sequence[Path]) -> Judged:
    """Build the model and read the checkpoints and the data.

    Raises:
        UsageError: The model is unknown, or cannot be built.
    """
    with show_status("building the model and reading the checkpoints"):
        opened = [Checkpoint.open(path) for path in paths]
        name = name_model(options.model, opened[0])
        if name is None:
            raise UsageError(f"{opened[0].label!r} does not say what network it holds: name the model with --model")
        model = load_module(name, values="always")
        state = model.module.state_dict()
        checkpoints = tuple(one.with_params(match(one.params, state, one.label)) for one in opened)
        task = task_on(options, model, options.data, dtype_of(checkpoints[0].params))
    return Judged(model, checkpoints, with_reset(task))
