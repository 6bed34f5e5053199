"""Tables of results: our numbers, each with its uncertainty, beside those of the paper."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from regauge.inr.rendering.strips import Strip
from regauge.papers.pictures import Picture

Values = Sequence[Sequence[float]]
"""For each seed, one number per pair of networks."""


@dataclass(frozen=True)
class Quantity:
    """What a column reports.

    Attributes:
        name: Its heading.
        digits: Decimals that are printed.
    """

    name: str
    digits: int = 3


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        label: Its name.
        values: For each quantity that was measured, one number per seed and pair.
        paper: For each quantity that the paper reports, what it prints.
        curve: Mean of a metric along the line between two networks: rows with "t" and "loss".
    """

    label: str
    values: Mapping[str, Values]
    paper: Mapping[str, str] = field(default_factory=dict)
    curve: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True)
class Table:
    """The outcome of an experiment.

    Attributes:
        title: What was measured.
        notes: How, in sentences: data, networks, training, and every departure from the paper.
        quantities: The columns.
        rows: The methods.
        loss: What the curves of the rows show, in words.
        pictures: Further pictures, by the names of their files.
        strips: What networks on paths show, by the names of their files.
    """

    title: str
    notes: tuple[str, ...]
    quantities: tuple[Quantity, ...]
    rows: tuple[Row, ...]
    loss: str = ""
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    strips: Mapping[str, Sequence[Strip]] = field(default_factory=dict)

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
        """For each row its label and then, for each quantity: the mean with its standard error over pairs, the
        standard deviation of the means of the seeds if there are several, and the paper's number if it has one.
        """
        return [
            [row.label, *(cell for quantity in self.quantities for cell in self._cells(row, quantity))]
            for row in self.rows
        ]

    def markdown(self) -> str:
        """Title, table and notes."""
        header = self.header()
        lines = [f"## {self.title}", ""]
        lines.append("| " + " | ".join(header) + " |")
        lines.append("| " + " | ".join(["---", *["---:"] * (len(header) - 1)]) + " |")
        lines += ["| " + " | ".join(cells) + " |" for cells in self.cells()]
        lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Every number, and their summaries."""
        return {
            "title": self.title,
            "notes": list(self.notes),
            "loss": self.loss,
            "pictures": {name: [asdict(panel) for panel in picture] for name, picture in self.pictures.items()},
            "rows": [
                {
                    "label": row.label,
                    "paper": dict(row.paper),
                    "summary": {name: asdict(summarize(values)) for name, values in row.values.items()},
                    "values": {name: [list(seed) for seed in values] for name, values in row.values.items()},
                    "curve": [dict(point) for point in row.curve],
                }
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
    """What many numbers are reduced to.

    Attributes:
        mean: Over all pairs of all seeds.
        standard_error: Of that mean; None for a single pair.
        deviation: Standard deviation of the means of the seeds; None for a single seed.
        count: Pairs of all seeds.
    """

    mean: float
    standard_error: float | None
    deviation: float | None
    count: int


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
