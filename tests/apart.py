"""Commands in separate processes, in which a test can intercept each change of the files in a folder.

The processes are forked from a process that has computed nothing yet. Therefore the processes contain nothing from
earlier tests, such as threads of autograd, which a forked process does not have.
"""

import errno
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Literal

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["matplotlib.figure", "torch._dynamo", "regauge.cli.learn", "regauge.cli.flow"]
CONTEXT.set_forkserver_preload(PRELOADED)

Then = Literal["kill", "refuse"]
"""The event at a change: the process is killed before the change, or the system refuses the change."""


def run_apart(
    arguments: list[str], *, then: Then | None = None, at: int = 1, most_bytes: int | None = None
) -> tuple[int, str, int]:
    """Run a command in the current folder. The command saves its state after every step, and draws no pictures.

    Args:
        arguments: The arguments of the command.
        then: The event at a change of the folder's files.
        at: The number of the first change with the event, counted from one.
        most_bytes: The largest size in bytes of a file that can be written, as on a full disk.

    Returns:
        The exit code (minus the number of the signal that ended the process), its error output, and the number of
        changes.
    """
    with tempfile.NamedTemporaryFile() as errors:
        changes = CONTEXT.Value("l", 0)
        child = CONTEXT.Process(
            target=_run, args=(arguments, Path.cwd(), Path(errors.name), changes, then, at, most_bytes)
        )
        child.start()
        child.join()
        assert child.exitcode is not None
        return child.exitcode, errors.read().decode(), changes.value


def _run(
    arguments: list[str],
    folder: Path,
    errors: Path,
    changes: "Synchronized[int]",
    then: Then | None,
    at: int,
    most_bytes: int | None,
) -> None:
    from matplotlib.figure import Figure

    from regauge.checkpoints import state_file
    from regauge.cli.main import main

    def meet(file: str) -> None:
        changes.value += 1
        if then == "kill" and changes.value == at:
            os.kill(os.getpid(), signal.SIGKILL)
        if then == "refuse" and changes.value >= at:
            raise OSError(errno.EROFS, "Read-only file system", file)

    code = 1
    try:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY), 2)
        sys.stdout, sys.stderr = (open(k, "w", closefd=False) for k in (1, 2))  # noqa: SIM115
        for drawing in ("savefig", "draw_without_rendering"):
            setattr(Figure, drawing, lambda *args, **options: None)
        state_file.SECONDS = 0.0
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        sys.addaudithook(_watcher(str(folder), meet))
        main(arguments)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watcher(folder: str, meet: Callable[[str], None]) -> Callable[[str, tuple[Any, ...]], None]:
    """Return the function that is called before each event of the interpreter, and reports the events that change files
    in a folder.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            is_change = bool((isinstance(mode, str) and set(mode) & {*"wax+"}) or (flags or 0) & 3)
        else:
            path, is_change = (args[0] if args else None), event in ("os.rename", "os.remove", "os.link")
        if is_change and isinstance(path, str | os.PathLike):
            file = os.path.abspath(os.fspath(path))
            if os.path.dirname(file) == folder:
                meet(file)

    return hook
