"""Names that are imported on first use, suggestions for mistyped names, and the version of the package."""

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata
from operator import attrgetter
from typing import Any

import lazy_loader

VERSION = "0.2.0"
"""The version of regauge, as in pyproject.toml."""


def later(place: str, *args: Any, **settings: Any) -> Callable[[], Any]:
    """Return a factory for a default value. The factory imports and calls `package.module:Class`."""

    def make() -> Any:
        module, _, name = place.partition(":")
        return getattr(import_module(module), name)(*args, **settings)

    return make


def documentation() -> str:
    """Return the documentation URL from the metadata of the installed package; empty if there is none."""
    try:
        addresses = metadata("regauge").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    return next((url for label, _, url in (one.partition(", ") for one in addresses) if label == "Documentation"), "")


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to a mistyped name, as a whole or in a part; None if no name is
    similar.

    >>> nearest("brest", ["digits", "breast-cancer"])
    'breast-cancer'
    """
    names = list(known)
    parts = {part: name for name in reversed(names) for part in re.split("[-_]", name)} | {name: name for name in names}
    close = get_close_matches(word, parts, n=1, cutoff=cutoff)
    return parts[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a question for an error message that suggests the nearest known name; empty if there is none."""
    close = nearest(word, known, cutoff=cutoff)
    return f"did you mean {close!r}? " if close else ""


def absent(module: str, name: str, public: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that a module lacks. The error suggests the nearest public name."""
    hint = did_you_mean(name, public).strip() or f"`dir({module})` lists its names"
    return AttributeError(f"module {module!r} has no attribute {name!r}; {hint}", name=name)


def attach(
    package: str, file: str | None, moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package from its stub.

    Names are imported on first use. Therefore `regauge --help` does not load torch. To make a name public, add a line
    to the stub.

    Args:
        package: The `__name__` of the package.
        file: The `__file__` of the package. The stub is the `.pyi` file next to it. None for a package without public
            names.
        moved: Names from earlier versions with their new places: `package`, `package:name` or `package:Class.method`.
            The old names still work, but they are not listed. The new package may belong to another distribution.
    """
    load, listed, public = lazy_loader.attach(package) if file is None else lazy_loader.attach_stub(package, file)

    def find(name: str) -> Any:
        if name in public:
            return load(name)
        if moved and name in moved:
            place, _, new = moved[name].partition(":")
            try:
                return attrgetter(new or name)(import_module(place))
            except ModuleNotFoundError as error:
                if error.name != place.partition(".")[0]:
                    raise
                distribution = error.name.replace("_", "-")
                raise ImportError(
                    f"{package}.{name} is now in the distribution {distribution}; install it with "
                    f"`pip install {distribution}`"
                ) from error
        raise absent(package, name, public)

    return find, listed, public
