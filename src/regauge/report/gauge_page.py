"""The report of a gauge: a self-contained HTML page from the numbers in the file next to it."""

from typing import Any

from regauge.report.figures import data_uris
from regauge.report.gauge_figures import errors_figures, ranges_figures
from regauge.report.pages import of_results, page_template

ABOUT = {
    "best": "Several ways to move the network were tried, and the one that loses least by rounding was kept.",
    "equalize": "Scales of every unit were chosen so that ranges agree on both of its sides.",
    "smooth": "Scales of what layers read were chosen such that layers with rounded weights put out what they did.",
    "hadamard": "Every direction that only linear maps see was turned by a Hadamard matrix, which spreads outliers.",
    "random": "Every direction that only linear maps see was turned at random, which spreads outliers.",
    "learned": "Every direction that only linear maps see was turned to where the rounding error is small.",
}
"""A sentence about each method."""


@of_results
def gauge_page(results: dict[str, Any]) -> str:
    """Return the page for a file of numbers that `regauge gauge` wrote."""
    layers = results["layers"]
    figures: dict[str, list[str]] = {}
    if layers:
        figures = {"ranges": data_uris(ranges_figures(layers)), "errors": data_uris(errors_figures(layers))}
    reasons: dict[str, list[str]] = {}
    for row in results["fixed"]:
        reasons.setdefault(row["reason"], []).append(row["name"])
    page = page_template("gauge.html.j2", short="{:.3g}".format)
    return page.render(results | {"figures": figures, "reasons": reasons, "about": ABOUT[results["method"]]})
