"""Pictures of experiments as values: charts and surfaces that the report draws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["line", "dashed", "points"]


@dataclass(frozen=True)
class Series:
    """Values over positions, with a band around them if there are limits."""

    label: str  # in the legend; those without one follow the rest, thinner, in the same colors
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: Style = "line"


def loss_series(label: str, line: Sequence[Mapping[str, float]], style: Style) -> Series:
    """The loss along a line."""
    return Series(label, [row["t"] for row in line], [row["loss"] for row in line], style=style)


@dataclass(frozen=True)
class Chart:
    """Several series over one axis."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]  # in the order of the legend
    is_log_x: bool = False
    y_limits: tuple[float, float] | None = None  # the values that are shown; all unless given


@dataclass(frozen=True)
class Surface:
    """A function of a plane, with points marked."""

    title: str
    xs: Sequence[float]  # of the columns
    ys: Sequence[float]  # of the rows
    values: Sequence[Sequence[float]]  # one row for each of `ys`; low is good
    points: Sequence[tuple[float, float]]
    labels: tuple[str, ...]  # of the points


Panel = Chart | Surface
Picture = tuple[Panel, ...]
"""Panels side by side, all charts or all surfaces."""
