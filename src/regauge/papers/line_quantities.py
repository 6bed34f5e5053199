"""Quantities of the line between two networks, read from records that hold it under "line"."""

import statistics
from collections.abc import Callable, Sequence

from regauge.connect import Curve
from regauge.papers.table import Quantity, Record

Points = Sequence[dict[str, float]]


def curve_of(record: Record, key: str = "line") -> Curve:
    """The curve of a record."""
    return Curve(tuple(record[key]))


def barrier(record: Record) -> float:
    """The largest excess of the loss over the straight line between the losses of the ends."""
    return curve_of(record).barrier


def area(record: Record) -> float:
    """The area under the excess, not below zero."""
    return max(0.0, curve_of(record).auc)


def halfway(metric: str) -> Callable[[Record], float]:
    """A metric in the middle of the line."""
    return lambda record: float(record["line"][len(record["line"]) // 2][metric])


BARRIER, AREA = Quantity("barrier", of=barrier), Quantity("AUC", of=area)
MIDPOINT = Quantity("midpoint", of=halfway("loss"))


def mean_curve(lines: Sequence[Points]) -> tuple[dict[str, float], ...]:
    """The mean of every metric at every point of several lines."""
    return tuple(
        {name: statistics.fmean(row[name] for row in rows) for name in rows[0]} for rows in zip(*lines, strict=True)
    )
