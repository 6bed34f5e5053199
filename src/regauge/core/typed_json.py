"""Checks of JSON values by the types of dataclass fields, and settings as JSON with the names of their classes."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST_INTEGER = 1 << 1023
"""Integers from this one on may exceed the range of floating-point numbers."""
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""An escaped character in JSON text that may be half of a surrogate pair."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text, and raise an error for text that would lose information.

    Raises:
        ValueError: The text is not JSON, not UTF-8 or nested too deeply; or an object has the same name twice; or half
            of a surrogate pair is missing. The message is a clause that the caller puts into a sentence, such as "it is
            nested too deeply".
    """
    try:
        content = text if isinstance(text, str) else text.decode()
        found = json.loads(content, object_pairs_hook=_object)
        if HALF.search(content):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise ValueError("it contains an incomplete character") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it contains {twice!r} twice")
    return found


def require_fields(values: Mapping[str, Any], kind: type, what: str) -> None:
    """Raise a ValueError unless values fit the annotations of a dataclass.

    A list is accepted for a field that is a tuple.
    """
    for name, hint in get_type_hints(kind).items():
        if name in values and not _fits(values[name], hint):
            raise ValueError(f"{name} of {what} is {values[name]!r}, which is no {_name(hint)}")


def named(settings: Any, table: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Return settings as JSON data, together with the name of their class in a table."""
    name = next(name for name, kind in table.items() if kind is type(settings))
    return {"name": name, **asdict(settings)}


def made_of(values: Mapping[str, Any], table: Mapping[str, type[Any]]) -> Any:
    """Return the settings object described by JSON data from `named`."""
    kind = table[values["name"]]
    known = {field.name for field in fields(kind)}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
    require_fields(given, kind, "the net")
    return kind(**given)


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in args)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in args)
    if origin is tuple and args[-1] is Ellipsis:
        return isinstance(value, tuple) and all(_fits(one, args[0]) for one in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(args) and all(map(_fits, value, args))
    if origin is list:
        return isinstance(value, list) and all(_fits(one, args[0]) for one in value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if is_dataclass(hint) and isinstance(value, hint):  # type: ignore[arg-type]
        return True
    if is_dataclass(hint) and isinstance(value, tuple):
        return len(value) == len(get_type_hints(hint)) and all(map(_fits, value, get_type_hints(hint).values()))
    if hint is float:
        return type(value) is float or (type(value) is int and abs(value) < LARGEST_INTEGER)
    if hint is Any:
        return True
    return type(value) is hint


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).rpartition(".")[2]
