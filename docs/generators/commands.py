"""The pages of commands: every option by the group in which the help shows it, from the command line's own classes."""

import re
from collections.abc import Iterator
from inspect import getdoc
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from generators.api import heading
from regauge.cli.command_help import NOTHING, Option, options_in_groups
from regauge.cli.commands import commands_by_name, with_others
from regauge.cli.main import Command
from regauge_papers.options import Reproduce

TITLES = {
    "": "Arguments",
    "network": "Networks",
    "method": "Method",
    "data": "Data",
    "limit": "Limits",
    "output": "Output",
}


def commands() -> dict[str, Any]:
    """The options of every command by its words, such as `zoo train`; `zoo` alone has none of its own."""
    found: dict[str, Any] = {}
    for name, options in {**commands_by_name(with_others(Command, ["demo"])), "reproduce": Reproduce}.items():
        inner = get_type_hints(options, include_extras=True).get("command")
        found[name] = options
        found |= {f"{name} {word}": one for word, one in commands_by_name(inner).items()} if inner else {}
    return found


def rest(text: str) -> str:
    """A sentence of the command line in reStructuredText."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"[|*]", r"\\\g<0>", part) for part in parts[::2]]
    parts[::2] = [re.sub(r"(?<![\w`-])--[a-z][a-z-]*", r"``\g<0>``", part) for part in parts[::2]]
    text = "`".join(parts)
    text = re.sub(r"\b(file):", r"\1\\:", text, flags=re.IGNORECASE)  # no address
    return re.sub(r'page "(\w+)" of the documentation', r":doc:`/\1`", text)


def kinds_of(hint: Any) -> Iterator[Any]:
    """The simple types within a type."""
    if get_origin(hint) is Annotated:
        yield from kinds_of(get_args(hint)[0])
    elif get_origin(hint) is Literal or not get_args(hint):
        yield hint
    else:
        for part in get_args(hint):
            yield from kinds_of(part)


def words_of(option: Option) -> str:
    """The option as it is typed, with its short form and a placeholder for its value."""
    marks = [mark for mark in option.hint.__metadata__ if type(mark).__name__ == "_ArgConfig"]
    aliases = [alias for mark in marks for alias in mark.aliases or ()]
    metavar = next((mark.metavar for mark in reversed(marks) if mark.metavar), None)
    kinds = [kind for kind in kinds_of(option.hint) if kind not in (type(None), ..., bool)]
    names = {"Path": "PATH", "int": "INT", "float": "FLOAT", "str": "TEXT"}
    shown = metavar or "|".join(dict.fromkeys(names.get(getattr(kind, "__name__", ""), "CHOICE") for kind in kinds))
    if option.is_positional:
        return metavar or option.name.upper()
    flag = f"--{option.name.replace('_', '-')}"
    return ", ".join(f"{name} {shown}".strip() for name in (flag, *aliases))


def text_of(option: Option) -> str:
    """The help of an option, with its choices and its default."""
    said = next((mark.help for mark in reversed(option.hint.__metadata__) if getattr(mark, "help", None)), "")
    choices = [repr(one).strip("'") for kind in kinds_of(option.hint) for one in get_args(kind)]
    parts = [rest(" ".join(said.split()))]
    if choices:
        parts.append(f"Choices: {', '.join(f'``{one}``' for one in choices)}.")
    default = option.default
    if option.is_required and not option.is_positional:
        parts.append("Required.")
    elif not any(default is nothing or default == nothing != 0 for nothing in NOTHING):
        parts.append(f"Default: ``{' '.join(map(str, default)) if isinstance(default, tuple) else default}``.")
    return " ".join(parts)


def options_of(words: str, options: Any) -> Iterator[str]:
    """The lines of a command's description and options."""
    yield from (f".. program:: regauge {words}", "", rest(getdoc(options) or ""), "")
    for group, found in options_in_groups(options).items():
        found = [one for one in found if one.name != "command"]
        if found:
            yield from (f".. rubric:: {TITLES[group]}", "")
        for one in found:
            yield from (f".. option:: {words_of(one)}", "", f"   {text_of(one)}", "")


def command_pages() -> dict[str, str]:
    """The text of the page of every command by its file name without ending; `index` lists them."""
    found, pages = commands(), {}
    for name in [words for words in found if " " not in words]:
        lines = [heading(f"``regauge {name}``"), *options_of(name, found[name])]
        for words, options in found.items():
            if words.startswith(f"{name} "):
                lines += [heading(f"``regauge {words}``", "-"), *options_of(words, options)]
        pages[name] = "\n".join(lines)
    texts = {name: " ".join((getdoc(found[name]) or "").partition("\n\n")[0].split()) for name in pages}
    rows = [f"   * - :doc:`regauge {name} <{name}>`\n     - {rest(text)}" for name, text in texts.items()]
    table = [heading("Commands, option by option"), ".. list-table::", "   :widths: 30 70", "", *rows, ""]
    contents = [".. toctree::", "   :hidden:", "", *(f"   {name}" for name in pages), ""]
    return {"index": "\n".join([*table, *contents]), **pages}
