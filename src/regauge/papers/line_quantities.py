"""Quantities of the line between two networks, read from records that hold it under "line"."""

from collections.abc import Callable

from regauge.connect import Curve
from regauge.papers.table import Quantity, Record


def curve_of(record: Record, key: str = "line") -> Curve:
    """The curve of a record."""
    return Curve(tuple(record[key]))


def halfway(metric: str) -> Callable[[Record], float]:
    """A metric in the middle of the line."""
    return lambda record: float(record["line"][len(record["line"]) // 2][metric])


BARRIER = Quantity("barrier", of=lambda record: curve_of(record).barrier)
AREA = Quantity("AUC", of=lambda record: max(0.0, curve_of(record).auc))
MIDPOINT = Quantity("midpoint", of=halfway("loss"))
