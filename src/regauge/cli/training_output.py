"""The output of a training run: its files, its state while it runs, and its report. Only one process may write it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from regauge.checkpoints.outputs.ledger import require_lock
from regauge.checkpoints.state_file import StateError, StateFile
from regauge.checkpoints.writing import require_writable
from regauge.cli.learn_options import LearnRun
from regauge.cli.options import UsageError
from regauge.cli.output import tell, tell_table, warn

if TYPE_CHECKING:
    from regauge import flow, learn

STATE = ".partial.safetensors"


@dataclass(frozen=True)
class TrainingOutput:
    """The paths of a training run's output.

    Attributes:
        path: The output.
        beside: Paths of files with the same name and other suffixes.
        state: The file with the state of the training run; see `learn.training.train`.
        overwrite: Whether existing files may be replaced.
    """

    path: Path
    beside: tuple[Path, ...]
    state: Path
    overwrite: bool


@contextmanager
def training_output(options: LearnRun, *, beside: Sequence[str] = ()) -> Iterator[TrainingOutput]:
    """The files of a training run, checked before the work begins, and locked for this process.

    If the block ends without an error, the state of the run is removed. After an error, --resume can use the state.

    Args:
        options: The output, a `.safetensors` file; whether an interrupted training is continued, and whether files are
            replaced.
        beside: Suffixes of further files with the same name, such as ".html".
    """
    path, resume, overwrite = options.output, options.resume, options.overwrite
    state = path.with_name(f"{path.stem}{STATE}")
    files = tuple(path.with_suffix(suffix) for suffix in beside)
    # An interrupted training was allowed to write there.
    may_replace = overwrite or (resume and state.exists())
    require_writable(path, overwrite=may_replace)
    if path.name.endswith(STATE):
        raise UsageError(f"the output {str(path)!r} has the name of an interrupted training; choose another name")
    for file in files:
        require_writable(file, overwrite=may_replace, suffixes=(file.suffix,))
    with only_writer(path):
        require_writable(state, overwrite=True)
        if state.exists() and not resume:
            if not overwrite:
                raise FileExistsError(
                    f"an interrupted training left {str(state)!r}; add --resume to continue it, or --overwrite to "
                    "start again"
                )
            if not StateFile(state).is_state:
                raise FileExistsError(
                    f"{str(state)!r} has the name of an interrupted training, but is no such file; move it away"
                )
            state.unlink()
        try:
            yield TrainingOutput(path, files, state, may_replace)
        except StateError as error:
            raise UsageError(
                f"{error}, or start again with --overwrite" if error.can_be_deleted else str(error)
            ) from error
        state.unlink(missing_ok=True)


def tell_training(
    made: "learn.Predictor | learn.Autoencoder | learn.LearnedMatching | flow.Flow", *, of: str = ""
) -> None:
    """Report the trained object, its scores, and how the training ended. The word `of` is printed before "networks"."""
    counts = ", ".join(f"{count} for {name}" for name, count in made.about["networks"].items())
    tell(f"{of}networks: {counts}", networks=made.about["networks"])
    tell_table("scores", [{"": name, **scores} for name, scores in made.about["scores"].items()])
    trained = made.trained
    assert trained is not None
    tell(
        f"epoch {trained.best + 1} of {len(trained.history)} is kept; the training ended by its {trained.ended}",
        history=[dict(row) for row in trained.history],
        best=trained.best,
        ended=trained.ended,
    )


def require_named(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the paths of the networks that the user named. Raise an error if the user named none."""
    if not paths:
        raise UsageError("no networks are named; give folders of stores, or checkpoints")
    return paths


def tell_chosen(count: int, stored: int | None, checkpoints: str) -> None:
    """Print the number of stored networks that are read, unless all networks are read."""
    if stored is not None and count < stored:
        why = "the last checkpoint of each run; --checkpoints all reads all" if checkpoints == "last" else "as chosen"
        warn(f"{count:,} of {stored:,} stored networks are read: {why}")


@contextmanager
def only_writer(out: Path) -> Iterator[None]:
    """Raise an error if another process writes the output, or if its folder cannot be written."""
    path = out.with_name(f".{out.name}.lock")
    require_lock(path)
    lock = FileLock(path, timeout=0)
    while True:
        try:
            lock.acquire()
        except Timeout as error:
            raise UsageError(
                f"another process is writing {str(out)!r}; wait until it is done, or give another name"
            ) from error
        except OSError as error:
            raise UsageError(
                f"nothing can be written to the folder {str(out.parent)!r} of the output ({error.strerror}); choose "
                "another one"
            ) from error
        if path.exists():
            break
        lock.release()  # of a process that ended meanwhile and removed the file
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
