"""Conversion of rows to columns. A row is one network's dictionary of JSON values, and columns are small tensors.

The kind of a column is `bool`, `int`, `float` or `json`. Columns of the kinds `bool`, `int` and `float` are tensors
with the narrowest dtype that represents every value exactly. A `json` column (strings, lists, mappings, or a mixture of
kinds) is a tensor of codes, which index the list of distinct values. If all rows have one common value, only this value
is stored. A missing value is null.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Kind = Literal["bool", "int", "float", "json"]
Row = Mapping[str, Any]
INTS = (np.int8, np.int16, np.int32, np.int64)
TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "json": int}
"""For each kind of column, the Python type of a value that is stored once for all rows of a shard."""
DTYPES = {
    "bool": ("bool",),
    "int": ("int8", "int16", "int32", "int64"),
    "float": ("float32", "float64"),
    "json": ("int8", "int16", "int32", "int64"),
}
"""The dtypes in which a column can be stored, by the kind of the column."""


def narrow(values: Array) -> Array:
    """Convert numbers to the narrowest dtype that represents all numbers exactly."""
    if values.dtype.kind == "i":
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        return values.astype(next(d for d in INTS if np.iinfo(d).min <= low and high <= np.iinfo(d).max))
    if values.dtype == np.float64:
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        return single if np.array_equal(single, values, equal_nan=True) else values
    return values


@dataclass(frozen=True)
class Column:
    """The values of one column in some rows: `[rows]`, or a single value that all rows share.

    `null` marks the rows without a value, or is None if all rows have a value. Values of kind `json` are codes that
    index `distinct`.
    """

    kind: Kind
    values: Array
    null: Array | None = None
    distinct: tuple[Any, ...] = ()


def encode(rows: Sequence[Row]) -> dict[str, Column]:
    """Convert rows of plain JSON values to columns by name."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {_plain(name, name): _column(name, [_plain(row.get(name), name) for row in rows]) for name in names}


def describe(column: Column) -> dict[str, Any]:
    """Return a column's header entry, including the value if all rows share a value that JSON can represent."""
    entry = {"kind": column.kind} | ({"distinct": list(column.distinct)} if column.kind == "json" else {})
    if column.null is None and len(column.values) and (column.values == column.values[0]).all():
        value = column.values[0].item()
        if not isinstance(value, float) or math.isfinite(value):
            entry["value"] = value
    return entry


def require_described(name: str, entry: Any, dtypes: Mapping[str, str]) -> None:
    """Raise a ValueError unless a header entry describes a column. The message of the error is a clause.

    Args:
        name: The name of the column.
        entry: The entry that `describe` wrote, which somebody may have changed since.
        dtypes: The dtype of each tensor in the shard that has one value per row.
    """
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind not in DTYPES:
        raise ValueError(f"the column {name!r} has an unknown kind; the kinds are {', '.join(DTYPES)}")
    distinct = entry.get("distinct", [])
    if not isinstance(distinct, list):
        raise ValueError(f"the column {name!r} has no list of distinct values")
    if "value" not in entry:
        if dtypes.get(f"rows/{name}") not in DTYPES[kind] or dtypes.get(f"null/{name}", "bool") != "bool":
            raise ValueError(f"the column {name!r} has no values of kind {kind!r} for each row")
        return
    value: Any = entry["value"]
    is_kind: bool = type(value) is TYPES[kind]
    if not is_kind or (kind == "int" and not -(2**63) <= value < 2**63):
        raise ValueError(f"the column {name!r} has a value that is not of kind {kind!r}")
    if kind == "json" and not 0 <= value < len(distinct):
        raise ValueError(f"the column {name!r} has no distinct value of number {value}")


def require_codes(name: str, values: Array, distinct: Sequence[Any]) -> None:
    """Raise a ValueError unless all codes are indices of distinct values. If there are no distinct values, all codes
    must be 0.
    """
    if ((values < 0) | (values >= max(1, len(distinct)))).any():
        raise ValueError(f"the column {name!r} has codes without values")


def concatenate(columns: Sequence[tuple[Column | None, int]]) -> Column:
    """Concatenate the parts of a column from several shards, each with its number of rows. A part of None stands for
    rows without values.

    Booleans, integers and floats are joined in the narrowest dtype that represents all values. Other mixtures become
    `json`.
    """
    present = [column for column, _ in columns if column is not None]
    kinds = {column.kind for column in present if column.null is None or not column.null.all()}
    total = sum(count for _, count in columns)
    null = np.zeros(total, bool)
    numeric = kinds <= {"int", "float"} or kinds == {"bool"}
    kind: Kind = ("float" if "float" in kinds else "int" if "int" in kinds else "bool") if numeric else "json"
    arrays, distinct, codes, start = [], list[Any](), dict[str, int](), 0
    for column, count in columns:
        if column is None or (numeric and column.kind not in kinds):
            null[start : start + count] = True
            arrays.append(np.zeros(count, np.int8 if kind != "bool" else bool))
        else:
            if column.null is not None:
                null[start : start + count] = column.null
            values = column.values if numeric else _recode(column, distinct, codes)
            arrays.append(np.broadcast_to(values, (count,)) if len(values) != count else values)
        start += count
    joined = np.concatenate(arrays) if arrays else np.zeros(0, bool)
    return Column(kind, joined, null if null.any() else None, tuple(distinct))


def decode(column: Column, rows: Array | slice = slice(None)) -> Array:
    """Return the values as an array of bool, int64, float64 or Python objects. Rows without a value are masked."""
    values = column.values[rows]
    if column.kind == "json":
        objects = np.empty(len(column.distinct), object)
        objects[:] = column.distinct
        values = objects[values] if len(objects) else np.full(len(values), None, object)
    elif column.kind != "bool":
        values = values.astype(np.int64 if column.kind == "int" else np.float64)
    if column.null is None:
        return values
    return np.ma.MaskedArray(values, column.null[rows])


def _column(name: str, values: list[Any]) -> Column:
    null = np.array([value is None for value in values])
    there = [value for value in values if value is not None]
    types = {type(value) for value in there}
    mask = null if null.any() else None
    if types == {bool}:
        return Column("bool", np.array([bool(value) for value in values]), mask)
    if types == {int}:
        if any(not -(2**63) <= value < 2**63 for value in there):
            raise ValueError(f"column {name!r} has the integer {max(there, key=abs)}, which needs more than 64 bits")
        return Column("int", narrow(np.array([value or 0 for value in values], np.int64)), mask)
    if types and types <= {int, float}:
        try:
            return Column("float", narrow(np.array([0.0 if v is None else v for v in values], np.float64)), mask)
        except OverflowError as error:
            raise ValueError(
                f"column {name!r} has an integer that is too large for a number; store it as a text"
            ) from error
    codes: dict[str, int] = {}
    distinct: list[Any] = []
    array = np.array([0 if value is None else _code(value, distinct, codes) for value in values], np.int64)
    return Column("json", narrow(array), mask, tuple(distinct))


def _code(value: Any, distinct: list[Any], codes: dict[str, int]) -> int:
    """Return the code of a value. A new value is added to the distinct values."""
    text = json.dumps(value, sort_keys=True)
    if text not in codes:
        codes[text] = len(distinct)
        distinct.append(value)
    return codes[text]


def _recode(column: Column, distinct: list[Any], codes: dict[str, int]) -> Array:
    """Return the values of a column of any kind as codes, which are indices into a common list of distinct values."""
    if column.kind == "json":
        table = np.array([_code(value, distinct, codes) for value in column.distinct], np.int32)
        return table[column.values] if len(table) else np.zeros(len(column.values), np.int32)
    return np.array([_code(value, distinct, codes) for value in column.values.tolist()], np.int32)


def _plain(value: Any, name: str) -> Any:
    """Return a JSON value in which numpy scalars are converted to Python scalars."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return value
    try:
        if isinstance(value, str):
            value.encode()  # an unpaired surrogate cannot be read again
            return value
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"column {name!r} has a value that is not plain JSON ({error}); give numbers, texts, lists or mappings"
        ) from error
