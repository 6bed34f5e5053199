"""Figures of populations: matrices of pairs as heat maps, and maps."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from regauge.report.figures import COLORS, INK, draw_figure

MISSING = "#d0d5dd"
"""Color of missing values."""


def matrices_figure(matrices: Mapping[str, NDArray[np.float64]], what: str) -> Figure:
    """Matrices of pairs side by side, in one range of colors that begins at zero; below each, mean and deviation.

    The mean is over pairs of different networks. NaN is drawn gray, and left out; not all values may be so.
    """
    known = {title: _between(matrix) for title, matrix in matrices.items()}
    everything = np.concatenate(list(known.values()))
    if not len(everything):
        raise ValueError("no value between two different networks is finite, so there is nothing to draw")
    top = float(np.quantile(everything, 0.995)) or 1.0
    with draw_figure(3.3 * len(matrices) + 0.9, 3.7) as figure:
        shades = matplotlib.colormaps["viridis"].with_extremes(bad=MISSING)
        drawn = None
        for k, (title, matrix) in enumerate(matrices.items()):
            axes = figure.add_subplot(1, len(matrices), k + 1)
            masked = np.ma.masked_invalid(matrix)
            drawn = axes.imshow(masked, cmap=shades, vmin=0, vmax=top, interpolation="nearest")
            count = len(matrix)
            ticks = [0, count - 1]
            axes.set(xticks=ticks, xticklabels=["1", str(count)], yticks=ticks, yticklabels=["1", str(count)])
            axes.grid(False)
            axes.set_title(title)
            values = known[title]
            words = f"mean {values.mean():.3g}, deviation {values.std():.3g}" if len(values) else "no finite value"
            axes.set_xlabel(words, color=INK, labelpad=2)
        assert drawn is not None
        beyond = "max" if everything.max() > top else "neither"
        _draw_bar(figure, drawn, what, extend=beyond)
        return figure


def map_figure(
    points: NDArray[np.float64],
    groups: Sequence[str | int],
    *,
    title: str,
    values: NDArray[np.float64] | None = None,
    what: str = "",
) -> Figure:
    """Networks as points in the plane, in the color of their group; or, given values, in shades of these.

    Distances are to scale. Groups are named in a legend where there are two to eight; NaN is drawn gray.
    """
    size = float(np.clip(300 / np.sqrt(len(points)), 8, 60))
    with draw_figure(5.0, 4.2) as figure:
        axes = figure.add_subplot()
        if values is None:
            _draw_groups(axes, points, groups, size, what)
        else:
            known = np.isfinite(values)
            axes.scatter(points[~known, 0], points[~known, 1], s=size, color=MISSING, linewidths=0)
            style: Any = {"s": size, "cmap": "viridis", "linewidths": 0.4, "edgecolors": "white"}
            drawn = axes.scatter(points[known, 0], points[known, 1], c=values[known], **style)
            _draw_bar(figure, drawn, what)
        axes.set_title(title)
        axes.set_aspect("equal", adjustable="datalim")
        axes.margins(0.06)
        return figure


def _between(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The finite values of pairs of different networks."""
    values: NDArray[np.float64] = matrix[~np.eye(len(matrix), dtype=bool)]
    return values[np.isfinite(values)]


def _draw_groups(axes: Axes, points: NDArray[np.float64], groups: Sequence[str | int], size: float, what: str) -> None:
    names = list(dict.fromkeys(groups))
    member = np.array([names.index(group) for group in groups])
    for k, name in enumerate(names):
        style: Any = {"s": size, "color": COLORS[k % len(COLORS)], "linewidths": 0.4, "edgecolors": "white"}
        axes.scatter(points[member == k, 0], points[member == k, 1], label=str(name), **style)
    if 2 <= len(names) <= len(COLORS):
        beside: Any = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(title=what, frameon=False, fontsize=9, title_fontsize=9, **beside)


def _draw_bar(figure: Figure, drawn: Any, what: str, extend: str = "neither") -> None:
    """The bar that says which color is which value."""
    bar = figure.colorbar(drawn, ax=figure.axes, extend=extend, fraction=0.05, pad=0.02)
    bar.set_label(what)
    bar.outline.set_visible(False)
