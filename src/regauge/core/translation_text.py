"""Translations as text: lines of a table to print, and JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from regauge.core.counted import count
from regauge.core.escaping import escape, text_table
from regauge.core.translations import Entries, Image, ImageStep, TranslationFamily
from regauge.core.typed_json import require_fields


def render_translations(families: Sequence[TranslationFamily]) -> list[str]:
    """Return lines of text that describe families of translations: the parameters that each family changes, and the
    condition by which the family chooses one network.
    """
    if not families:
        return []
    rows = []
    for family in families:
        told = family.condition + (" (statistics as stored)" if family.is_stored_only else "")
        rows.append((escape(family.name), str(family.size), escape(told), ", ".join(map(escape, family.parameters))))
    lines = text_table(("translation", "size", "representative", "adds to"), rows)
    total = sum(family.size for family in families)
    return ["", *lines, "", f"{count(families, 'translation')}, {total} {'dimension' if total == 1 else 'dimensions'}"]


def write_translations(families: Sequence[TranslationFamily]) -> list[dict[str, Any]]:
    """Return translation families as JSON data. Fields that equal their default values are omitted."""

    def compact(value: Any) -> Any:
        if isinstance(value, Entries):
            return [value.parameter, value.sizes, value.strides, value.start]
        if isinstance(value, tuple):
            return [compact(one) for one in value]
        if not is_dataclass(value):
            return value
        return {f.name: compact(one) for f in fields(value) if (one := getattr(value, f.name)) != f.default}

    return [compact(family) for family in families]


def read_translations(rows: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[TranslationFamily, ...]:
    """Return the translation families that `write_translations` wrote as JSON data.

    Raises:
        ValueError: A translation family is malformed, or refers to entries that its parameter does not have.
    """
    try:
        families = tuple(_translation(row) for row in rows)
        for family in families:
            require_translation(family, shapes)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"a translation of this symmetry is malformed: {error}") from error
    return families


def _translation(row: Mapping[str, Any]) -> TranslationFamily:
    def known(given: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: Entries(*given[name]) for name in ("entries", "by", "gain") if given.get(name)}
        return {**given, **found}

    def step(given: Mapping[str, Any]) -> ImageStep:
        return ImageStep(**known(given))

    images = tuple(
        Image(**{**known(one), "steps": tuple(map(step, one.get("steps", ())))}) for one in row.get("images", ())
    )
    return TranslationFamily(**{**known(row), "images": images})


def require_translation(family: TranslationFamily, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a ValueError unless all entries of a translation family exist and the sizes of its image steps match."""
    what = f"translation {family.name!r}"
    require_fields(_without(vars(family), "entries", "gain"), TranslationFamily, what)
    steps = [step for image in family.images for step in image.steps]
    for step in steps:
        require_fields(
            {name: value for name, value in vars(step).items() if name not in ("entries", "by")}, ImageStep, what
        )
    read = [family.gain, *(step.entries for step in steps), *(step.by for step in steps)]
    for entries in (*family.placements, *(one for one in read if one)):
        require_fields(vars(entries), Entries, what)
        is_array = len(entries.sizes) == len(entries.strides) and min((*entries.sizes, 1)) > 0
        if not is_array or min((*entries.strides, entries.start)) < 0:
            raise ValueError(f"{what} has entries that are not an array: {entries}")
        if entries.parameter and (
            entries.parameter not in shapes or entries.last >= math.prod(shapes[entries.parameter])
        ):
            raise ValueError(f"{what} has entries that {entries.parameter!r} does not have")
    for entries in family.placements:
        if not entries.is_apart:
            raise ValueError(f"{what} would add to an entry of {entries.parameter!r} more than once")
    most = max(math.prod(shape) for shape in shapes.values())
    if any(math.prod(entries.sizes) > most for entries in (*family.placements, *(step.entries for step in steps))):
        raise ValueError(f"{what} has more entries than any parameter has")
    if any(step.by and math.prod(step.by.sizes) != math.prod(step.entries.sizes) for step in steps):
        raise ValueError(f"{what} divides by a gain of another length")
    for axes, entries in ((family.constant, family.entries), *((i.constant, i.entries) for i in family.images)):
        if not all(0 <= axis < len(entries.sizes) for axis in axes):
            raise ValueError(f"{what} names an axis that {entries.parameter!r} does not have")
    if family.gain and [family.entries.sizes[axis] for axis in family.constant] != [math.prod(family.gain.sizes)]:
        raise ValueError(f"{what} has a gain of another length than that of its one constant axis")
    if not all(0 <= axis < len(family.vector_shape) for axis in family.centered):
        raise ValueError(f"{what} is centered along an axis that its vector does not have")
    for image in family.images:
        size = math.prod(family.vector_shape)
        for step in image.steps:
            size = step.size_of(size)
        if size != math.prod(n for k, n in enumerate(image.entries.sizes) if k not in image.constant):
            raise ValueError(f"{what} adds {size} values to another number of entries of {image.entries.parameter!r}")


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
