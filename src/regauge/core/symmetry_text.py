"""Symmetries as text: a table to print, and JSON."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from regauge.core.act import overlapping, span
from regauge.core.counted import count
from regauge.core.escaping import escape, escape_lines, text_table
from regauge.core.groups import Frozen, Group, Placement, axes_of
from regauge.core.translation_text import render_translations
from regauge.core.translations import TranslationFamily
from regauge.core.typed_json import require_fields


def render(
    groups: Sequence[Group],
    frozen: Sequence[Frozen],
    unknown: Sequence[str],
    unused: Sequence[str],
    structure: Sequence[str],
    notes: Sequence[str],
    translations: Sequence[TranslationFamily],
) -> str:
    """Return a readable table of the groups and translations of a symmetry. Unusual characters in names are escaped.

    The table lists sizes, the axes on which groups act, frozen axes with reasons, and structure tensors.
    """
    sizes = {group.name: group.size for group in groups}
    rows = []
    for group in groups:
        copies = math.prod(sizes[base] for base in group.within)
        size = f"{group.size or '?'}" + (f" x{copies}" if group.within else "")
        axes = dict.fromkeys(f"{p.parameter}[{p.axis}]" for p in group.placements)
        rows.append((escape(group.name), group.kind, size, name_families(group), _shorten(list(axes))))
    lines = text_table(("group", "kind", "size", "families", "acts on"), rows)
    order = sum(g.log10_order * math.prod(sizes[b] for b in g.within) for g in groups)
    known = f"10^{order:.1f} discrete elements" if all(sizes.values()) else "sizes are not known yet"
    lines += ["", f"{count(groups, 'group')}, {known}"]
    if any(group.within for group in groups):
        lines.append("xN: one independent copy for each of the N blocks that it is repeated within")
    lines += render_translations(translations)
    if frozen:
        lines += ["", f"frozen axes ({len(frozen)}), and why:"]
        reasons: dict[str, list[str]] = {}
        for row in frozen:
            reasons.setdefault(row.reason, []).append(f"{row.parameter}[{row.axis}]")
        lines += [f"  {escape(reason)}: {_shorten(where)}" for reason, where in reasons.items()]
    if unknown:
        title = "operators without a rule (they freeze the axes that they read; see `regauge.discovery.register_rule`):"
        lines += ["", title, *(f"  {escape(name)}" for name in unknown)]
    if unused:
        lines += ["", f"parameters that do not influence the outputs: {_shorten(list(unused))}"]
    if structure:
        told = "structure tensors, which are not changed (no normalization computes them, or `keep` names them)"
        lines += ["", f"{told}: {_shorten(list(structure), 12)}"]
    return "\n".join([*lines, *(line for note in notes for line in ("", escape_lines(note)))])


def name_families(group: Group) -> str:
    """Return words for the action of a group's elements, such as permutation, scale, sign or rotation."""
    if group.keeps_ones:
        return "rotation, ones kept"
    if group.is_proper:
        return "angle" if group.size == 2 else "rotation, no reflection"
    if group.matrix != "none":
        return {"orthogonal": "rotation", "linear": "matrix"}[group.matrix]
    several = len(group.class_sizes) > 1
    parts = (
        [f"order in {count(group.class_sizes, 'class', 'classes')}" if several else "order"]
        if group.is_permuted
        else []
    )
    for number, word in ((group.scales, "scale"), (group.signs, "sign"), (group.shifts, "shift")):
        if number:
            parts.append(word if number == 1 else f"{number} {word}s")
    behind = {"none": "", "orthogonal": ", rotation behind gains", "centered": ", rotation behind gains, ones kept"}
    return (" ".join(parts) or "blocks only") + behind[group.behind_gains]


def _shorten(items: list[str], limit: int = 4) -> str:
    shown = ", ".join(map(escape, items[:limit]))
    return shown if len(items) <= limit else f"{shown}, and {len(items) - limit} more"


FORMAT = "regauge.symmetry"
VERSION = 1
LARGEST_EXPONENT = 1_000_000
"""The largest exponent that is accepted in a symmetry read from a file."""


def write(groups: Sequence[Group], fields: Mapping[str, Any]) -> str:
    """Return groups and further fields as JSON text. Fields that equal their default values are omitted."""
    rows = [_compact(asdict(group), Group(name="", size=0, placements=())) for group in groups]
    for row in rows:
        row["placements"] = [_compact(p, Placement("", 0)) for p in row["placements"]]
    document = {"format": FORMAT, "version": VERSION, "groups": rows, **fields}
    text = json.dumps(document, indent=1)
    # Each innermost list on one line, so that lists of exponents are readable.
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s*\n\s*", " ", m.group()), text)


def read(text: str) -> tuple[tuple[Group, ...], dict[str, Any]]:
    """Read groups and further fields from the JSON text that `write` returned. Lists in the JSON text become tuples."""
    try:
        document = _tuples(read_versioned(text, FORMAT, VERSION))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    shapes = document.get("shapes", {})
    try:
        groups = tuple(
            Group(**{**g, "placements": tuple(Placement(**p) for p in g["placements"])}) for g in document["groups"]
        )
        for group in groups:
            require_fields({**vars(group), "placements": ()}, Group, f"group {group.name!r}")
            if not group.name:
                raise ValueError("a group has an empty name")
            if any(not 0 <= count <= LARGEST_EXPONENT for count in (group.scales, group.signs, group.shifts)):
                raise ValueError(f"group {group.name!r} has a negative number of families, or one that is not whole")
            if not group.placements and group.size > LARGEST_EXPONENT:
                raise ValueError(f"group {group.name!r} has {group.size} units and acts on nothing")
            for place in group.placements:
                require_fields(vars(place), Placement, f"a placement of group {group.name!r}")
                _require_place(group, place, shapes)
        _require_nested(groups)
        _require_apart(groups, shapes)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a group or placement of this symmetry is malformed: {error}") from error
    return groups, document


def _require_place(group: Group, place: Placement, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a ValueError unless a placement refers to an existing axis of a parameter with a known shape."""
    if place.parameter not in shapes:
        raise ValueError(f"group {group.name!r} acts on {place.parameter!r}, of which 'shapes' has no shape")
    shape = axes_of(shapes[place.parameter])
    if not 0 <= place.axis < len(shape):
        raise ValueError(f"group {group.name!r} acts on axis {place.axis} of {place.parameter!r}, which does not exist")
    is_apart = place.stride > 0 or (place.stride == 0 and group.size == 1)
    if place.start < 0 or group.size < 0 or not is_apart or any(size < 1 for size, _ in place.repeats):
        raise ValueError(f"group {group.name!r} has a negative size, or no place for its units on {place.parameter!r}")
    if group.size and span(group, place)[1] >= shape[place.axis]:
        raise ValueError(
            f"group {group.name!r} has more units than axis {place.axis} of {place.parameter!r} has places"
        )
    exponents = (*place.scale, *place.sign, *place.parity, *place.shift)
    if any(not abs(one) <= LARGEST_EXPONENT for one in exponents):
        raise ValueError(f"group {group.name!r} has an exponent on {place.parameter!r} that is infinite or too large")


def _require_nested(groups: Sequence[Group]) -> None:
    """Raise a ValueError if a group is repeated within itself."""
    within = {group.name: group.within for group in groups}
    for name in within:
        above = list(within[name])
        for one in above:  # The loop also visits the names that it appends.
            above += [other for other in within.get(one, ()) if other not in above]
        if name in above:
            raise ValueError(f"group {name!r} is repeated within itself")


def _require_apart(groups: Sequence[Group], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a ValueError unless different groups on the same axis act independently of each other."""
    for one, other, place in overlapping(groups, shapes):
        raise ValueError(
            f"groups {one.name!r} and {other.name!r} both move axis {place.axis} of {place.parameter!r}, and not "
            "independently of one another"
        )


def read_versioned(text: str, form: str, version: int) -> dict[str, Any]:
    """Return a JSON object of the given form (such as "regauge.symmetry") and version.

    Raises:
        ValueError: The text is not JSON, or has another form or another version.
    """
    name = form.rpartition(".")[2]
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
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
    """Return a value with all lists replaced by tuples."""
    if isinstance(value, dict):
        return {key: _tuples(one) for key, one in value.items()}
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
