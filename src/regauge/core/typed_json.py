"""Values from JSON texts, compared with the types that fields are annotated with."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def require_fields(values: Mapping[str, Any], kind: type, what: str) -> None:
    """Raise a ValueError unless values fit the annotations of a dataclass of these fields; lists are tuples."""
    for name, hint in get_type_hints(kind).items():
        if name in values and not _fits(values[name], hint):
            raise ValueError(f"{name} of {what} is {values[name]!r}, which is no {_name(hint)}")


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
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if is_dataclass(hint) and isinstance(value, tuple):
        return len(value) == len(get_type_hints(hint)) and all(map(_fits, value, get_type_hints(hint).values()))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).rpartition(".")[2]
