"""Calls of factories that users name. Exceptions in user code are converted to errors of one sentence."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from regauge.checkpoints.location import is_address
from regauge.core.counted import shorten
from regauge.names import did_you_mean

Values = Literal["never", "if small", "always"]
"""Whether a model is initialized or is built on the meta device. Tracing needs no weights, but evaluation does."""


@contextmanager
def users_code(failure: str) -> Iterator[None]:
    """Return a context that converts every exception to a ValueError with a message of one sentence.

    Args:
        failure: The beginning of the sentence, such as "the model fails on the data".
    """
    try:
        yield
    except SystemExit as error:
        raise ValueError(f"{failure}: it ended the program with {error.code!r}; return instead") from error
    except Exception as error:
        raise ValueError(f"{failure}: {type(error).__name__}: {error}") from error


def call_factory(text: str, what: str, context: AbstractContextManager[Any] | None = None) -> Any:
    """Call the factory `package.module:name` or `file.py:name` and return its result.

    Args:
        text: The name of the factory.
        what: The role of the factory in error messages, MODEL or DATA.
        context: A context manager that is active during the call.

    Raises:
        ValueError: The factory does not exist or raises an exception.
    """
    if is_address(text):
        raise ValueError(f"{what} {text!r} is an address, and regauge fetches nothing: download it, and name the file")
    place, colon, name = text.rpartition(":")
    if text.endswith(".py"):
        raise ValueError(f"{what} {text!r} is a file: name the function or class in it that makes it, {text}:NAME")
    if not colon or not place or not name:
        raise ValueError(
            f"{what} {text!r} is neither a folder nor a factory; write package.module:factory or file.py:factory, or "
            f"fetch it if it is a model of the Hugging Face hub: hf download {text} --local-dir {Path(text).name}"
        )
    module = _import(place, text, what)
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [one for one, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ValueError(
            f"{what} {text!r}: {place!r} has no function or class {name!r}; {did_you_mean(name, known)}it has "
            f"{shorten(known) or 'none'}"
        )
    with users_code(f"{what} {text!r} failed"), context or nullcontext():
        return factory()


def _import(place: str, text: str, what: str) -> ModuleType:
    """Import a module by its name, or by its file."""
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise ValueError(f"{what} {text!r}: there is no file {place!r}; check the path")
        name = f"regauge_user_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{what} {text!r}: {place!r} cannot be imported; check that it is a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        with users_code(f"{what} {text!r} cannot be imported"):
            spec.loader.exec_module(module)
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")
    with users_code(f"{what} {text!r} cannot be imported"):
        return importlib.import_module(place)
