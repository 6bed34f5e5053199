"""The text form of a symmetry: JSON that is stable, versioned, and short enough to edit."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from regauge.core.groups import Group, Placement

FORMAT = "regauge.symmetry"
VERSION = 1


def write(groups: Sequence[Group], fields: Mapping[str, Any]) -> str:
    """Groups and further fields as text; what has its default value is left out."""
    rows = [_compact(asdict(group), Group(name="", size=0, placements=())) for group in groups]
    for row in rows:
        row["placements"] = [_compact(p, Placement("", 0)) for p in row["placements"]]
    document = {"format": FORMAT, "version": VERSION, "groups": rows, **fields}
    text = json.dumps(document, indent=1)
    # Innermost lists on one line each: a list of exponents stays readable.
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s*\n\s*", " ", m.group()), text)


def read(text: str) -> tuple[tuple[Group, ...], dict[str, Any]]:
    """Read what `write` wrote: the groups, and all fields with tuples for lists."""
    document = _tuples(read_versioned(text, FORMAT, VERSION))
    try:
        groups = tuple(
            Group(**{**g, "placements": tuple(Placement(**p) for p in g["placements"])}) for g in document["groups"]
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a group or placement of this symmetry is malformed: {error}") from error
    return groups, document


def read_versioned(text: str, form: str, version: int) -> dict[str, Any]:
    """A JSON object that says of which form (such as "regauge.symmetry") and version it is.

    Raises:
        ValueError: It is not JSON, of another form, or of another version than the one that can be read.
    """
    name = form.rpartition(".")[2]
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON ({error}); give the text that `to_json` wrote") from error
    if not isinstance(document, dict) or document.get("format") != form:
        article = "an" if name[0] in "aeiou" else "a"
        raise ValueError(f"this JSON is not {article} {name}: it lacks 'format': '{form}'")
    if document.get("version") != version:
        raise ValueError(
            f"this {name} has version {document.get('version')}, but this regauge reads version {version}; "
            "write it again with this version, or upgrade regauge"
        )
    return document


def _compact(fields: dict[str, Any], default: Group | Placement) -> dict[str, Any]:
    required = {"name", "size", "placements", "parameter", "axis"}
    return {key: value for key, value in fields.items() if key in required or value != getattr(default, key)}


def _tuples(value: Any) -> Any:
    """A value with tuples for lists."""
    if isinstance(value, dict):
        return {key: _tuples(one) for key, one in value.items()}
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
