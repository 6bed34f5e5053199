"""The figure of strips: rows of pictures of networks, such as networks along a path, with losses and labels."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from regauge.inr.rendering.mesh import Mesh
from regauge.inr.rendering.points import PointCloud
from regauge.inr.rendering.strips import Picture, Strip
from regauge.report.figures import COLORS, INK, MUTED, draw_figure
from regauge.report.shape_figures import View, draw_shape

LABELS: Mapping[str, tuple[str, str]] = {
    "unsigned": ("far", "surface"),
    "signed": ("inside", "outside"),
    "occupancy": ("outside", "inside"),
}
"""For each signal, the meanings of the labels zero and one."""
SIDE, WORDS, HISTOGRAM, GAP = 1.5, 0.2, 0.36, 0.16
"""Sizes in inches: the side of a picture, the heights of its line of text and of its histogram, and the gap between
rows."""
MARGIN, HEAD, FOOT = 1.45, 0.3, 0.08
"""Sizes in inches: the space for row labels, for column labels, and below all rows."""


def strips_figure(strips: Sequence[Strip]) -> Figure:
    """Draw rows of pictures of networks, with the loss and the histogram of predicted labels below each picture.

    The height of a bar is the square root of the fraction of the label, on the same scale in all histograms. A few
    points on the surface therefore remain visible next to many points far from the surface. A cross marks a network
    without a surface. A number marks a network with fewer points than requested.

    References:
        De Luigi et al. (2023), figures 3.9 to 3.11.
    """
    if not strips:
        raise ValueError("there are no strips to draw; render at least one")
    names = strips[0].names
    for strip in strips:
        if strip.names != names:
            raise ValueError(f"the strips {strips[0].label!r} and {strip.label!r} show networks of different names")
    below = HISTOGRAM if any(strip.counts is not None for strip in strips) else 0.0
    row = SIDE + WORDS + below + GAP
    width = MARGIN + SIDE * len(names) + 0.1
    marks = textwrap.fill(_explain(strips), int(14 * width))
    note = 0.16 * (marks.count("\n") + 1) + 0.14 if marks else 0.0
    height = HEAD + row * len(strips) + (FOOT if below else 0.0) + note
    top = max((float(_heights(strip).max()) for strip in strips if strip.counts is not None), default=1.0)
    with draw_figure(width, height, "none") as figure:
        for k, name in enumerate(names):
            _write(figure, MARGIN + SIDE * (k + 0.5), height - HEAD / 2, name, color=MUTED)
        for r, strip in enumerate(strips):
            color, upper = COLORS[(r + 1) % len(COLORS)], height - HEAD - r * row
            label = textwrap.fill(strip.label, 14)
            _write(figure, MARGIN - 0.12, upper - SIDE / 2, label, ha="right", fontweight="bold", color=color)
            beside: Any = {"ha": "right", "color": MUTED, "fontsize": 8}
            _write(figure, MARGIN - 0.12, upper - SIDE - WORDS / 2, "loss", **beside)
            if strip.counts is not None:
                _write(figure, MARGIN - 0.12, upper - SIDE - WORDS - below / 2, "predictions", **beside)
            for k, (loss, picture) in enumerate(zip(strip.losses, strip.pictures, strict=True)):
                left, words = MARGIN + SIDE * k, upper - SIDE
                _draw(_place(figure, left + 0.04, words, SIDE - 0.08, SIDE - 0.04), picture, color)
                _write(figure, left + SIDE / 2, words - WORDS / 2, _number(loss), fontsize=9)
                if strip.counts is not None:
                    axes = _place(figure, left + 0.12, words - WORDS - below, SIDE - 0.24, below)
                    _histogram(axes, _heights(strip)[k], top, color)
                    if r == len(strips) - 1:
                        _ends(axes, LABELS[strip.signal])
        if marks:
            _write(figure, 0.1, note - 0.08, marks, ha="left", va="top", color=MUTED, fontsize=8.5)
        return figure


def _explain(strips: Sequence[Strip]) -> str:
    """Return the legend that explains the crosses, the numbers of points and the histograms in the strips."""
    pictures = [picture for strip in strips for picture in strip.pictures]
    clouds = [one for one in pictures if isinstance(one, PointCloud)]
    marks = []
    if any(one is None for one in pictures) or any(not len(one.points) for one in clouds):
        marks.append("A cross: no surface was found.")
    if any(len(one.points) and not one.is_complete for one in clouds):
        marks.append("A number such as 5 of 9: only 5 points of the surface were found, and 9 wanted.")
    if any(strip.counts is not None for strip in strips):
        marks.append("Predictions: how often the network puts out each label; heights are square roots of shares.")
    return " ".join(marks)


def _draw(axes: Axes, picture: Picture, color: str) -> None:
    match picture:
        case Mesh():
            draw_shape(axes, picture, View(), color)
        case PointCloud():
            draw_shape(axes, picture, View(), color)
            if not len(picture.points):
                _cross(axes)
            elif not picture.is_complete:
                words = f"{len(picture.points):,} of {picture.wanted:,}"
                axes.text(0.5, 0.0, words, transform=axes.transAxes, ha="center", va="bottom", color=MUTED, fontsize=7)
        case None:
            _cross(axes)
        case _:
            pixels = picture.numpy()
            single = pixels.shape[2] == 1
            axes.imshow(pixels[:, :, 0] if single else pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set_axis_off()


def _cross(axes: Axes) -> None:
    axes.set_axis_off()
    axes.plot([0.36, 0.64, 0.5, 0.36, 0.64], [0.36, 0.64, 0.5, 0.64, 0.36], transform=axes.transAxes, color=MUTED)


def _histogram(axes: Axes, heights: NDArray[np.float64], top: float, color: str) -> None:
    edges = np.linspace(0, 1, len(heights) + 1)
    axes.stairs(heights, edges, fill=True, color=color, alpha=0.75)
    axes.set(xlim=(-0.01, 1.01), ylim=(0, 1.05 * top), xticks=[], yticks=[])
    axes.grid(False)
    axes.spines["left"].set_visible(False)


def _ends(axes: Axes, words: tuple[str, str]) -> None:
    """Write the meanings of the smallest and the largest label below a histogram."""
    for x, word, side in ((0.0, words[0], "left"), (1.0, words[1], "right")):
        axes.text(x, -0.1, word, transform=axes.transAxes, ha=side, va="top", color=MUTED, fontsize=7.5)


def _heights(strip: Strip) -> NDArray[np.float64]:
    """Return the square roots of the shares of labels in each bin."""
    counts = np.asarray(strip.counts, np.float64)
    return np.asarray(np.sqrt(counts / np.maximum(counts.sum(1, keepdims=True), 1)))


def _place(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add matplotlib axes at a position in inches."""
    w, h = figure.get_size_inches()
    return figure.add_axes((left / w, bottom / h, width / w, height / h))


def _write(figure: Figure, x: float, y: float, words: str, **style: Any) -> None:
    """Write text at a position in inches."""
    w, h = figure.get_size_inches()
    figure.text(x / w, y / h, words, **({"ha": "center", "va": "center", "color": INK} | style))


def _number(loss: float) -> str:
    """Return a loss with three decimals, or its order of magnitude if the loss is below 0.01."""
    if not math.isfinite(loss):
        return "not finite"
    return f"{loss:.1e}" if 0 < abs(loss) < 0.01 else f"{loss:.3f}"
