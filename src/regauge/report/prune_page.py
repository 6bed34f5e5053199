"""The report on pruning: figures, and a self-contained HTML page. The page is made from the numbers in the JSON file
next to it."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from regauge.report.figures import COLORS, abridge, data_uri, draw_figure
from regauge.report.pages import of_results, page_template

ABOUT = {
    "magnitude": "with the smallest sums of squares over all of their weights, in a balanced network",
    "taylor": "whose removal changes the loss least to first order",
    "output": "that other units can best replace, after fitting the next weights",
    "random": "drawn at random",
}
"""A sentence on the units that each criterion removes."""
SHOWN = 40
"""The largest number of groups that are plotted. If there are more groups, only the first groups are plotted."""


@of_results
def prune_page(results: dict[str, Any]) -> str:
    """Return the HTML page for a JSON file of results that `regauge prune` wrote."""
    groups, losses = results["groups"], results["losses"]
    figures = {"units": data_uri(units_figure(groups), "svg")} if groups else {}
    figures |= {"losses": data_uri(losses_figure(losses), "svg")} if losses else {}
    reasons: dict[str, list[str]] = {}
    for row in results["fixed"]:
        reasons.setdefault(row["reason"], []).append(row["name"])
    page = page_template("prune.html.j2", short="{:.3g}".format, count="{:,}".format)
    known = {row["group"] for row in groups}
    uncut = len({row["name"].partition("[")[0] for row in results["fixed"]} - known)
    groups = [row | {"shrunk": row["after"] < row["before"]} for row in groups]
    results |= {"groups": groups, "uncut": uncut}
    return page.render(results | {"figures": figures, "reasons": reasons, "about": ABOUT[results["criterion"]]})


def units_figure(groups: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a plot of the share of units that each group keeps, in the order of the network."""
    shown = groups[:SHOWN]
    with draw_figure(4.6, 0.9 + 0.26 * len(shown)) as figure:
        axes = figure.add_subplot()
        shares = [100 * row["after"] / row["before"] for row in shown]
        axes.barh(range(len(shown)), [100.0] * len(shown), color="#e4e4e4", height=0.7)
        axes.barh(range(len(shown)), shares, color=COLORS[0], height=0.7)
        labels = [f"{abridge(row['group'], 24)}  {row['before']} → {row['after']}" for row in shown]
        axes.set_yticks(range(len(shown)), labels)
        axes.invert_yaxis()
        axes.set(xlabel="remaining units (%)", xlim=(0, 100))
        return figure


def losses_figure(losses: Mapping[str, Mapping[str, float]]) -> Figure:
    """Return a plot of each metric for the given network, after exact removals, and for the result."""
    metrics = list(next(iter(losses.values())))
    with draw_figure(4.6, 2.4 * len(metrics)) as figure:
        for k, metric in enumerate(metrics):
            axes = figure.add_subplot(len(metrics), 1, k + 1)
            bars = axes.bar(list(losses), [row[metric] for row in losses.values()], color=COLORS[0], width=0.6)
            axes.bar_label(bars, fmt="%.3g", fontsize=9)
            axes.set_title(metric)
            axes.margins(y=0.15)
        return figure
