"""Joint tables of several seeds."""

from collections.abc import Mapping
from dataclasses import replace

from regauge_papers.table import Row, Table, mean_curve


def join_seeds(tables: Mapping[int, Table]) -> Table:
    """Join the tables of one experiment with several seeds: each row has the numbers of all tables.

    If errors are computed over units, each unit has the values of all seeds, because all seeds measure the same units.
    Pictures and strips come from the first seed. Curves are means over seeds.
    """
    (first, table), *others = tables.items()
    if not others:
        return table
    rows = [_join(parts) for parts in zip(*(one.rows for one in tables.values()), strict=True)]
    if table.unit:
        rows = [replace(row, values=_by_unit(row, len(tables))) for row in rows]
    known = set(table.notes)
    notes = [f"seed {seed}: {note}" for seed, one in others for note in one.notes if note not in known]
    if table.pictures or table.strips:
        notes.append(f"pictures are those of seed {first}")
    return replace(table, rows=tuple(rows), notes=(*table.notes, *notes))


def _join(rows: tuple[Row, ...]) -> Row:
    """Join the rows of all seeds. Quantities that a seed lacks are left out."""
    if len({row.label for row in rows}) > 1:
        raise ValueError(
            f"rows of different seeds are {', '.join(repr(row.label) for row in rows)}; they must be the same"
        )
    names = [name for name in rows[0].values if all(name in row.values for row in rows)]
    values = {name: [list(part) for row in rows for part in row.values[name]] for name in names}
    return replace(rows[0], values=values, curve=mean_curve([row.curve for row in rows]))


def _by_unit(row: Row, seeds: int) -> dict[str, list[list[float]]]:
    """Return the values of each unit, given lists with all units of the first seed, all units of the second seed, and
    so on.
    """
    found = {}
    for name, values in row.values.items():
        count = len(values) // seeds
        found[name] = [[value for part in values[k::count] for value in part] for k in range(count)]
    return found
