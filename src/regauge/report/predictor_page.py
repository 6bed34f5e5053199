"""The report of a predictor: a self-contained HTML page from the numbers of the training."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from regauge.report.figures import data_uri, data_uris
from regauge.report.pages import of_results, page_template
from regauge.report.predictor_figures import confusion_figure, curves_figures, scatter_figure

PERCENT = ("accuracy",)
"""Scores that are shares."""


@of_results
def predictor_page(results: dict[str, Any]) -> str:
    """Return the page for a file of numbers that `regauge learn predictor` wrote."""
    scores = results["scores"]
    first = next(iter(scores["net"]))
    return page_template("predictor.html.j2", thousands="{:,}".format, score=_score).render(
        results
        | {
            "figures": _figures(results),
            "first": first,
            "names": list(scores["net"]),
            "is_rendered": "render=0.0" not in results["settings"],
        }
    )


def _score(value: float, name: str) -> str:
    return f"{value:.1%}" if name in PERCENT else f"{value:.4g}"


def _figures(results: Mapping[str, Any]) -> dict[str, str | list[str]]:
    target, tested = results["target"], results["tested"]
    if target["kind"] == "classes":
        names = [str(one) for one in target["classes"]]
        places = {name: k for k, name in enumerate(names)}
        counts = np.zeros((len(names), len(names)), np.int64)
        for measured, predicted in zip(tested["measured"], tested["predicted"], strict=True):
            counts[places[str(measured)], places[str(predicted)]] += 1
        picture = confusion_figure(counts, names, target["name"])
    else:
        picture = scatter_figure(np.array(tested["measured"]), np.array(tested["predicted"]), target["name"])
    found = curves_figures(results["history"], results["best"]) if results["history"] else []
    kind: Any = "png" if target["kind"] == "numbers" and len(tested["measured"]) > 3000 else "svg"
    return {"tested": data_uri(picture, kind), **({"curves": data_uris(found)} if found else {})}
