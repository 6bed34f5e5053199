"""The commands by name, and the check of names before options are parsed."""

import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import entry_points
from itertools import chain, pairwise
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro import conf

from regauge.cli.options import UsageError
from regauge.names import did_you_mean, nearest

HELP, ALL = ("-h", "--help"), "--help-all"
CONFIG = (conf.DisallowNone, conf.FlagCreatePairsOff, conf.OmitArgPrefixes, conf.PositionalMetavarFromFieldName)
"""How options are built from classes, for parsing and for help."""
INSTEAD = (("--steps", "--epochs", "--seconds"), ("--input-shape", "--data"))
"""Options with the same purpose. The error for a missing option names the options of its group."""
ARGUMENT = re.compile(r"`([a-z_]+)=([^`]*)`")
"""An argument in a message of the library, in backticks."""
NAMES = {"out": "output", "is_kept_always": "always"}
"""Options whose names differ from the names of the arguments."""


def as_options(text: str) -> str:
    """Replace arguments in a message of the library by options: `` `dtype=float16` `` becomes `--dtype float16`."""

    def option(match: re.Match[str]) -> str:
        name, value = NAMES.get(match[1], match[1]).replace("_", "-"), match[2]
        return f"--{name}" if value in ("", "True", "...") else f"--{name} {value}"

    return ARGUMENT.sub(option, text)


GROUP = "regauge.commands"
"""The entry points by which other distributions add commands. Each entry point names an options class. In the package
of the options class, the module with the name of the command runs the command."""
ELSEWHERE = {"reproduce": "regauge-papers"}
"""The commands that other distributions of the project add."""


def with_others(commands: Any, words: Sequence[str]) -> Any:
    """Return all commands of regauge, and those of other packages unless the user named a command of regauge.

    Args:
        commands: The union of the options of regauge's commands.
        words: The words that the user typed.
    """
    word = words[0] if words else ""
    if word in commands_by_name(commands):
        return commands
    others = other_commands()
    if word in ELSEWHERE and word not in others:
        name = ELSEWHERE[word]
        raise UsageError(f"'regauge {word}' is in a distribution of its own; install it with `pip install {name}`")
    for options in others.values():
        commands |= options
    return commands


@cache
def other_commands() -> dict[str, Any]:
    """Return the options of the commands that other installed packages add, by the name of the command."""
    return {one.name: one.load() for one in entry_points(group=GROUP)}


def require_command(words: list[str], commands: Any) -> None:
    """Raise an error if the user named no known command, before the parser would interpret the words as options.

    Args:
        words: The words that the user typed.
        commands: The union of the options of all commands.
    """
    typed, named = named_command(words, commands)
    if is_dataclass(named):
        _require_options(words, named, typed)
        _require_choices(words, named)


def named_command(words: Sequence[str], commands: Any) -> tuple[str, Any]:
    """Find the command that the user named, with its options (for a partial name, the options of subcommands)."""
    typed = "regauge"
    for word in words:
        known = commands_by_name(commands)
        if word.startswith("-"):
            break
        if word not in known:
            close = nearest(word, known)
            hint = f"did you mean {f'{typed} {close}'!r}? " if close else f"there are {', '.join(known)}; "
            raise UsageError(f"there is no command {f'{typed} {word}'!r}; {hint}{f'{typed} --help'!r} explains them")
        typed, inner = f"{typed} {word}", get_type_hints(known[word], include_extras=True).get("command")
        if inner is None:
            return typed, known[word]
        commands = inner
    return typed, commands


def _require_options(words: list[str], options: Any, typed: str) -> None:
    """Raise an error for an unknown option of a command. The error names the replacement or the closest option."""
    known = {*HELP, ALL, *_flags(options)}
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if not re.fullmatch(r"--?[a-z][a-z-]*", flag) or flag in known:
            continue
        others = [one for group in INSTEAD if flag in group for one in group if one in known]
        hint = f"it has {' and '.join(others)}" if others else did_you_mean(flag, known, cutoff=0.75).strip()
        raise UsageError(f"{typed!r} has no option {flag}; {hint or f'{typed} {ALL}' + ' lists its options'}")


def _flags(options: Any) -> set[str]:
    """Return the options of a command as they are typed."""
    found = set()
    for name, hint in get_type_hints(options, include_extras=True).items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(kind):
            found |= _flags(kind)
        else:
            aliases = (getattr(mark, "aliases", None) or () for mark in marks)
            found |= {f"--{name.replace('_', '-')}", *chain.from_iterable(aliases)}
    return found


def _require_choices(words: list[str], options: Any) -> None:
    """Raise an error if a value is not among the choices of its option. The error names the closest choice."""
    for name, hint in get_type_hints(options).items():
        choices = [one for part in (hint, *get_args(hint)) if get_origin(part) is Literal for one in get_args(part)]
        option = f"--{name.replace('_', '-')}"
        for flag, value in pairwise(words) if choices else ():
            if flag == option and value not in map(str, choices) and not value.startswith("-"):
                hint = did_you_mean(value, map(str, choices))
                raise UsageError(f"{option} {value!r} does not exist; {hint}choose from {', '.join(map(str, choices))}")


def commands_by_name(commands: Any) -> dict[str, Any]:
    """Return the options of each command in a union, under its name."""
    found = {}
    for one in get_args(commands):
        options, *marks = get_args(one) if get_origin(one) is Annotated else (one,)
        named = [mark.name for mark in marks if getattr(mark, "name", None)]
        found[named[0] if named else options.__name__.lower()] = options
    return found
