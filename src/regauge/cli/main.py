"""The `regauge` command: each command is parsed here and run by the module of its name."""

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import tyro

from regauge.cli.inr_options import Inr
from regauge.cli.options import (
    Align,
    Apply,
    Canonicalize,
    Demo,
    Discover,
    Line,
    Merge,
    Options,
    Plane,
    Repair,
    Reproduce,
    UsageError,
)
from regauge.cli.zoo_options import Zoo

DESCRIPTION = "The symmetries of neural network weights: found in any PyTorch model, proved numerically, and used."

MODULES: dict[type, str] = {
    Demo: "regauge.cli.demo",
    Discover: "regauge.cli.discover",
    Align: "regauge.cli.align",
    Merge: "regauge.cli.merge",
    Canonicalize: "regauge.cli.canonicalize",
    Apply: "regauge.cli.apply",
    Line: "regauge.cli.line",
    Plane: "regauge.cli.plane",
    Repair: "regauge.cli.repair",
    Reproduce: "regauge.cli.reproduce",
    Zoo: "regauge.cli.zoo",
    Inr: "regauge.cli.inr",
}
"""Each has a function `run(options)`; it is imported when the command is known."""

Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Discover, tyro.conf.subcommand("discover")]
    | Annotated[Align, tyro.conf.subcommand("align")]
    | Annotated[Merge, tyro.conf.subcommand("merge")]
    | Annotated[Canonicalize, tyro.conf.subcommand("canonicalize")]
    | Annotated[Apply, tyro.conf.subcommand("apply")]
    | Annotated[Line, tyro.conf.subcommand("line")]
    | Annotated[Plane, tyro.conf.subcommand("plane")]
    | Annotated[Repair, tyro.conf.subcommand("repair")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Zoo, tyro.conf.subcommand("zoo")]
    | Annotated[Inr, tyro.conf.subcommand("inr")]
)


def main(args: Sequence[str] | None = None) -> None:
    """Parse and run; what the user can mend is one sentence on the standard error and exit code 2."""
    options = parse(args)
    try:
        import_module(MODULES[type(options)]).run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UsageError, ValueError, KeyError, OSError) as error:
        logging.getLogger("regauge").debug("the command failed", exc_info=True)
        print(f"regauge: {sentence(error)}", file=sys.stderr)
        sys.exit(2)


def parse(args: Sequence[str] | None = None) -> Options | Zoo | Inr:
    """The options of one command; prints help or what is wrong with them and exits otherwise."""
    options: Options | Zoo | Inr = tyro.cli(
        Command,
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
