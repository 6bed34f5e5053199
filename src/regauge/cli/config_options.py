"""Options that are settings of the library: its configs declare their types, defaults and help."""

import re
from collections.abc import Callable
from dataclasses import fields
from inspect import get_annotations
from typing import Annotated, Any, Literal, TypeVar

from tyro.conf import arg

T = TypeVar("T")
ENTRY = re.compile(r"^ {8}(\w+): (.+(?:\n {12,}.+)*)", re.MULTILINE)
"""A field and its text in the section "Attributes" of a docstring."""


def with_settings(config: type, names: str, **metavars: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator, to be placed below `dataclass`, that adds settings of a config to the options of a command.

    A setting that is true by default becomes an option with the values "yes" and "no".

    Args:
        config: A dataclass in a module without torch, whose docstring (or a base's) has a section "Attributes".
        names: The settings, separated by spaces. `option=setting` gives an option another name.
        metavars: The placeholder that the help shows for each option.
    """
    kinds = [kind for kind in reversed(config.__mro__) if "__dataclass_fields__" in vars(kind)]
    hints = {name: hint for kind in kinds for name, hint in get_annotations(kind).items()}
    helps = {name: " ".join(text.split()) for kind in kinds for name, text in ENTRY.findall(kind.__doc__ or "")}
    defaults = {field.name: field.default for field in fields(config)}

    def as_option(mention: re.Match[str]) -> str:
        """Return the option (such as `--init-lr`) for the name of a setting that a text mentions."""
        return f"--{mention[1].replace('_', '-')}" if mention[1] in defaults else mention[0]

    def declare(options: type[T]) -> type[T]:
        own, taken = dict(get_annotations(options)), dict(getattr(options, "SETTINGS", {}))
        for option, _, setting in (name.partition("=") for name in names.split()):
            setting = setting or option
            is_on = defaults[setting] is True
            kind = Literal["yes", "no"] if is_on else hints[setting]
            own[option] = Annotated[
                kind, arg(help=re.sub(r"`(\w+)`", as_option, helps[setting]), metavar=metavars.get(option))
            ]
            setattr(options, option, "yes" if is_on else defaults[setting])
            taken[option] = setting
        options.__annotations__, options.SETTINGS = own, taken  # type: ignore[attr-defined]
        return options

    return declare


def settings_of(options: Any, config: type) -> dict[str, Any]:
    """Return the settings of a config that the user typed, by their names in the config."""
    known = {field.name for field in fields(config)}
    typed = {setting: getattr(options, option) for option, setting in options.SETTINGS.items() if setting in known}
    return {name: value == "yes" if value in ("yes", "no") else value for name, value in typed.items()}
