"""The report on sampled networks: a self-contained HTML page from the numbers of `regauge flow judge`."""

from typing import Any

from regauge.report.figures import data_uri, data_uris
from regauge.report.flow_figures import losses_figure, places_figure, reliability_figures
from regauge.report.pages import of_results, page_template
from regauge.report.predictor_figures import curves_figures

GOOD = {
    "loss": "loss",
    "loss_deviation": "deviation",
    "accuracy": "accuracy",
    "calibration": "calibration error",
    "average_loss": "average's loss",
    "average_accuracy": "average's accuracy",
}
"""Columns of the first table."""
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
"""Columns of the second one."""


@of_results
def flow_page(results: dict[str, Any]) -> str:
    """Return the page for a file of numbers that `regauge flow judge` wrote."""
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


def _score(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
