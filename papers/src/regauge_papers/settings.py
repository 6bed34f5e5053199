"""File names for settings, which stay the same if classes of settings get further fields."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from regauge.checkpoints.writing import save_text

BESIDE = ".settings"
"""The suffix of the file that lists all settings, including settings with default values."""


def place_of(folder: Path, settings: object, suffix: str = "") -> Path:
    """Return the path of the file or folder for some settings. The path may not exist.

    The name depends only on settings that differ from their defaults. A field that is added later therefore does not
    change the name while it has its default. A second file with the same name lists all settings. If a listed setting
    now has another value although the name is the same, its default was changed. After a change of a default, the name
    depends on all settings.
    """
    whole = folder / f"{_digest(repr(settings))}{suffix}"
    if whole.exists():
        return whole
    name = _digest(json.dumps(describe(settings, leaves_out_defaults=True)))
    beside, now = folder / f"{name}{BESIDE}", describe(settings)
    if not beside.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_text(json.dumps(now) + "\n", beside)
    elif not _agrees(json.loads(beside.read_text(encoding="utf-8")), now):
        return whole
    return folder / f"{name}{suffix}"


def describe(settings: object, *, leaves_out_defaults: bool = False) -> Any:
    """Return settings as plain JSON: dataclasses by class name and fields, all other values by their `repr`.

    Fields that are not in the `repr` of a dataclass are ignored.
    """
    if is_dataclass(settings) and not isinstance(settings, type) and hasattr(type(settings).__repr__, "__wrapped__"):
        found = {}
        for part in (part for part in fields(settings) if part.repr):
            value = describe(getattr(settings, part.name), leaves_out_defaults=leaves_out_defaults)
            if leaves_out_defaults and _is_default(part, value):
                continue
            found[part.name] = value
        return {"kind": type(settings).__qualname__, "fields": found}
    if isinstance(settings, tuple | list):
        return [describe(one, leaves_out_defaults=leaves_out_defaults) for one in settings]
    if isinstance(settings, Mapping):
        pairs = [(k, v) for k, v in settings.items()]
        return {"pairs": describe(pairs, leaves_out_defaults=leaves_out_defaults)}
    return repr(settings)


def _is_default(part: "Field[Any]", described: Any) -> bool:
    """Return whether a field has its default."""
    if part.default is not MISSING:
        return bool(described == describe(part.default, leaves_out_defaults=True))
    if part.default_factory is not MISSING:
        return bool(described == describe(part.default_factory(), leaves_out_defaults=True))
    return False


def _agrees(before: Any, now: Any) -> bool:
    """Return whether all stored settings still have their stored values; further settings may exist."""
    if isinstance(before, dict) and isinstance(now, dict):
        if before.keys() == now.keys() == {"kind", "fields"}:
            old, new = before["fields"], now["fields"]
            return before["kind"] == now["kind"] and all(k in new and _agrees(old[k], new[k]) for k in old)
        return before.keys() == now.keys() and all(_agrees(before[k], now[k]) for k in before)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_agrees, before, now))
    return bool(before == now)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
