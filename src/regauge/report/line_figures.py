"""Figures of the loss along linear paths between two networks."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from regauge.connect.comparable import excess_of
from regauge.report.figures import COLORS, MUTED, draw_figure

Row = Mapping[str, float]
Curves = Mapping[str, Sequence[Row]]

WORDS = {"loss": "cross entropy (nats)", "accuracy": "accuracy"}
FLOOR = 0.5
"""An axis begins at zero if the smallest value is less than `FLOOR` times the largest value."""
LONG = 12
"""The largest number of letters in a network's name that is centered below an endpoint of the path."""
LINE = 22
"""The largest number of letters in one line of a network's name."""
LABEL = (0.27, 0.08)
"""The width and height of the barrier's label, as shares of the width and height of the axes."""
CHORD = "line between the end losses"
"""A note on the dotted line from which a barrier is measured. At t, the dotted line has the value (1 - t) loss(A) + t
loss(B)."""


def line_figure(curves: Curves, metric: str = "loss") -> Figure:
    """Return a plot of a metric along linear paths, from t = 0 to 1. If the metric is the loss, the first barrier is
    marked.
    """
    with draw_figure(4.6, 3.2) as figure:
        axes = figure.add_subplot()
        draw_curves(axes, curves, metric, WORDS.get(metric, metric), ("A", "B"))
        _write_legend(figure)
        return figure


def path_figure(curves: Curves, title: str, ends: tuple[str, str]) -> Figure:
    """Return a plot of the loss along paths with their barriers. If the accuracy is known, a plot of the accuracy
    follows below.
    """
    metrics = ["loss", *(["accuracy"] if all("accuracy" in rows[0] for rows in curves.values()) else [])]
    barriers = ", ".join(f"{_barrier(rows)[1]:.3g} {label}".rstrip() for label, rows in curves.items())
    with draw_figure(5.2, 1.2 + 2.4 * len(metrics), ConstrainedLayoutEngine(h_pad=0.09)) as figure:
        for k, metric in enumerate(metrics):
            axes = figure.add_subplot(len(metrics), 1, k + 1)
            first = f"{title}:\n" if len(curves) > 1 else f"{title}: "
            heading = WORDS["accuracy"] if metric == "accuracy" else f"{first}barrier {barriers}"
            draw_curves(axes, curves, metric, heading, ends)
        _write_legend(figure)
        return figure


def _write_legend(figure: Figure) -> None:
    """Write a legend for the curves of the first panel below the axes."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False, fontsize=9)


def draw_curves(
    axes: Axes, curves: Curves, metric: str, title: str, ends: tuple[str, str], *, has_barrier: bool = True
) -> None:
    """Draw curves with marked endpoints, and the first curve's barrier if `has_barrier`.

    The axes contain all curves.
    """
    for (label, rows), color in zip(curves.items(), COLORS, strict=False):
        t, values = [row["t"] for row in rows], [row[metric] for row in rows]
        axes.plot(t, values, color=color, linewidth=2.2, label=label or None, solid_capstyle="round")
        axes.plot([t[0], t[-1]], [values[0], values[-1]], "o", color=color, markersize=5)
    is_long = max(map(len, ends)) > LONG
    first, last = (textwrap.fill(name, LINE) for name in ends)
    axes.set_xticks([0, 0.5, 1], [first, "midpoint", last])
    axes.tick_params(axis="x", pad=7)
    if is_long:
        axes.get_xticklabels()[0].set_horizontalalignment("left")
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
    axes.margins(x=0.03)
    everything = [row[metric] for rows in curves.values() for row in rows]
    is_whole = _fit_axis(axes, everything)
    if metric == "accuracy":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        axes.locator_params(axis="y", nbins=6, min_n_ticks=3, steps=[1, 2, 5, 10])
    if metric == "loss" and has_barrier:
        _mark_barrier(axes, [*curves.values()])
    axes.set_title(f"{title}{'' if is_whole else '; axis not from 0'}".removeprefix("; "))


def _fit_axis(axes: Axes, values: Sequence[float]) -> bool:
    """Fit the axis to the values.

    The axis starts at zero if the smallest value is between zero and `FLOOR` times the largest value. Return whether
    the axis starts at zero.
    """
    found = np.array([value for value in values if np.isfinite(value)] or [0.0])
    low, high = float(found.min()), float(found.max())
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    is_whole = 0 <= low <= FLOOR * high
    axes.set_ylim(0 if is_whole else low - margin, high + margin)
    return is_whole


def _barrier(rows: Sequence[Row]) -> tuple[Row, float]:
    """Return the point with the largest excess over the interpolated loss of the endpoints, and the excess at this
    point.
    """
    excess = excess_of(rows)
    return rows[int(np.argmax(excess))], max(excess)


def _mark_barrier(axes: Axes, curves: Sequence[Sequence[Row]]) -> None:
    """Draw the line from which the first barrier is measured, and the barrier if it is high enough to be visible."""
    rows = curves[0]
    axes.plot([0, 1], [rows[0]["loss"], rows[-1]["loss"]], ":", color=MUTED, linewidth=1.3, label=CHORD, zorder=2.5)
    top, height = _barrier(rows)
    low, high = axes.get_ylim()
    if height < 0.1 * (high - low):
        return
    chord = top["loss"] - height
    arrow = {"arrowstyle": "<->", "color": MUTED, "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (top["t"], top["loss"]), (top["t"], chord), arrowprops=arrow)
    style: Any = {"color": MUTED, "fontsize": 9}
    places = [(share, side) for share in (0.4, 0.55, 0.25, 0.7) for side in (1, -1)]
    for share, side in places if top["t"] <= 0.6 else [(share, -side) for share, side in places]:
        x, y = top["t"] + 0.02 * side, chord + share * height
        if _is_free(curves, rows, (x, x + side * LABEL[0]), y, 0.5 * LABEL[1] * (high - low)):
            axes.text(x, y, f"barrier {height:.2f}", va="center", ha="left" if side > 0 else "right", **style)
            return
    # For a narrow peak, the label is drawn above the peak, and the axis is extended.
    axes.set_ylim(low, high + LABEL[1] * (high - low))
    axes.text(top["t"], high, f"barrier {height:.2f}", va="center", ha="center", **style)


def _is_free(
    curves: Sequence[Sequence[Row]], first: Sequence[Row], sides: tuple[float, float], y: float, half: float
) -> bool:
    """Return whether a label at a given position is inside the picture and covers no curve and no line between
    endpoints.
    """
    if min(sides) < 0 or max(sides) > 1:
        return False
    xs = np.linspace(min(sides), max(sides), 32)
    chord: Sequence[Row] = (first[0], first[-1])
    for rows in (*curves, chord):
        ys = np.interp(xs, [row["t"] for row in rows], [row["loss"] for row in rows])
        if (np.abs(ys - y) < half).any():
            return False
    return True
