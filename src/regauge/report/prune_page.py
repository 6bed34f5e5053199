"""The report of pruning: a self-contained HTML page from the numbers in the file next to it."""

from typing import Any

from regauge.report.figures import data_uri
from regauge.report.pages import of_results, page_template
from regauge.report.prune_figures import losses_figure, units_figure

ABOUT = {
    "magnitude": "with the smallest sums of squares over all of their weights, in a balanced network",
    "taylor": "whose removal changes the loss least to first order",
    "output": "that other units can best stand in for, with the weights behind them fitted",
    "random": "drawn at random",
}
"""The units that each criterion removes."""


@of_results
def prune_page(results: dict[str, Any]) -> str:
    """Return the page for a file of numbers that `regauge prune` wrote."""
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
