"""Tables of results: our numbers, each with its uncertainty, and those of the paper."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from regauge.core.markdown import markdown_table
from regauge.papers.pictures import Picture

Record = dict[str, Any]
"""The result of one step, ready for JSON."""
Line = Sequence[Mapping[str, float]]
"""Metrics along a line, "t" among them."""
Values = Sequence[Sequence[float]]
"""For each seed, one number per pair of networks."""


@dataclass(frozen=True)
class Quantity:
    """A column: its heading, the decimals that are printed, and how a record's number is found.

    That is the record's entry of that name unless `of` is given; None where there is none.
    """

    name: str
    digits: int = 3
    of: Callable[[Record], float | None] | None = field(default=None, repr=False, compare=False)

    def read(self, record: Record) -> float | None:
        """The number of a record."""
        found: float | None = record.get(self.name) if self.of is None else self.of(record)
        return found


@dataclass(frozen=True)
class Row:
    """One method."""

    label: str
    values: Mapping[str, Values]  # of each quantity that was measured
    paper: Mapping[str, str] = field(default_factory=dict)  # the printed number of each quantity that the paper reports
    curve: Line = ()  # mean over pairs

    @classmethod
    def of(
        cls,
        label: str,
        records: Sequence[Sequence[Record]],
        quantities: Sequence[Quantity],
        *,
        paper: Mapping[str, str] | None = None,
        is_drawn: bool = True,
    ) -> "Row":
        """The row of a method's records, one list for each seed; quantities that a record lacks are left out.

        Where records hold lines, under "line", their mean is the curve, unless it is not to be drawn.
        """
        values = {q.name: [[q.read(record) for record in seed] for seed in records] for q in quantities}
        known = {
            name: [[value for value in seed if value is not None] for seed in seeds]
            for name, seeds in values.items()
            if not any(value is None for seed in seeds for value in seed)
        }
        lines = [record["line"] for seed in records for record in seed if is_drawn and "line" in record]
        return cls(label, known, paper or {}, mean_curve(lines))


@dataclass(frozen=True)
class Table:
    """The outcome of an experiment."""

    title: str  # what was measured
    notes: tuple[str, ...]  # how, in sentences: data, networks, training, and every departure from the paper
    quantities: tuple[Quantity, ...]  # the columns
    rows: tuple[Row, ...]  # the methods
    loss: str = ""  # what the curves of the rows show, in words
    pictures: Mapping[str, Picture] = field(default_factory=dict)  # further pictures, by the names of their files
    strips: Mapping[str, Path] = field(default_factory=dict)  # files that `save_strips` wrote, by name

    def header(self) -> list[str]:
        """Titles of the columns of `cells`."""
        titles = [""]
        for quantity in self.quantities:
            titles.append(quantity.name)
            if self._has_seeds(quantity):
                titles.append("over seeds")
            if self._has_paper(quantity):
                titles.append("paper")
        return titles

    def cells(self) -> list[list[str]]:
        """The printed table.

        For each row its label and then, for each quantity: the mean with its standard error over pairs, the standard
        deviation of the means of the seeds if there are several, and the paper's number if it has one.
        """
        return [
            [row.label, *(cell for quantity in self.quantities for cell in self._cells(row, quantity))]
            for row in self.rows
        ]

    def markdown(self) -> str:
        """Title, table and notes."""
        table = markdown_table(self.header(), self.cells(), is_numeric=True)
        return "\n".join([f"## {self.title}", "", *table, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Every number, and their summaries."""
        return {
            "title": self.title,
            "notes": list(self.notes),
            "loss": self.loss,
            "pictures": {name: [asdict(panel) for panel in picture] for name, picture in self.pictures.items()},
            "rows": [
                asdict(row) | {"summary": {name: asdict(summarize(values)) for name, values in row.values.items()}}
                for row in self.rows
            ],
        }

    def _cells(self, row: Row, quantity: Quantity) -> list[str]:
        digits = quantity.digits
        found = summarize(row.values[quantity.name]) if quantity.name in row.values else None
        cells = [""]
        if found is not None:
            error = found.standard_error
            cells[0] = f"{found.mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")
        if self._has_seeds(quantity):
            cells.append("" if found is None or found.deviation is None else f"{found.deviation:.{digits}f}")
        if self._has_paper(quantity):
            cells.append(row.paper.get(quantity.name, ""))
        return cells

    def _has_seeds(self, quantity: Quantity) -> bool:
        return any(len(row.values.get(quantity.name, ())) > 1 for row in self.rows)

    def _has_paper(self, quantity: Quantity) -> bool:
        return any(quantity.name in row.paper for row in self.rows)


@dataclass(frozen=True)
class Summary:
    """Mean over all pairs of all seeds, and its uncertainty."""

    mean: float
    standard_error: float | None  # of the mean; None for a single pair
    deviation: float | None  # standard deviation of the means of the seeds; None for a single seed
    count: int  # pairs of all seeds


def summarize(values: Values) -> Summary:
    """Mean, uncertainties and count of the numbers of a column."""
    flat = [value for seed in values for value in seed]
    means = [statistics.fmean(seed) for seed in values]
    return Summary(
        statistics.fmean(flat),
        statistics.stdev(flat) / math.sqrt(len(flat)) if len(flat) > 1 else None,
        statistics.stdev(means) if len(means) > 1 else None,
        len(flat),
    )


def mean_curve(lines: Sequence[Line]) -> Line:
    """The mean of every metric at every point of several lines."""
    return tuple(
        {name: statistics.fmean(row[name] for row in rows) for name in rows[0]} for rows in zip(*lines, strict=True)
    )
