"""The report of a comparison: one HTML page that needs nothing but itself, from what `regauge compare` found."""

from collections.abc import Mapping
from typing import Any

from regauge.report.comparison_figures import shares_figure
from regauge.report.figures import data_uri
from regauge.report.pages import page_template


def comparison_page(facts: Mapping[str, Any]) -> str:
    """The page of two networks.

    Args:
        facts: Verdict, reason, numbers, layers, tensors, tested groups, draws and notes, as the command tells them in
            JSON, with the names of both networks (`a`, `b`), `seed` and `version`.
    """
    page = page_template(
        "comparison.html.j2",
        percent=lambda value: "" if value is None else f"{value:.1%}",
        digits="{:.4g}".format,
        thousands="{:,}".format,
    )
    figure = data_uri(shares_figure(facts["layers"]), "svg") if facts["layers"] else None
    return page.render(dict(facts) | {"figure": figure})
