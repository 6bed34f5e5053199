"""The metadata table of a store, whose columns are read when they are first used."""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regauge.storage.store.columns import Array, Column, decode

Indices = NDArray[np.int64]
STANDARD = {"train": 0.8, "validation": 0.1, "test": 0.1}
"""The default shares of trajectories in each split."""


class Rows:
    """A table with one row for every network in a store, in the order of the store.

    Columns are read from the disk on first access, and stay in memory as arrays. No weights are read.

        rows["accuracy"]                                   # an array; masked where a network has no such value
        rows.where(step=86, activation=["relu", "tanh"])   # indices of the networks, for `store.read`
        rows.where(accuracy=lambda values: values > 0.9)
    """

    def __init__(self, count: int, names: Iterable[str], load: Callable[[str], Column]) -> None:
        self.names = tuple(names)
        self._count = count
        self._load = load
        self._columns: dict[str, Column] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, name: str) -> Array:
        return decode(self.column(name))

    def column(self, name: str) -> Column:
        """Return one column as it is stored. Raise a KeyError if there is no column with the given name."""
        if name not in self._columns:
            if name not in self.names:
                raise KeyError(f"the networks have no column {name!r}; there are {list(self.names)}")
            self._columns[name] = self._load(name)
        return self._columns[name]

    def where(self, **conditions: Any) -> Indices:
        """Return the indices of the rows that satisfy all conditions, in increasing order.

        Args:
            conditions: A condition for each column: a value, a collection of values (any of which may match), or a
                function from the array of values to a boolean array. A row without a value satisfies only the condition
                `None`.

        Raises:
            KeyError: There is no column with the given name.
        """
        chosen = np.ones(len(self), bool)
        for name, condition in conditions.items():
            chosen &= _meet(self.column(name), condition)
        return np.flatnonzero(chosen)

    def final(self, among: Array | None = None) -> Indices:
        """Return the indices, in increasing order, of the last checkpoints of all trajectories that were not discarded.

        Args:
            among: Indices of the rows to search; by default, all rows.
        """
        rows = np.arange(len(self)) if among is None else np.unique(among)
        ids, steps = (self.column(name).values[rows] for name in ("id", "step"))
        order = np.lexsort((rows, steps, ids))
        last = np.append(ids[order][1:] != ids[order][:-1], True) if len(ids) else np.zeros(0, bool)
        given_up = self.where(is_discarded=True) if "is_discarded" in self.names else ()
        return np.setdiff1d(rows[order[last]], given_up)

    def dicts(self, indices: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Return some rows as dictionaries of plain values. If a row has no value in a column, its dictionary lacks the
        column.
        """
        chosen = np.arange(len(self)) if indices is None else np.asarray(list(indices), np.int64)
        columns = {name: decode(self.column(name), chosen).tolist() for name in self.names}
        return [
            {name: values[k] for name, values in columns.items() if values[k] is not None} for k in range(len(chosen))
        ]

    def summary(self) -> Mapping[str, str]:
        """Return a string for each column, with the range or the distinct values."""
        return {name: _words(self.column(name), len(self)) for name in self.names}


def split(ids: Array, fractions: Mapping[str, float] | None = None, *, salt: str = "") -> dict[str, Indices]:
    """Return the row indices of each split, given the trajectory of each row; see `Store.split`.

    The mixing function of SplitMix64 maps each trajectory to a number in [0, 1), from its id plus a hash of the salt.
    The splits are consecutive intervals of [0, 1).

    References:
        Steele, Lea and Flood (2014), Fast splittable pseudorandom number generators, figure 17.
    """
    fractions = STANDARD if fractions is None else fractions
    shares = list(fractions.values())
    if not shares or min(shares) < 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
        raise ValueError(f"the fractions {dict(fractions)} must not be negative and must add up to one")
    offset = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        x = ids.astype(np.int64).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(offset)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    part = np.searchsorted(np.cumsum(shares)[:-1], (x >> np.uint64(11)).astype(np.float64) * 2.0**-53, side="right")
    return {name: np.flatnonzero(part == k) for k, name in enumerate(fractions)}


def _meet(column: Column, condition: Any) -> Array:
    there = np.ones(len(column.values), bool) if column.null is None else ~column.null
    if condition is None:
        return ~there
    if callable(condition):
        met: Array = np.ma.filled(condition(decode(column)), False)
        return met.astype(bool) & there
    condition = condition.tolist() if isinstance(condition, np.ndarray) else condition
    wanted = condition if isinstance(condition, Collection) and not isinstance(condition, str | dict) else [condition]
    if column.kind == "json":
        codes = [code for code, value in enumerate(column.distinct) if value in wanted or value == condition]
        return np.isin(column.values, codes) & there
    return np.isin(column.values, np.array([value for value in wanted if not isinstance(value, str)])) & there


def _words(column: Column, count: int) -> str:
    missing = 0 if column.null is None else int(column.null.sum())
    rest = f", {missing} of {count} without" if missing else ""
    values = column.values if column.null is None else column.values[~column.null]
    if column.kind == "json":
        shown = ", ".join(str(value) for value in column.distinct[:4])
        return shown + (f" and {len(column.distinct) - 4} more" if len(column.distinct) > 4 else "") + rest
    if column.kind == "bool":
        return f"{int(values.sum())} true, {int((~values).sum())} false{rest}"
    finite = values[np.isfinite(values)]
    if not len(finite):
        return f"no finite value{rest}"
    low, high = finite.min().item(), finite.max().item()
    ends = [str(end) if column.kind == "int" else f"{end:.6g}" for end in ((low,) if low == high else (low, high))]
    strange = len(values) - len(finite)
    return " to ".join(ends) + (f", {strange} not finite" if strange else "") + rest
