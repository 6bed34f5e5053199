"""Figures of populations: matrices over pairs of networks, and maps."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure
from numpy.typing import NDArray

from regauge.report.figures import COLORS, INK, MISSING, TITLE, draw_figure

NUMBERED = 12
"""The largest number of networks in a matrix for which all indices are shown."""
GROUPS = 20
"""A column with at most this number of distinct integers is shown as groups, with one color for each group, instead of
on a color scale."""
BAR = 36
"""The largest number of letters in one line next to a color bar."""


def matrices_figure(matrices: Mapping[str, NDArray[np.float64]], what: str) -> Figure:
    """Return a plot of matrices over pairs of networks, side by side with common colors. The mean and standard
    deviation are written below each matrix.

    The mean is over pairs of different networks. NaN is drawn gray and excluded from the mean. At least one value must
    be finite. The diagonal is white, because it does not belong to a pair of different networks.
    """
    known = {title: _between(matrix) for title, matrix in matrices.items()}
    everything = np.concatenate(list(known.values()))
    if not len(everything):
        raise ValueError(
            "no value between two different networks is finite, so there is nothing to draw; look for NaN in the "
            "networks"
        )
    top = float(np.quantile(everything, 0.995)) or 1.0
    with draw_figure(3.3 * len(matrices) + 0.9, 3.7) as figure:
        shades = matplotlib.colormaps["viridis"].with_extremes(bad=MISSING)
        drawn = None
        for k, (title, matrix) in enumerate(matrices.items()):
            axes = figure.add_subplot(1, len(matrices), k + 1)
            own = np.eye(len(matrix), dtype=bool)
            axes.imshow(np.where(own, 1.0, np.nan), cmap=ListedColormap(["white"]), interpolation="nearest", zorder=2)
            drawn = axes.imshow(np.ma.masked_invalid(matrix), cmap=shades, vmin=0, vmax=top, interpolation="nearest")
            count = len(matrix)
            ticks = range(count) if count <= NUMBERED else [0, count - 1]
            names = [str(tick + 1) for tick in ticks]
            axes.set(xticks=ticks, xticklabels=names, yticks=ticks, yticklabels=names)
            axes.grid(False)
            axes.set_title(title)
            values = known[title]
            words = f"mean {values.mean():.3g}, deviation {values.std():.3g}" if len(values) else "no finite value"
            axes.set_xlabel(f"network\n{words}", color=INK, labelpad=2)
            axes.set_ylabel("network" if k == 0 else "", color=INK, labelpad=2)
        assert drawn is not None
        beyond = "max" if everything.max() > top else "neither"
        _draw_bar(figure, drawn, what, extend=beyond)
        return figure


def map_figure(
    points: NDArray[np.float64],
    groups: Sequence[str | int],
    *,
    title: str,
    share: float,
    values: NDArray[np.float64] | None = None,
    column: Sequence[Any] | None = None,
    what: str = "",
) -> Figure:
    """Return a plot of networks as points in the plane. The points are colored by group or, if `values` is given,
    shaded by value.

    A column may replace groups. Strings, booleans and few distinct integers are groups, and other columns are values.
    Distances are drawn to scale. If there are two to twenty groups, a legend names the groups. NaN is drawn gray. A
    text below the map gives the share of the squared distances that the plane shows.
    """
    if column is not None:
        groups, values = list(map(str, column)), shades_of(column)
    size = float(np.clip(300 / np.sqrt(len(points)), 8, 60))
    with draw_figure(5.0, 4.6) as figure:
        axes = figure.add_subplot()
        name_plane(axes, share)
        if values is None:
            _draw_groups(axes, points, groups, size, what)
        else:
            known = np.isfinite(values)
            axes.scatter(points[~known, 0], points[~known, 1], s=size, color=MISSING, linewidths=0)
            style: Any = {"s": size, "cmap": "viridis", "linewidths": 0.4, "edgecolors": "white"}
            drawn = axes.scatter(points[known, 0], points[known, 1], c=values[known], **style)
            _draw_bar(figure, drawn, what)
        axes.set_title(textwrap.fill(title, TITLE))
        axes.set_aspect("equal", adjustable="datalim")
        axes.margins(0.06)
        return figure


def shades_of(column: Sequence[Any]) -> NDArray[np.float64] | None:
    """Return the values of a column that is shown in shades, with NaN for missing values. Return None if the column
    contains groups.

    Groups are strings, booleans, and few distinct integers.
    """
    is_class = all(type(value) is int for value in column) and len(set(column)) <= GROUPS
    if is_class or not all(value is None or type(value) in (int, float) for value in column):
        return None
    return np.array([np.nan if value is None else float(value) for value in column])


def name_plane(axes: Axes, share: float) -> None:
    """Label the axes of a projection to a plane with the share of the distances that the plane shows."""
    shown, hidden = round(100 * share), 100 - round(100 * share)
    left_out = f"The plane shows {shown}% of the squared distances"
    left_out += f";\n{hidden}% lie in directions that it leaves out." if hidden else "."
    axes.set_xlabel(f"direction of the largest spread\n{left_out}")
    axes.set_ylabel("direction of the second largest")


def _between(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the finite entries for pairs of different networks."""
    values: NDArray[np.float64] = matrix[~np.eye(len(matrix), dtype=bool)]
    return values[np.isfinite(values)]


def _draw_groups(axes: Axes, points: NDArray[np.float64], groups: Sequence[str | int], size: float, what: str) -> None:
    names = sorted(dict.fromkeys(groups), key=lambda name: (len(str(name)), str(name)))
    member = np.array([names.index(group) for group in groups])
    colors = COLORS if len(names) <= len(COLORS) else [to_hex(colormaps["tab20"](k)) for k in range(20)]
    for k, name in enumerate(names):
        style: Any = {"s": size, "color": colors[k % len(colors)], "linewidths": 0.4, "edgecolors": "white"}
        axes.scatter(points[member == k, 0], points[member == k, 1], label=str(name), **style)
    if 2 <= len(names) <= len(colors):
        beside: Any = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(title=what, frameon=False, fontsize=9, title_fontsize=9, **beside)


def _draw_bar(figure: Figure, drawn: Any, what: str, extend: str = "neither") -> None:
    """Draw the color bar of a figure."""
    bar = figure.colorbar(drawn, ax=figure.axes, extend=extend, fraction=0.05, pad=0.02)
    bar.set_label(textwrap.fill(what, BAR))
    bar.outline.set_visible(False)
