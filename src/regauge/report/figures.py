"""Figures of tables, arrays and populations, made without pyplot and its global state."""

import base64
import io
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.category import StrCategoryFormatter
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import Normal, Stroke
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, Formatter, FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from regauge.core.escaping import escape_lines
from regauge.report.pictures import Chart, Images, Panel, Picture, Surface

Floats = NDArray[np.float64]

INK, MUTED, GRID = "#1c2430", "#667085", "#e4e7ec"
COLORS = ("#d1495b", "#00798c", "#8a6fb0", "#c58b2a", "#4c956c", "#33415c", "#d77fa1", "#7f8c8d")
"""The colors of the curve before alignment, the curve after alignment, and further curves."""
MISSING = "#d0d5dd"
"""The color of missing values."""
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
WIDTH = 10.7
"""The maximal width of a picture in inches. Panels that do not fit side by side are placed below each other."""
TITLE = 42
"""The largest number of characters in one line of a panel's title."""
LEGEND = 24
"""The largest number of letters in a curve's name, if the legend is inside the axes."""
NAME, NAMES = 28, 2.5
"""The largest number of letters in one line of a name at the end of a curve, and the width of such names in inches."""
NAME_SIZE = 9
"""The font size of names at the ends of curves, in points."""
UNITS = 6
"""The number of units in one figure of weights."""
LEVELS = 12
"""The number of contour lines of a surface."""


@contextmanager
def draw_figure(width: float, height: float, layout: Any = "constrained") -> Iterator[Figure]:
    """Return a context with a new figure of a given size in inches. Within the context, the common style of all figures
    applies.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout=layout)
        yield figure
        _show_texts_as_they_are(figure)
        # Ticks depend on the size that the layout gives. The next drawing reserves space for the labels of these ticks.
        figure.draw_without_rendering()


def _show_texts_as_they_are(figure: Figure) -> None:
    """Escape dollar signs in texts such as names from files, because dollar signs would start formulas. Numeric tick
    labels do not change.
    """
    axes = [axis for one in figure.axes for axis in (one.xaxis, one.yaxis)]
    ticks = {id(label) for axis in axes for label in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True))}
    for text in figure.findobj(Text):
        if id(text) not in ticks:
            text.set_text(escape_lines(text.get_text()))
            text.set_parse_math(False)
    for axis in axes:
        formatter = axis.get_major_formatter()
        if isinstance(formatter, FixedFormatter | FuncFormatter | StrCategoryFormatter):  # labels set by the caller
            axis.set_major_formatter(_escaping(formatter))


def _escaping(formatter: Formatter) -> FuncFormatter:
    return FuncFormatter(lambda x, place: escape_lines(formatter(x, place)).replace("$", r"\$"))


def plane_figure(
    xs: Floats,
    ys: Floats,
    values: Floats,
    points: Floats,
    labels: Sequence[str] = ("A", "B", "C"),
    title: str = "loss",
    about: str = "",
) -> Figure:
    """Return contours of a loss over a plane, with networks marked as points.

    The levels form a geometric sequence above the smallest value, which shows valley floors and the heights between
    valleys. Values that are not finite are white. The values have shape `[rows, columns]`, and lower values are better.
    The points have shape `[networks, 2]`.
    """
    marked = [(float(x), float(y)) for x, y in points]
    return picture_figure((Surface(title, xs.tolist(), ys.tolist(), values.tolist(), marked, tuple(labels), about),))


def picture_figure(picture: Picture) -> Figure:
    """Plot charts, surfaces or image grids, as many side by side as fit, in rows of equal length."""
    if not picture:
        raise ValueError("a picture needs at least one panel")
    sizes = [_panel_size(panel) for panel in picture]
    widest, highest = (max(size) for size in zip(*sizes, strict=True))
    rows = -(-len(picture) // max(1, int(WIDTH // widest)))
    columns = -(-len(picture) // rows)
    with draw_figure(columns * widest, rows * highest) as figure:
        for k, panel in enumerate(picture):
            axes = figure.add_subplot(rows, columns, k + 1)
            if isinstance(panel, Surface):
                _draw_surface(figure, axes, panel)
            elif isinstance(panel, Images):
                _draw_images(axes, panel)
            else:
                _draw_chart(axes, panel, 72 * (highest - 1))
        return figure


def _panel_size(panel: Panel) -> tuple[float, float]:
    """Return the size of a panel in inches."""
    if isinstance(panel, Surface):
        return _plane_size(np.array(panel.xs), np.array(panel.ys))
    if isinstance(panel, Images):
        return 2.2 + 0.62 * len(panel.columns), 0.5 + 0.62 * len(panel.rows)
    names = _names_of(panel)
    if not _is_named_at_ends(names):
        return (4.3, 3.4) if names else (3.5, 3.0)
    lines = sum(len(textwrap.wrap(name, NAME)) for name in names)
    return 4.3 + NAMES, max(3.2, 1.1 + lines * 1.25 * NAME_SIZE / 72)


def _names_of(chart: Chart) -> list[str]:
    return [series.label for series in chart.series if series.label]


def _is_named_at_ends(names: Sequence[str]) -> bool:
    """Return whether to write names at the ends of curves. A legend with many or long names would cover the curves."""
    return len(names) > 3 or max(map(len, names), default=0) > LEGEND


def _draw_images(axes: Axes, images: Images) -> None:
    """Draw a grid of images, with labels of rows and columns."""
    counts = len(images.rows), len(images.columns)
    sheet = np.block([[np.pad(images.image(r, c), 1) for c in range(counts[1])] for r in range(counts[0])])
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_title(images.title)
    axes.grid(False)
    (height, width), names = sheet.shape, (images.rows, images.columns)
    middles = [(np.arange(n) + 0.5) * size / n - 0.5 for n, size in zip(counts, (height, width), strict=True)]
    axes.set_yticks(middles[0], ["\n".join(textwrap.wrap(name, 20)) for name in names[0]])
    axes.set_xticks(middles[1], names[1])


def permutation_figure(name: str, perm: NDArray[np.int64]) -> Figure:
    """Return a figure of a permutation matrix.

    Each row (position) has a dot at the column from which its unit comes.
    """
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


def weights_figures(rows: Mapping[str, NDArray[np.float32]]) -> list[Figure]:
    """Return figures of the weights of units, which are given as images `[units, height, width]`, with one row for each
    label. Positive weights are blue.

    All images share one color scale. Therefore units with only small weights look white.
    """
    limit = float(np.quantile(np.abs(np.concatenate([images.ravel() for images in rows.values()])), 0.995)) or 1.0
    count = len(next(iter(rows.values())))
    starts = range(0, count, UNITS)
    return [_weights_figure({label: images[k : k + UNITS] for label, images in rows.items()}, limit) for k in starts]


def _weights_figure(rows: Mapping[str, NDArray[np.float32]], limit: float) -> Figure:
    tight = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0, hspace=0)
    with draw_figure(4.6, 0.68 * len(rows) + 0.15, tight) as figure:
        for r, (label, images) in enumerate(rows.items()):
            for c, image in enumerate(images):
                axes = figure.add_subplot(len(rows), UNITS, r * UNITS + c + 1)
                axes.imshow(image, cmap="RdBu", vmin=-limit, vmax=limit, interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                if c == 0:
                    axes.set_ylabel(label, rotation=0, ha="right", va="center", color=INK, fontsize=9.5, labelpad=8)
        return figure


def abridge(name: str, most: int = 34) -> str:
    """Shorten a long name to its last letters, because the last letters distinguish layers and files."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def data_uri(figure: Figure, kind: Literal["svg", "png"]) -> str:
    """Return a figure as a data URI. Equal figures give equal bytes. For many small images, choose PNG."""
    buffer = io.BytesIO()
    metadata: Any = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}[kind]
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    mime = {"svg": "svg+xml", "png": "png"}[kind]
    return f"data:image/{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def data_uris(figures: Iterable[Figure], kind: Literal["svg", "png"] = "svg") -> list[str]:
    """Return several figures as data URIs."""
    return [data_uri(figure, kind) for figure in figures]


def _plane_size(xs: Floats, ys: Floats) -> tuple[float, float]:
    """Return the size in inches of a plane with its color bar."""
    width = 4.4
    return width + 0.9, float(np.clip(width * (ys[-1] - ys[0]) / (xs[-1] - xs[0]), 2.4, 6.0)) + 0.9


def _draw_surface(figure: Figure, axes: Axes, surface: Surface) -> None:
    values = np.array(surface.values)
    known = values[np.isfinite(values)]
    if not len(known):
        raise ValueError(
            f"none of the {values.size} values is finite, so there is nothing to draw; look for NaN in the networks"
        )
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
        halo = [Stroke(linewidth=3, foreground="white"), Normal()]
        style: Any = {"color": INK, "fontweight": "bold", "path_effects": halo}
        axes.annotate(label, (x, y), (6, 6), textcoords="offset points", **style)
    digits = next(n for n in itertools.count(2) if n > 5 or len({f"{edge:.{n}g}" for edge in edges[::3]}) == 5)
    bar = figure.colorbar(drawn, ax=axes, ticks=edges[::3], format=lambda value, _: f"{value:.{digits}g}")
    bar.outline.set_visible(False)
    bar.set_label("bright: low; darkest: beyond the scale", fontsize=8.5)
    axes.set(aspect="equal", title=surface.title)
    if len(surface.labels) > 1:
        first, second, *_ = surface.labels
        axes.set_ylabel("distance from that line")
        about = textwrap.fill(surface.about, 44)
        axes.set_xlabel("\n".join([f"distance along the line from {first} to {second}", about]).strip())
    axes.grid(False)


def _draw_chart(axes: Axes, chart: Chart, height: float) -> None:
    """Draw a chart into axes whose height is about `height` points."""
    colors = {True: itertools.cycle(COLORS), False: itertools.cycle(COLORS)}
    ends: list[tuple[str, str, float, float]] = []
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
            if series.label:
                ends.append((series.label, color, float(x[-1]), float(y[-1])))
    if chart.is_log_x:
        ticks = sorted({float(x) for series in chart.series for x in series.x})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    else:
        axes.locator_params(axis="x", nbins=6)
    if chart.is_log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    if chart.y_limits is not None:
        axes.set_ylim(*chart.y_limits)
    axes.set(title=textwrap.fill(chart.title, TITLE), xlabel=chart.x_label, ylabel=chart.y_label)
    names = _names_of(chart)
    if _is_named_at_ends(names):
        _name_at_ends(axes, ends, height)
    elif names:
        axes.legend(frameon=False, fontsize=NAME_SIZE)


def _name_at_ends(axes: Axes, ends: Sequence[tuple[str, str, float, float]], height: float) -> None:
    """Write names to the right of the axes, ordered by the ends of their curves, with connecting lines."""
    axes.autoscale_view()
    to_share = axes.transData + axes.transAxes.inverted()
    wanted = [float(np.clip(np.nan_to_num(to_share.transform((x, y))[1], nan=0.5), 0, 1)) for *_, x, y in ends]
    texts = ["\n".join(textwrap.wrap(name, NAME)) for name, *_ in ends]
    heights = [1.25 * NAME_SIZE * (1 + text.count("\n")) / height for text in texts]
    for (_, color, x, y), text, place in zip(ends, texts, _spread(wanted, heights), strict=True):
        line = {"arrowstyle": "-", "color": color, "linewidth": 1.4, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)}
        at: Any = {"textcoords": "axes fraction", "va": "center", "fontsize": NAME_SIZE, "color": INK}
        axes.annotate(text, (x, y), (1.06, place), arrowprops=line, annotation_clip=False, **at)


def _spread(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Return label centers between 0 and 1 that do not overlap and are close to the wanted positions."""
    order, places = sorted(range(len(wanted)), key=wanted.__getitem__), [0.0] * len(wanted)
    bottom = 0.0
    for k in order:
        places[k] = max(wanted[k], bottom + heights[k] / 2)
        bottom = places[k] + heights[k] / 2
    top = max(1.0, sum(heights))
    for k in reversed(order):
        places[k] = min(places[k], top - heights[k] / 2)
        top = places[k] - heights[k] / 2
    return places
