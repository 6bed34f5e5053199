"""Names that are imported on their first use: public names of packages, and defaults of settings; and the version."""

from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

import lazy_loader

VERSION = "0.2.0"
"""The version of regauge, as in pyproject.toml."""


def later(place: str, *args: Any, **settings: Any) -> Callable[[], Any]:
    """Make a factory of a default, the result of `package.module:Class`, which is imported when it is called."""

    def make() -> Any:
        module, _, name = place.partition(":")
        return getattr(import_module(module), name)(*args, **settings)

    return make


def attach(
    package: str, file: str | None, moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` for a package from its stub.

    Names are imported when they are first used, so that `regauge --help` answers without loading torch. To make a name
    public, add a line to the stub.

    Args:
        package: The `__name__` of the package.
        file: Its `__file__`; the stub is the `.pyi` file next to it. None for a package without public names.
        moved: Names of earlier versions, which still work and are not listed, and where they are now:
            `package`, `package:name` or `package:Class.method`. The package may be one of a distribution of its own.
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
        from difflib import get_close_matches

        close = get_close_matches(name, public, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; `dir({package})` lists its names"
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name)

    return find, listed, public
