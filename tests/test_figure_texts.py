"""No text extends beyond its picture, for names of any length."""

from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from page_cases import LONG, many_groups

from regauge.report.alignment_figures import moves_figure
from regauge.report.comparison_page import shares_figure, tree_figure
from regauge.report.figures import abridge
from regauge.report.line_figures import path_figure
from regauge.report.population_figures import map_figure, matrices_figure
from regauge.report.prune_page import units_figure

LAYER = "language_model.model.layers.31.self_attn.q_proj"
ROWS = [{"t": t / 4, "loss": 1 + t * (4 - t), "accuracy": 0.9} for t in range(5)]
POINTS = np.random.default_rng(0).normal(size=(9, 2))
MOVED = {"group": LAYER, "units": 4096, "moved": 0.5, "flipped": 0.25, "turned": None, "low": 0.5, "high": 3.0}


def shares(name: str) -> Figure:
    return shares_figure([{"layer": f"{name}.{k}", "before": 0.1, "after": 0.9} for k in range(5)])


def tree(name: str) -> Figure:
    return tree_figure([{"parent": f"{name}.0", "child": f"{name}.{k}", "length": k / 4} for k in range(1, 4)])


FIGURES: dict[str, Callable[[], Figure]] = {
    "shares": lambda: shares("0"),
    "shares of long names": lambda: shares(LAYER),
    "tree": lambda: tree("a.pt"),
    "tree of long names": lambda: tree(LONG[0]),
    "units": lambda: units_figure([{"group": "0", "before": 8, "after": 6}]),
    "units of long names": lambda: units_figure([{"group": LAYER, "before": 8192, "after": 4096}] * 9),
    "matrices": lambda: matrices_figure({"3": np.eye(3)}, "distance modulo the group, relative to the norm"),
    "two matrices": lambda: matrices_figure({"as stored": np.eye(40), "aligned": np.eye(40)}, "barrier: loss"),
    "map": lambda: map_figure(
        POINTS, ["a"] * 9, title="8,192 networks of uci-mlps, all aligned to one universe", share=0.2
    ),
    "shades": lambda: map_figure(POINTS, [0] * 9, title="a", share=1.0, values=POINTS[:, 0], what="validation loss"),
    "line": lambda: path_figure({"": ROWS}, "cross entropy (nats)", ("A", "B")),
    "two lines": lambda: path_figure({"as trained": ROWS, "aligned": ROWS}, "loss", (f"A: {LONG[0]}", f"B: {LONG[1]}")),
    "moves": lambda: moves_figure([MOVED] * 3),
    "threads": lambda: many_groups(12).plot(),
}


def texts_of(figure: Figure) -> list[Text]:
    """Return the visible texts."""
    hidden = {text for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in unseen(axis)}
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in hidden]


def unseen(axis: Axis) -> set[Text]:
    """Return labels of ticks that are not drawn, because they lie outside of the axis."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return {tick.label1 for tick in ticks if not low - 1e-9 <= tick.get_loc() <= high + 1e-9}


@pytest.mark.parametrize("name", FIGURES)
def test_texts_stay_inside(name: str) -> None:
    figure = FIGURES[name]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    cut = {
        text.get_text(): [round(float(side)) for side in box.extents]
        for text in texts_of(figure)
        if (box := text.get_window_extent(canvas.get_renderer())).x0 < -1
        or box.x1 > width + 1
        or box.y0 < -1
        or box.y1 > height + 1
    }
    assert not cut, (width, height)


def test_long_names_keep_their_end() -> None:
    assert abridge("short") == "short"
    assert abridge(LAYER, 24) == "…ers.31.self_attn.q_proj"
    assert all(len(abridge("x" * n, most)) == min(n, most) for n in range(1, 40) for most in (7, 8, 34))
