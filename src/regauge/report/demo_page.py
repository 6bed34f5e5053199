"""The demo's report: one HTML page that needs nothing but itself, from the files that the demo wrote."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import load_file

from regauge.report.figures import data_uris, permutation_figure, weights_figures
from regauge.report.line_figures import line_figure
from regauge.report.pages import page_template

RESULTS, PICTURES, PAGE = "results.json", "pictures.safetensors", "report.html"
"""Names of the demo's files: numbers, arrays that are drawn, and the page."""

LABELS = {"a": "network A", "before": "network B", "after": "B, aligned"}


def demo_page(folder: str | Path) -> str:
    """The page for a folder with the demo's results."""
    folder = Path(folder)
    results: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    pictures: dict[str, NDArray[Any]] = dict(load_file(folder / PICTURES))
    models = [model | {"figures": _figures(model, pictures)} for model in results["models"]]
    page = page_template("demo.html.j2", loss="{:.3f}".format, percent="{:.1%}".format, thousands="{:,}".format)
    return page.render(results | {"models": models})


def _figures(model: Mapping[str, Any], pictures: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    key, curves = model["key"], model["curves"]
    names = [group["name"] for group in model["symmetry"]["groups"]]
    perms = {name: pictures[f"{key}/perm/{name}"] for name in names if f"{key}/perm/{name}" in pictures}
    units = {label: pictures[f"{key}/units/{name}"] for name, label in LABELS.items()}
    return {
        "line": data_uris([line_figure(curves, metric) for metric in ("loss", "accuracy")]),
        "permutations": data_uris([permutation_figure(name, perm) for name, perm in perms.items()]),
        "weights": data_uris(weights_figures(units), "png"),
    }
