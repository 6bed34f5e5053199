"""Commands that evaluate networks: their checkpoints and task, and files of numbers and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils import _pytree as pytree

import regauge as rg
from regauge.cli.models import Model, load_module, name_model
from regauge.cli.options import Judging, UsageError
from regauge.cli.tasks import dtype_of, task_on, with_reset
from regauge.core.params import Params
from regauge.core.task import arguments
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.names import match
from regauge.storage.checkpoints.writing import require_writable, save_text, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_SUFFIXES = (".svg", ".png", ".pdf")
LOSSES = {"cross-entropy": "cross entropy (nats)", "mse": "mean squared error"}
"""Names of the losses in plots."""


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
        dtype = dtype_of(self.model.module.state_dict())
        inputs = next(iter(self.task.batches))[0]
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, arguments(inputs)
        )
        try:
            return rg.discover(self.model.module, args, kwargs, outputs=self.task.outputs).bind(self.networks[0])
        except rg.TraceError as error:
            raise UsageError(str(error)) from error


def read(options: Judging, paths: Sequence[Path], console: Console) -> Judged:
    """Build the model and read the checkpoints and the data.

    Raises:
        UsageError: The model is unknown, or cannot be built.
    """
    with console.status("building the model and reading the checkpoints"):
        opened = [Checkpoint.open(path) for path in paths]
        name = name_model(options.model, opened[0])
        if name is None:
            raise UsageError(f"{opened[0].label!r} does not say what network it holds: name the model with --model")
        model = load_module(name, values="always")
        state = model.module.state_dict()
        checkpoints = tuple(one.with_params(match(one.params, state, one.label)) for one in opened)
        judged = Judged(model, checkpoints, judge_on(options, model, options.data, dtype_of(checkpoints[0].params)))
    return replace(judged, task=with_reset(judged.task))


def judge_on(options: Judging, model: Model, data: str, dtype: torch.dtype) -> rg.Task:
    """The task of the model on some data."""
    return task_on(model, data, loss=options.loss, batch=options.batch, outputs=options.outputs, dtype=dtype)


def require_pictures(path: Path, *, overwrite: bool) -> None:
    """Raise unless a plot and the table beside it can be written."""
    require_writable(path, overwrite=overwrite, suffixes=PLOT_SUFFIXES)
    require_writable(table_path(path), overwrite=overwrite, suffixes=(".csv",))


def table_path(picture: Path) -> Path:
    """The path of the numbers of a plot: `line.svg` has `line.csv` beside it."""
    return picture.with_suffix(".csv")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a picture that appears under its name only when it is complete; the same bytes every time."""
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with whole_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=200, metadata=dates.get(path.suffix))


def save_rows(rows: Sequence[Mapping[str, float | str]], path: Path) -> None:
    """Write rows as comma-separated values with all their digits, under the names of the first row."""
    lines = [",".join(rows[0]), *(",".join(str(value) for value in row.values()) for row in rows)]
    save_text("\n".join(lines) + "\n", path)


def table_of(rows: Sequence[Mapping[str, float | str]]) -> Table:
    """A table for the terminal."""
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.4f}" for value in row.values()))
    return table
