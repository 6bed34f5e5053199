"""Pictures of experiments as values: charts and surfaces that the report draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["line", "dashed", "points"]


@dataclass(frozen=True)
class Series:
    """Values over positions.

    Attributes:
        label: Its name in the legend. Those without one follow the rest, thinner, in the same colors.
        x: Positions.
        y: Values.
        low: Lower limits of a band around the values, if there is one.
        high: Upper limits of the band.
        style: Line, dashed line or points.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: Style = "line"


@dataclass(frozen=True)
class Chart:
    """Several series over one axis.

    Attributes:
        title: Title.
        x_label: Label of the positions.
        y_label: Label of the values.
        series: In the order of the legend.
        is_log_x: Whether positions are in equal ratios.
        y_limits: The values that are shown; all unless given.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log_x: bool = False
    y_limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Surface:
    """A function of a plane, with points marked.

    Attributes:
        title: Title.
        xs: Coordinates of the columns.
        ys: Coordinates of the rows.
        values: One row for each of `ys`; low is good.
        points: Coordinates of what is marked.
        labels: Their names.
    """

    title: str
    xs: Sequence[float]
    ys: Sequence[float]
    values: Sequence[Sequence[float]]
    points: Sequence[tuple[float, float]]
    labels: tuple[str, ...]


Panel = Chart | Surface
Picture = tuple[Panel, ...]
"""Panels side by side, all charts or all surfaces."""
