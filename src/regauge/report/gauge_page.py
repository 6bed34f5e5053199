"""The report on a gauge: figures, and a self-contained HTML page. The page is made from the numbers in the JSON file
next to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from regauge.report.figures import COLORS, data_uris, draw_figure
from regauge.report.pages import of_results, page_template

ABOUT = {
    "best": "Several methods were tried, and the one that loses least by rounding was kept.",
    "equalize": "The scale of every unit was chosen such that its weights have equal ranges in both layers.",
    "smooth": "The inputs of layers were scaled such that layers with rounded weights keep their outputs.",
    "hadamard": "All spaces that only linear maps read were rotated by Hadamard matrices, which spread outliers.",
    "random": "All spaces that only linear maps read were rotated at random, which spreads outliers.",
    "learned": "All spaces that only linear maps read were rotated to make the rounding error small.",
}
"""A sentence that describes each method."""
PANELS = 4
"""The number of layers whose channels are plotted: the layers whose ranges changed most."""


@of_results
def gauge_page(results: dict[str, Any]) -> str:
    """Return the HTML page for a JSON file of results that `regauge gauge` wrote."""
    layers = results["layers"]
    figures: dict[str, list[str]] = {}
    if layers:
        figures = {"ranges": data_uris(ranges_figures(layers)), "errors": data_uris(errors_figures(layers))}
    reasons: dict[str, list[str]] = {}
    for row in results["fixed"]:
        reasons.setdefault(row["reason"], []).append(row["name"])
    page = page_template("gauge.html.j2", short="{:.3g}".format)
    return page.render(results | {"figures": figures, "reasons": reasons, "about": ABOUT[results["method"]]})


def ranges_figures(layers: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return one plot for each layer, which shows the largest weight of each input channel before and after the change
    of gauge.
    """
    return [_ranges_figure(layer) for layer in sorted(layers, key=_evened, reverse=True)[:PANELS]]


def errors_figures(layers: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return plots of the layers' relative squared rounding errors, in network order, one plot per number of bits."""
    return [_errors_figure(layers, k) for k in range(len(layers[0]["errors"]))]


def _ranges_figure(layer: Mapping[str, Any]) -> Figure:
    with draw_figure(4.6, 2.7) as figure:
        axes = figure.add_subplot()
        for color, label in zip(COLORS, ("before", "after"), strict=False):
            axes.plot(layer["ranges"][label], color=color, linewidth=1, label=label)
        axes.set(xlabel="input channel", ylabel="largest weight", title=layer["layer"], ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=9)
        return figure


def _errors_figure(layers: Sequence[Mapping[str, Any]], k: int) -> Figure:
    with draw_figure(4.6, 3.0) as figure:
        axes = figure.add_subplot()
        for color, label in zip(COLORS, ("before", "after"), strict=False):
            values = [max(layer["errors"][k][label], 1e-12) for layer in layers]
            axes.semilogy(range(1, len(values) + 1), values, "o", color=color, markersize=3.5, label=label)
        axes.set(title=layers[0]["errors"][k]["rounding"], xlabel="layer, in order", ylabel="relative squared error")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=9)
        return figure


def _evened(layer: Mapping[str, Any]) -> float:
    """Return the absolute base-2 logarithm of the factor by which the ratio of the largest range to the mean range
    changes.
    """
    before, after = (np.array(layer["ranges"][label]) for label in ("before", "after"))
    ratios = [float(one.max() / max(one.mean(), 1e-300)) if len(one) else 1.0 for one in (before, after)]
    return abs(float(np.log2(max(ratios[0], 1e-9) / max(ratios[1], 1e-9))))
