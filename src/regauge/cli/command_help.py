"""Help of the commands: the six most important options or, with `--help-all`, all options in groups."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from inspect import getdoc, getsource
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Positional, arg, subcommand

from regauge.cli.commands import ALL, CONFIG, commands_by_name, named_command
from regauge.names import documentation

NOTHING = (None, "", (), False, MISSING)
"""Defaults that are not displayed. The description of the option explains its default, or the option is required."""
FEW = 8
"""A command with at most this number of options displays all of them."""
FIRST = 6
"""The number of options that `--help` displays for commands with more than `FEW` options."""
ORDER = (
    "output target model symmetry data base rule method share path metric endpoints align reference meta kind inputs "
    "networks by autoencoder latent seconds width depth strength points steps memory resume overwrite seed json"
)
"""Options that come first in the help of a command, in the order of their importance."""
GROUPS = {
    "network": "model symmetry base tokenizer recipe keep move input_shape input_dtype outputs retrace meta endpoints "
    "reference where checkpoints networks samples among template beside settings autoencoder like",
    "method": "",
    "data": "data test train loss batch statistics examples inputs target label labels split_by pair_by dataset",
    "limit": "memory seconds epochs patience device on shard shared dry_run resume",
    "output": "output out overwrite json dtype shard_size storage format color",
}
"""Options by the group in which the help displays them. All options that are not listed are settings of the method."""


@dataclass(frozen=True)
class Option:
    """An option or a positional argument of a command, as displayed in the help."""

    name: str
    hint: Any
    default: Any

    @property
    def is_positional(self) -> bool:
        return Positional in getattr(self.hint, "__metadata__", ())

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def as_field(self) -> tuple[str, Any, Field[Any]]:
        return self.name, self.hint, field() if self.is_required else field(default=self.default)


def show_help(words: Sequence[str], commands: Any, description: str) -> None:
    """Print the help that the user requested, and exit.

    Args:
        words: The words that the user typed.
        commands: The union of the options of all commands.
        description: The text at the beginning of the help of `regauge` itself.
    """
    typed, options = named_command(words, commands)
    if is_dataclass(options):
        shown = _with_groups(options) if ALL in words else _with_first(options)  # type: ignore[arg-type]
    elif typed == "regauge":
        shown = _made(
            "Regauge",
            f"{description}\n\n{documentation()}",
            [_flag("version", "Print the version and exit."), _command(options)],
        )
    else:
        shown = _made("Commands", "", [_command(options)])
    tyro.cli(shown, prog=typed, args=["--help"], config=CONFIG)


def options_in_groups(options: type) -> dict[str, list[Option]]:
    """Return the options of a command by their group in the help. Positional arguments have the group ""."""
    groups: dict[str, list[Option]] = {"": [], **{name: [] for name in GROUPS}}
    for one in options_of(options):
        group = next((name for name, names in GROUPS.items() if one.name in names.split()), "method")
        groups["" if one.is_positional else group].append(one)
    return groups


def _with_groups(options: type) -> type:
    """Return a class whose help shows all options, with a box for each group."""
    groups = options_in_groups(options)
    parts: list[Any] = [one.as_field for one in groups.pop("")]
    for name, found in groups.items():
        if found:
            parts.append((name, _made(name, "", [one.as_field for one in found]), field()))
    return _made(options.__name__, getdoc(options) or "", parts)


def _with_first(options: type) -> type:
    """Return a class whose help shows the most important options, and how to see all other options."""
    found = list(options_of(options))
    optional = [one for one in found if not one.is_positional]
    if len(optional) <= FEW:
        return _made(options.__name__, getdoc(options) or "", [one.as_field for one in found])
    rank = {name: place for place, name in enumerate(ORDER.split())}
    optional.sort(key=lambda one: (not one.is_required, rank.get(one.name, len(rank))))
    first = [one.as_field for one in found if one.is_positional or one in optional[:FIRST]]
    more = _flag("help_all", f"Show all {len(optional)} options, in groups, with their whole descriptions.")
    return _made(options.__name__, getdoc(options) or "", [more, *map(_in_short, first)])


def _in_short(part: tuple[str, Any, Field[Any]]) -> tuple[str, Any, Field[Any]]:
    """Return a field of options, with only the first sentence of its help."""
    name, hint, value = part
    texts = [mark.help for mark in hint.__metadata__ if getattr(mark, "help", None)]
    return (name, Annotated[hint, arg(help=re.split(r"(?<=\.)\s", texts[-1])[0])], value) if texts else part


def _flag(name: str, text: str) -> tuple[str, Any, Any]:
    return name, Annotated[bool, arg(help=text, help_behavior_hint="")], field(default=False)


def _command(commands: Any) -> tuple[str, Any, Field[Any]]:
    """Return a field of commands, each with the first paragraph of its description."""
    union: Any = None
    for name, options in commands_by_name(commands).items():
        made: Any = _made(options.__name__, (getdoc(options) or "").partition("\n\n")[0], [])
        one = Annotated[made, subcommand(name, prefix_name=False)]
        union = one if union is None else union | one
    return "command", union, field()


def _made(name: str, description: str, parts: list[Any]) -> type:
    made = make_dataclass(name, parts, frozen=True, kw_only=True)
    made.__doc__ = description
    return made


def options_of(options: type, values: Any = None) -> Iterator[Option]:
    """Yield the options of a command in their order, including the options of nested dataclasses."""
    texts, hints = _texts(options), get_type_hints(options, include_extras=True)
    for one in fields(options):
        hint = hints[one.name]
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        default = default if values is None else getattr(values, one.name)
        if is_dataclass(kind) and isinstance(kind, type):
            yield from options_of(kind, default)
        else:
            is_said = any(getattr(mark, "help", None) for mark in marks) or one.name not in texts
            is_empty = any(default is nothing or default == nothing != 0 for nothing in NOTHING)
            said = None if is_said else texts[one.name]
            yield Option(
                one.name, Annotated[hint, arg(help=said, help_behavior_hint="" if is_empty else None)], default
            )


def _texts(options: type) -> Mapping[str, str]:
    """Return the strings below the fields of a class and of its bases."""
    found = {}
    for kind in reversed(options.__mro__):
        body = ast.parse(dedent(getsource(kind))).body[0].body if is_dataclass(kind) else []  # type: ignore[attr-defined]
        for one, text in pairwise(body):
            if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(one.target)] = " ".join(str(text.value.value).split())
    return found
