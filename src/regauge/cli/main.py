"""The `regauge` command: each command is parsed here and run by the module of its name."""

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import tyro

from regauge.cli.inr_options import Inr
from regauge.cli.options import Options, UsageError
from regauge.cli.zoo_options import Zoo

DESCRIPTION = "The symmetries of neural network weights: found in any PyTorch model, proved numerically, and used."
LOG = logging.getLogger("regauge")


def main(args: Sequence[str] | None = None) -> None:
    """Parse and run; what the user can mend is one sentence on the standard error and exit code 2."""
    options = parse(args)
    _tell()
    try:
        name = type(options).__name__.lower()
        command = import_module(f"regauge.cli.{name}")  # imports torch
        as_json = getattr(getattr(options, "command", options), "json", False)
        with import_module("regauge.cli.output").report(name, as_json=as_json):
            command.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UsageError, ValueError, KeyError, OSError, ImportError) as error:  # ImportError: an extra is missing
        LOG.debug("the command failed", exc_info=True)
        print(f"regauge: {sentence(error)}", file=sys.stderr)
        sys.exit(2)


class _Sentences(logging.Handler):
    """Prints what the library says about files, such as which it replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr)


def _tell() -> None:
    """Print what the library says about files, once however many commands this process runs."""
    storage = logging.getLogger("regauge.storage")
    if not any(isinstance(handler, _Sentences) for handler in storage.handlers):
        storage.addHandler(_Sentences(logging.INFO))
        storage.setLevel(logging.INFO)


def parse(args: Sequence[str] | None = None) -> Options | Zoo | Inr:
    """The options of one command; prints help or what is wrong with them and exits otherwise."""
    options: Options | Zoo | Inr = tyro.cli(
        Options | Zoo | Inr,
        prog="regauge",
        description=DESCRIPTION,
        args=args,
        config=(
            tyro.conf.DisallowNone,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.PositionalMetavarFromFieldName,
        ),
    )
    return options


def sentence(error: BaseException) -> str:
    """The message of an error without the quotes that `str(KeyError(...))` adds, on one line."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__
