"""The `regauge` command: each command is parsed here and run by the module of its name."""

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TypeAlias

import tyro

from regauge.checkpoints.plain_files import require_plain
from regauge.cli.align_options import Align, Merge, Transport
from regauge.cli.checkpoint_options import Apply, Canonicalize, Info
from regauge.cli.commands import ALL, CONFIG, HELP, as_options, require_command, with_others
from regauge.cli.compare_options import Compare
from regauge.cli.early import require_ready
from regauge.cli.flow_options import Flow
from regauge.cli.gauge_options import Audit, Gauge
from regauge.cli.inr_options import Inr
from regauge.cli.learn_options import Learn
from regauge.cli.line_options import Line, Plane, Repair
from regauge.cli.options import Demo, Discover, UsageError
from regauge.cli.prune_options import Prune
from regauge.cli.zoo_options import Zoo
from regauge.core.escaping import escape, escape_lines
from regauge.names import VERSION

DESCRIPTION = "Find the symmetries of neural network weights in PyTorch models, check them numerically, and use them."
Options: TypeAlias = Demo | Discover | Align | Merge | Transport | Canonicalize | Apply | Info | Line | Plane | Repair
Command: TypeAlias = Options | Gauge | Audit | Prune | Compare | Zoo | Inr | Learn | Flow
"""The options of every command."""
DEBUG = "REGAUGE_DEBUG"
"""The environment variable with which the exceptions of bugs are raised."""
LOG = logging.getLogger("regauge")


def main(args: Sequence[str] | None = None) -> None:
    """Parse the arguments and run the command. Errors of the user are printed as one sentence, with exit code 2.

    All other errors are bugs, with exit code 1. If `REGAUGE_DEBUG` is set, the exception of a bug is raised.
    """
    try:
        words = list(sys.argv[1:] if args is None else args)
        if words in (["--version"], ["-V"]):
            return print(f"regauge {VERSION}")
        commands = with_others(Command, words)
        require_command(words, commands)
        if {*HELP, ALL} & {*words}:
            import_module("regauge.cli.command_help").show_help(words, commands, DESCRIPTION)
        options = parse(words)
        package = type(options).__module__.rpartition(".")[0]
        _tell(package)
        _require_plain(options)
        require_ready(options)
        name = type(options).__name__.lower()
        with _ending_at_once():
            command = import_module(f"{package}.{name}")  # imports torch
            output = import_module("regauge.cli.output")
        inner = getattr(options, "command", options)
        if inner is not options and "" not in sys.path:
            sys.path.insert(0, "")  # packages in the folder where the command is typed
        with output.report(name, as_json=getattr(inner, "json", False)):
            (getattr(command, "COMMANDS", {}).get(type(inner)) or command.run)(inner)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` has
        _drop_output()
        sys.exit(141)
    except (UsageError, ValueError, KeyError, OSError, ImportError) as error:  # ImportError: an extra is missing
        LOG.debug("the command failed", exc_info=True)
        _refuse(sentence(error))
    except Exception as error:
        if _is_out_of_memory(error):
            _refuse("there is not enough memory; free some, or lower the limit with --memory")
        if os.environ.get(DEBUG):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: {sentence(error)}"
        _refuse(f"this is a bug, please report it with the command ({where}); {DEBUG}=1 shows more", code=1)


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Return a context in which an interrupt ends the process at once, and no imported code can catch it."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def _drop_output() -> None:
    """Discard text that standard output could not write, because the interpreter would fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(text: str, code: int = 2) -> NoReturn:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop_output()
    print(f"regauge: {escape(text)}", file=sys.stderr)
    sys.exit(code)


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of Python or torch says that memory is exhausted."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)[:300].lower())


def _require_plain(options: object) -> None:
    """Raise an error if an option names an existing pipe, socket or device, or a path that is not UTF-8."""
    for value in vars(options).values():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, str | Path):
                require_plain(one)
            elif is_dataclass(one):
                _require_plain(one)


class _Sentences(logging.Handler):
    """A handler that prints the log messages of the library, such as the names of replaced files."""

    def emit(self, record: logging.LogRecord) -> None:
        print(escape_lines(as_options(record.getMessage())), file=sys.stderr)


def _tell(package: str) -> None:
    """Print each log message of the library once, as a sentence, even if this process runs several commands."""
    for name in {"regauge.checkpoints", "regauge.hub", "regauge.merging", package} - {"regauge.cli"}:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _Sentences) for handler in logger.handlers):
            logger.addHandler(_Sentences(logging.INFO))
            logger.setLevel(logging.INFO)


def parse(args: Sequence[str] | None = None) -> Command:
    """Return the options of one command. For help or wrong arguments, print a message and exit."""
    options: Command = tyro.cli(
        with_others(Command, sys.argv[1:] if args is None else args),
        prog="regauge",
        description=DESCRIPTION,
        args=args,
        config=CONFIG,
    )
    return options


def sentence(error: BaseException) -> str:
    """Return the message of an error on one line, without the quotes of a KeyError or the number of an OSError."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        names = [repr(os.fspath(name)) for name in (error.filename, error.filename2) if name is not None]
        text = f"{' -> '.join(names)} cannot be used: {error.strerror[:1].lower()}{error.strerror[1:]}"
    elif isinstance(error, OSError) and error.strerror:
        text = f"the standard output, or a file, cannot be used: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return as_options(" ".join(text.split())) or type(error).__name__
