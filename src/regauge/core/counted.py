"""Texts for messages: numbers followed by nouns, and lists of names."""

import json
from collections.abc import Mapping, Sequence, Sized
from typing import Any


def count(items: Sized, word: str, plural: str | None = None) -> str:
    """Return the number of items, followed by the noun in the singular or plural.

    >>> count("ab", "group"), count("a", "batch", "batches")
    ('2 groups', '1 batch')
    """
    return f"1 {word}" if len(items) == 1 else f"{len(items)} {plural or word + 's'}"


def brief(value: Any) -> str:
    """Return plain JSON data on one line, without null fields.

    Objects that have a "kind" are written like Python calls.

    >>> print(brief({"kind": "Adam", "lr": {"kind": "Choice", "values": [0.1, 0.2]}, "clip": None}))
    Adam(lr=Choice(values=[0.1, 0.2]))
    """
    if not isinstance(value, Mapping):
        return json.dumps(value)
    inner = (f"{name}={brief(one)}" for name, one in value.items() if name != "kind" and one is not None)
    return f"{value.get('kind', '')}({', '.join(inner)})"


def shorten(names: Sequence[str], limit: int = 4) -> str:
    """Return names as a list for a message, shortened to at most `limit` names."""
    listed = ", ".join(repr(name) for name in names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
