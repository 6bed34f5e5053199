"""Settings as JSON, with their names in a table of classes."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from regauge.core.typed_json import require_fields


def named(settings: Any, table: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Return settings as JSON, with their name in a table."""
    name = next(name for name, kind in table.items() if kind is type(settings))
    return {"name": name, **asdict(settings)}


def made_of(values: Mapping[str, Any], table: Mapping[str, type[Any]]) -> Any:
    """Return the settings that `named` wrote."""
    kind = table[values["name"]]
    known = {field.name for field in fields(kind)}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
    require_fields(given, kind, "the net")
    return kind(**given)
