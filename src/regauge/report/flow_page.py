"""The report on generated networks: figures, and a self-contained HTML page from the results of
`regauge flow judge`.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from regauge.report.figures import COLORS, INK, MUTED, data_uri, data_uris, draw_figure
from regauge.report.pages import of_results, page_template
from regauge.report.population_figures import name_plane
from regauge.report.predictor_page import curves_figures

GOOD = {
    "loss": "loss",
    "loss_deviation": "deviation",
    "accuracy": "accuracy",
    "calibration": "calibration error",
    "average_loss": "average's loss",
    "average_accuracy": "average's accuracy",
}
"""The columns of the page's first table."""
NEW = {
    "distance": "nearest",
    "copied": "copied",
    "sources": "sources",
    "repeated": "repeated",
    "spread": "spread",
    "disagreement": "disagreement",
    "divergence": "divergence",
    "overlap": "overlap",
    "two_sample": "two-sample",
}
"""The columns of the page's second table."""


@of_results
def flow_page(results: dict[str, Any]) -> str:
    """Return the HTML page for a JSON file of results that `regauge flow judge` wrote."""
    figures: dict[str, str | list[str]] = {
        "losses": data_uri(losses_figure(results["losses"]), "png"),
        "places": data_uri(places_figure(results["places"], results["share"]), "png"),
    }
    if results["reliability"]:
        figures["reliability"] = data_uris(reliability_figures(results["reliability"]))
    if results["history"]:
        figures["curves"] = data_uris(curves_figures(results["history"], results["best"]))
    tables = [
        {name: label for name, label in names.items() if results["scores"][0][name] is not None}
        for names in (GOOD, NEW)
    ]
    page = page_template("flow.html.j2", thousands="{:,}".format, score=_score)
    return page.render(results | {"figures": figures, "tables": tables})


def losses_figure(losses: Mapping[str, Sequence[float]]) -> Figure:
    """Return the losses of every kind of network on a logarithmic axis: points for networks, and lines for medians."""
    chance = np.random.default_rng(0)
    with draw_figure(5.6, 0.36 * len(losses) + 1.0) as figure:
        axes = figure.add_subplot()
        for k, (name, values) in enumerate(losses.items()):
            found = np.array(values, np.float64)
            found = found[np.isfinite(found)]
            color = COLORS[0] if name == "generated" else COLORS[1] if name == "held-out" else MUTED
            heights = k + 0.28 * chance.uniform(-1, 1, len(found))
            axes.scatter(found, heights, s=12, color=color, alpha=0.5, linewidths=0)
            axes.plot([np.median(found)] * 2, [k - 0.38, k + 0.38], color=INK, linewidth=1.6)
        if min(min(values) for values in losses.values()) > 0:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
            axes.xaxis.set_minor_formatter(lambda value, _: f"{value:.3g}")
            axes.xaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
        axes.set_yticks(range(len(losses)), [textwrap.fill(name, 18) for name in losses])
        axes.invert_yaxis()
        axes.set_xlabel("loss of a network")
        return figure


def places_figure(places: Mapping[str, Sequence[Sequence[float]]], share: float) -> Figure:
    """Return a figure of training, held-out and generated networks as points in a plane, with distances to scale."""
    with draw_figure(5.0, 4.8) as figure:
        axes = figure.add_subplot()
        for (name, points), color in zip(places.items(), (MUTED, COLORS[1], COLORS[0]), strict=True):
            x, y = np.array(points, np.float64).T
            axes.scatter(x, y, s=16, color=color, alpha=0.6, linewidths=0, label=name)
        name_plane(axes, share)
        axes.set_aspect("equal", adjustable="datalim")
        figure.legend(frameon=False, fontsize=9, loc="outside upper left", ncols=len(places))
        return figure


def reliability_figures(reliability: Mapping[str, Sequence[Sequence[float]]]) -> list[Figure]:
    """Return plots of accuracy against confidence, for single networks and for their average. The size of a point shows
    the share of the predictions in its bin.
    """
    return [_reliability_figure(reliability, kind) for kind in ("single", "average")]


def _score(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _reliability_figure(reliability: Mapping[str, Sequence[Sequence[float]]], kind: str) -> Figure:
    with draw_figure(4.2, 4.2) as figure:
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1)
        for name, color in (("held-out", COLORS[1]), ("generated", COLORS[0])):
            sure, right, share = np.array(reliability[f"{name}, {kind}"], np.float64).T
            axes.plot(sure, right, color=color, linewidth=1.5, label=name)
            axes.scatter(sure, right, s=8 + 160 * share, color=color, alpha=0.7, linewidths=0)
        axes.set(xlabel="confidence", ylabel="accuracy", aspect="equal")
        axes.set_title("single networks" if kind == "single" else "the average of all")
        axes.legend(frameon=False, fontsize=9, loc="upper left")
        return figure
