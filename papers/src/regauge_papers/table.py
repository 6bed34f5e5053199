"""Tables of results: our numbers with uncertainties, and the numbers of the paper."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from regauge.connect import Curve
from regauge.core.escaping import markdown_table
from regauge.report.pictures import Chart, Images, Panel, Picture, Series, Style, Surface

Record = dict[str, Any]
"""The result of one step, ready for JSON."""
Line = Sequence[Mapping[str, float]]
"""The metrics at each point of a line, including "t"."""
Values = Sequence[Sequence[float]]
"""One number for each pair of networks, for each seed."""
FEWEST = 3
"""The smallest number of values for which a standard error is printed, instead of the single values."""


def loss_series(label: str, line: Sequence[Mapping[str, float]], style: Style) -> Series:
    """Return the series of the loss along a line."""
    return Series(label, [row["t"] for row in line], [row["loss"] for row in line], style=style)


@dataclass(frozen=True)
class Quantity:
    """A column: its heading, the number of printed decimals, and the function that reads a number from a record.

    By default, the number is the entry of a record with the name of the column, or None if there is no such entry.
    """

    name: str
    digits: int = 3
    of: Callable[[Record], float | None] | None = field(default=None, repr=False, compare=False)

    def read(self, record: Record) -> float | None:
        """Return the number of a record."""
        found: float | None = record.get(self.name) if self.of is None else self.of(record)
        return found


@dataclass(frozen=True)
class Row:
    """The row of one method."""

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
        """Return the row of a method from a list of records per seed. Quantities that a record lacks are left out.

        If records contain lines under "line", the curve is the mean of the lines, unless `is_drawn` is false.
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
    """The results of an experiment."""

    title: str  # what was measured
    notes: tuple[str, ...]  # how, in sentences: data, networks, training, and every departure from the paper
    quantities: tuple[Quantity, ...]  # the columns
    rows: tuple[Row, ...]  # the methods
    loss: str = ""  # what the curves of the rows show, in words
    pictures: Mapping[str, Picture] = field(default_factory=dict)  # further pictures, by the names of their files
    strips: Mapping[str, Path] = field(default_factory=dict)  # files that `save_strips` wrote, by name
    unit: str = ""  # what each list of values is, such as a shape, if only these are independent; else each value is
    # The row that others are compared with pair by pair: all have the same pairs. Rows "GROUP: WAY" are compared with
    # that of this name in their group, "GROUP: NAME", if there is one.
    paired: str = ""

    def cells(self) -> list[list[str]]:
        """Return the cells of the printed table, beginning with the header.

        Each row has its label, and the number n of independent values of the first quantity, if any row has several
        values. Further quantities may have more values, such as the losses at the two endpoints of each line. For each
        quantity, the mean with its standard error follows, or the values if there are fewer than three. If several
        seeds have more than one value, the standard deviation of the seeds' means follows, or the two means if there
        are two seeds. If the paper has a number for the quantity, the paper's number follows. For the first quantity,
        the mean difference from the row `paired` is added.
        """
        columns = [["", *(row.label for row in self.rows)]]
        counts = [self._count(row) for row in self.rows]
        if max(counts, default=0) > 1:
            columns.append([f"n {self.unit}s" if self.unit else "n", *map(str, counts)])
        for q in self.quantities:
            found = [self._summary(row.values[q.name]) if q.name in row.values else None for row in self.rows]
            columns.append([q.name, *("" if one is None else one.print_mean(q.digits) for one in found)])
            seeds = ["" if one is None else one.print_seeds(q.digits) for one in found]
            if any(seeds):
                columns.append(["over seeds", *seeds])
            if any(q.name in row.paper for row in self.rows):
                columns.append(["paper", *(row.paper.get(q.name, "") for row in self.rows)])
            if self.paired and q == self.quantities[0]:
                columns.append([f"less {self.paired}, paired", *(self._difference(row, q) for row in self.rows)])
        return [list(line) for line in zip(*columns, strict=True)]

    def excerpt(self, columns: Sequence[str]) -> "Table":
        """Return a copy of the table with only the given quantities, in the given order.

        Raises:
            ValueError: The table has no quantity of a given name.
        """
        known = {q.name: q for q in self.quantities}
        for name in columns:
            if name not in known:
                raise ValueError(f"the table has no column {name!r}; it has: {'; '.join(known)}")
        return replace(self, quantities=tuple(known[name] for name in columns))

    def by_group(self, quantity: str) -> "Table":
        """Return one quantity of rows "GROUP: WAY", with a row for each group and a column for each way.

        Raises:
            ValueError: The table has no quantity with the given name, or has rows with other names.
        """
        (shown,) = self.excerpt([quantity]).quantities
        rows: dict[str, Row] = {}
        for row in self.rows:
            group, separator, way = row.label.rpartition(": ")
            if not separator:
                raise ValueError(f"row {row.label!r} is of no group; groups are of rows 'GROUP: WAY'")
            own = rows.setdefault(group, Row(group, {}))
            values = {way: row.values[quantity]} if quantity in row.values else {}
            paper = {way: row.paper[quantity]} if row.paper.get(quantity) else {}
            rows[group] = replace(own, values={**own.values, **values}, paper={**own.paper, **paper})
        ways = dict.fromkeys(row.label.rpartition(": ")[2] for row in self.rows)
        quantities = tuple(Quantity(way, shown.digits) for way in ways)
        title = f"{self.title}: {quantity}"
        return replace(self, title=title, quantities=quantities, rows=(*rows.values(),), paired="")

    def _count(self, row: Row) -> int:
        return next((self._summary(row.values[q.name]).count for q in self.quantities if q.name in row.values), 0)

    def _summary(self, values: Values) -> "Summary":
        return summarize([[statistics.fmean(one) for one in values]] if self.unit else values)

    def _difference(self, row: Row, quantity: Quantity) -> str:
        """Return the mean of a row minus its reference row, value by value, with its standard error."""
        known, group = {one.label: one for one in self.rows}, row.label.rpartition(": ")[0]
        reference = known.get(f"{group}: {self.paired}") or known[self.paired]
        own, other = (one.values.get(quantity.name, ()) for one in (row, reference))
        if row is reference or [*map(len, own)] != [*map(len, other)]:
            return ""
        gaps = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(own, other, strict=True)]
        return self._summary(gaps).print_mean(quantity.digits)

    def markdown(self) -> str:
        """Return the title, the table and the notes as Markdown."""
        header, *rows = self.cells()
        table = markdown_table(header, rows, is_numeric=True)
        return "\n".join([f"## {self.title}", "", *table, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return every number, and summaries of the numbers."""
        return {
            "title": self.title,
            "notes": list(self.notes),
            "loss": self.loss,
            "unit": self.unit,
            "paired": self.paired,
            "quantities": [{"name": q.name, "digits": q.digits} for q in self.quantities],
            "pictures": {name: [asdict(panel) for panel in picture] for name, picture in self.pictures.items()},
            "rows": [
                asdict(row) | {"summary": {name: asdict(self._summary(values)) for name, values in row.values.items()}}
                for row in self.rows
            ],
        }

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> "Table":
        """Return the table from the result of `to_json`, without strips.

        Raises:
            ValueError: The JSON does not describe a table.
        """
        try:
            rows = [Row(row["label"], row["values"], row["paper"], row["curve"]) for row in known["rows"]]
            quantities = [Quantity(q["name"], q["digits"]) for q in known["quantities"]]
            pictures = {name: tuple(map(_panel, panels)) for name, panels in known["pictures"].items()}
            table = cls(known["title"], tuple(known["notes"]), tuple(quantities), tuple(rows), known["loss"], pictures)
            table = replace(table, unit=known.get("unit", ""), paired=known.get("paired", ""))
            # What is used later, but for pictures: means of the values, and the curves.
            table.cells(), [(float(one["t"]), float(one["loss"])) for row in rows for one in row.curve]
            return table
        except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
            raise ValueError(
                "this is no record of an experiment; give a file PAPER-EXPERIMENT-SCALE.json that `regauge reproduce` "
                "wrote, such as those in docs/records"
            ) from error


def _panel(known: Mapping[str, Any]) -> Panel:
    if "series" in known:
        return Chart(**{**known, "series": tuple(Series(**one) for one in known["series"])})
    if "pixels" in known:
        return Images.from_json(known)
    return Surface(**{**known, "labels": tuple(known["labels"])})


@dataclass(frozen=True)
class Summary:
    """The mean over all pairs of all seeds, with its uncertainty."""

    mean: float
    standard_error: float | None  # of the mean; None for fewer than three values
    # Standard deviation of the means of the seeds; None for fewer than three seeds, or if each has a single value.
    deviation: float | None
    count: int  # pairs of all seeds
    few: tuple[float, ...] = ()  # the values themselves, if there are fewer than three
    few_seeds: tuple[float, ...] = ()  # the means of the seeds, if there are two and more values

    @property
    def span(self) -> tuple[float, float]:
        """The mean minus and plus its standard error, or the range of fewer than three values."""
        error = self.standard_error
        return (min(self.few), max(self.few)) if error is None else (self.mean - error, self.mean + error)

    def print_mean(self, digits: int) -> str:
        """Return the mean with its standard error, or the values if there are few."""
        if self.standard_error is None:
            return _print_few(self.few, digits)
        return f"{self.mean:.{digits}f} ± {self.standard_error:.{digits}f}"

    def print_seeds(self, digits: int) -> str:
        """Return the standard deviation of the means of seeds, or the two means if there are two seeds. Return an empty
        string if the means of seeds add no information.
        """
        return _print_few(self.few_seeds, digits) if self.deviation is None else f"{self.deviation:.{digits}f}"


def _print_few(values: Sequence[float], digits: int) -> str:
    return " and ".join(f"{value:.{digits}f}" for value in values)


def summarize(values: Values) -> Summary:
    """Return the mean, uncertainties and count of the numbers of a column."""
    flat = [value for seed in values for value in seed]
    means = [statistics.fmean(seed) for seed in values]
    return Summary(
        statistics.fmean(flat),
        statistics.stdev(flat) / math.sqrt(len(flat)) if len(flat) >= FEWEST else None,
        statistics.stdev(means) if FEWEST <= len(means) < len(flat) else None,
        len(flat),
        tuple(flat) if len(flat) < FEWEST else (),
        tuple(means) if 1 < len(means) < FEWEST <= len(flat) else (),
    )


def mean_curve(lines: Sequence[Line]) -> Line:
    """Return the mean of every metric at every point of several lines."""
    return tuple(
        {name: statistics.fmean(row[name] for row in rows) for name in rows[0]} for rows in zip(*lines, strict=True)
    )


def curve_of(record: Record, key: str = "line") -> Curve:
    """Return the curve of a record."""
    return Curve(tuple(record[key]))


def halfway(metric: str) -> Callable[[Record], float]:
    """Return a function that reads a metric at the midpoint of a line."""
    return lambda record: float(record["line"][len(record["line"]) // 2][metric])


BARRIER = Quantity("barrier", of=lambda record: curve_of(record).barrier)
AREA = Quantity("AUC", of=lambda record: max(0.0, curve_of(record).auc))
MIDPOINT = Quantity("midpoint", of=halfway("loss"))
