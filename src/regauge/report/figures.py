"""Figures from tables, arrays and populations. No pyplot: nothing global, nothing to close."""

import base64
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from regauge.papers.table import Chart, Picture, Surface

Floats = NDArray[np.float64]
Row = Mapping[str, float]

INK, MUTED, GRID = "#1c2430", "#667085", "#e4e7ec"
COLORS = ("#d1495b", "#00798c", "#8a6fb0", "#c58b2a", "#4c956c", "#33415c", "#d77fa1", "#7f8c8d")
"""Before, after, and further curves."""
MISSING = "#d0d5dd"
"""Color of missing values."""
BESIDE = 2
"""Largest number of curves with a legend inside the axes; more would cover the curves."""
STYLE: Any = {
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "svg.fonttype": "path",
    "svg.hashsalt": "regauge",
}
WORDS = {"loss": "cross entropy (nats)", "accuracy": "accuracy"}
PANELS = 4
"""Most panels of a picture side by side; further ones stand below."""
LEVELS = 12
"""Number of contours of a surface."""


@contextmanager
def draw_figure(width: float, height: float, layout: Any = "constrained") -> Iterator[Figure]:
    """A figure of a size in inches, in the style of all figures while it is drawn."""
    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout=layout)


def line_figure(curves: Mapping[str, Sequence[Row]], metric: str = "loss", title: str | None = None) -> Figure:
    """A metric along the lines between two networks, from t = 0 to 1; for the loss with the first barrier marked."""
    is_crowded = len(curves) > BESIDE
    with draw_figure(*((7.6, 3.8) if is_crowded else (4.6, 3.2))) as figure:
        axes = figure.add_subplot()
        for k, (label, rows) in enumerate(curves.items()):
            color, dashes = COLORS[k % len(COLORS)], "-" if k < len(COLORS) else "--"
            t, values = [row["t"] for row in rows], [row[metric] for row in rows]
            axes.plot(t, values, dashes, color=color, linewidth=2.2, label=label, solid_capstyle="round")
            axes.plot(t[:: len(t) - 1], values[:: len(t) - 1], "o", color=color, markersize=5)
        axes.set_title(title or WORDS.get(metric, metric))
        axes.set_xticks([0, 0.5, 1], ["A", "midpoint", "B"])
        axes.margins(x=0.03)
        if metric == "accuracy":
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
            axes.locator_params(axis="y", nbins=6, min_n_ticks=3, steps=[1, 2, 5, 10])
        if metric == "loss":
            axes.set_ylim(bottom=0)
            _mark_barrier(axes, next(iter(curves.values())))
            if is_crowded:
                figure.legend(frameon=False, loc="outside right center", fontsize=9)
            elif any(curves):
                axes.legend(frameon=False, loc="best", fontsize=9)
        return figure


def plane_figure(
    xs: Floats,
    ys: Floats,
    values: Floats,
    points: Floats,
    labels: Sequence[str] = ("A", "B", "C"),
    title: str = "loss",
) -> Figure:
    """Contours of a loss over a plane, with networks marked.

    Levels rise in equal ratios above the smallest value, so that both the floors of valleys and the heights between
    them are told apart. What is not finite stays white. Values are `[rows, columns]` and low is good; points are
    `[networks, 2]`.
    """
    marked = [(float(x), float(y)) for x, y in points]
    return picture_figure((Surface(title, xs.tolist(), ys.tolist(), values.tolist(), marked, tuple(labels)),))


def picture_figure(picture: Picture) -> Figure:
    """Charts or surfaces side by side, in rows of equal length where there are many."""
    if not picture:
        raise ValueError("a picture needs at least one panel")
    planes = [_plane_size(np.array(p.xs), np.array(p.ys)) for p in picture if isinstance(p, Surface)]
    sizes = planes if len(planes) == len(picture) else [(4.3, 3.4)] * len(picture)
    rows = -(-len(picture) // PANELS)
    columns = -(-len(picture) // rows)
    width = max(sum(width for width, _ in sizes[k : k + columns]) for k in range(0, len(sizes), columns))
    with draw_figure(width, rows * max(height for _, height in sizes)) as figure:
        for k, panel in enumerate(picture):
            axes = figure.add_subplot(rows, columns, k + 1)
            if isinstance(panel, Surface):
                _draw_surface(figure, axes, panel)
            else:
                _draw_chart(axes, panel)
        return figure


def permutation_figure(name: str, perm: NDArray[np.int64]) -> Figure:
    """A permutation matrix: a dot where a position (row) takes its unit from (column)."""
    n = len(perm)
    with draw_figure(3.0, 3.1) as figure:
        axes = figure.add_subplot()
        axes.plot([0, n - 1], [0, n - 1], color=COLORS[0], linewidth=1, alpha=0.5)
        axes.plot(perm, np.arange(n), "s", color=COLORS[1], markersize=max(1.6, min(6.0, 160 / n)), markeredgewidth=0)
        axes.set(xlim=(-1, n), ylim=(n, -1), aspect="equal", xticks=[0, n - 1], yticks=[0, n - 1])
        axes.set_xticklabels(["1", str(n)])
        axes.set_yticklabels(["1", str(n)])
        axes.set_xlabel("unit of B", labelpad=-6)
        axes.set_ylabel("position in A", labelpad=-12)
        axes.set_title(name)
        axes.grid(False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(True)
        return figure


def weights_figure(rows: Mapping[str, NDArray[np.float32]]) -> Figure:
    """Weights of units as images `[units, height, width]`, one row per label; red is negative, blue positive.

    All share one scale, so that dead units look dead.
    """
    labels = list(rows)
    limit = float(np.quantile(np.abs(np.concatenate([images.ravel() for images in rows.values()])), 0.995)) or 1.0
    count = len(rows[labels[0]])
    tight = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0, hspace=0)
    with draw_figure(9.2, 8.2 / count * len(rows) + 0.15, tight) as figure:
        for r, label in enumerate(labels):
            for c, image in enumerate(rows[label]):
                axes = figure.add_subplot(len(rows), count, r * count + c + 1)
                axes.imshow(image, cmap="RdBu", vmin=-limit, vmax=limit, interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                if c == 0:
                    axes.set_ylabel(label, rotation=0, ha="right", va="center", color=INK, fontsize=9.5, labelpad=8)
        return figure


def data_uri(figure: Figure, kind: Literal["svg", "png"]) -> str:
    """A figure as a data URI, the same bytes every time; PNG for figures of many small images."""
    buffer = io.BytesIO()
    metadata: Any = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}[kind]
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    mime = {"svg": "svg+xml", "png": "png"}[kind]
    return f"data:image/{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _plane_size(xs: Floats, ys: Floats) -> tuple[float, float]:
    """Inches of a plane with its color bar."""
    width = 4.4
    return width + 0.9, float(np.clip(width * (ys[-1] - ys[0]) / (xs[-1] - xs[0]), 2.4, 6.0)) + 0.4


def _draw_surface(figure: Figure, axes: Axes, surface: Surface) -> None:
    values = np.array(surface.values)
    known = values[np.isfinite(values)]
    if not len(known):
        raise ValueError(f"none of the {values.size} values is finite, so there is nothing to draw")
    low, span = float(known.min()), float(np.quantile(known, 0.98) - known.min()) or 1.0
    edges = [low, *(low + np.geomspace(0.01 * span, span, LEVELS))]
    shades = matplotlib.colormaps["viridis_r"].resampled(LEVELS + 1)
    norm = BoundaryNorm(edges, shades.N, extend="max")
    xs, ys = np.array(surface.xs), np.array(surface.ys)
    drawn = axes.contourf(xs, ys, np.ma.masked_invalid(values), levels=edges, cmap=shades, norm=norm, extend="max")
    inside = [edge for edge in edges[1:] if edge < known.max()]
    if inside:
        axes.contour(xs, ys, np.ma.masked_invalid(values), levels=inside, colors="white", linewidths=0.4)
    for (x, y), label in zip(surface.points, surface.labels, strict=True):
        axes.plot(x, y, "o", color="white", markeredgecolor=INK, markersize=7)
        axes.annotate(label, (x, y), (6, 6), textcoords="offset points", color=INK, fontweight="bold")
    figure.colorbar(drawn, ax=axes, format=lambda value, _: f"{value:.3g}").outline.set_visible(False)
    axes.set(aspect="equal", title=surface.title)
    axes.grid(False)


def _draw_chart(axes: Axes, chart: Chart) -> None:
    colors = {True: itertools.cycle(COLORS), False: itertools.cycle(COLORS)}
    for series in chart.series:
        x, y = np.array(series.x), np.array(series.y)
        if series.style == "points":
            axes.plot(x, y, ".", color=MUTED, markersize=4, label=series.label, zorder=1)
        else:
            color = next(colors[bool(series.label)])
            dashes = "--" if series.style == "dashed" else "-"
            marker = "o" if len(x) <= 9 else ""
            width = 2 if series.label else 1.2
            axes.plot(x, y, dashes, marker=marker, color=color, linewidth=width, markersize=4.5, label=series.label)
            if len(series.low):
                axes.fill_between(x, np.array(series.low), np.array(series.high), color=color, alpha=0.18, linewidth=0)
    if chart.is_log_x:
        ticks = sorted({float(x) for series in chart.series for x in series.x})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    if chart.y_limits is not None:
        axes.set_ylim(*chart.y_limits)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    named = sum(bool(series.label) for series in chart.series)
    if named:
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)} if named > 3 else {}
        axes.legend(frameon=False, fontsize=9, **below)


def _mark_barrier(axes: Axes, rows: Sequence[Row]) -> None:
    """The highest point above the straight line between the end losses, which is dotted."""
    first, last = rows[0]["loss"], rows[-1]["loss"]

    def chord(t: float) -> float:
        return (1 - t) * first + t * last

    top = max(rows, key=lambda row: row["loss"] - chord(row["t"]))
    height = top["loss"] - chord(top["t"])
    if height < 0.1 * axes.get_ylim()[1]:
        return
    axes.plot([0, 1], [first, last], ":", color=MUTED, linewidth=1)
    axes.annotate(
        "",
        (top["t"], top["loss"]),
        (top["t"], chord(top["t"])),
        arrowprops={"arrowstyle": "<->", "color": MUTED, "linewidth": 1, "shrinkA": 0, "shrinkB": 0},
    )
    low = chord(top["t"]) + 0.22 * height
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    axes.text(top["t"] + 0.02, low, f"barrier {height:.2f}", color=MUTED, fontsize=9, va="center", bbox=behind)


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

    Distances are to scale. Groups are named in a legend where there are two to twenty; NaN is drawn gray.
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
    """The bar that says which color is which value."""
    bar = figure.colorbar(drawn, ax=figure.axes, extend=extend, fraction=0.05, pad=0.02)
    bar.set_label(what)
    bar.outline.set_visible(False)
