"""The report of the demo: a self-contained HTML page made from the files that the demo wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from regauge.checkpoints.array_files import read_arrays
from regauge.checkpoints.plain_files import parse_object
from regauge.report.figures import data_uris, permutation_figure, weights_figures
from regauge.report.line_figures import line_figure
from regauge.report.pages import page_template, reading

RESULTS, PICTURES, PAGE = "results.json", "pictures.safetensors", "report.html"
"""The names of the demo's files: numbers, arrays to plot, and the page."""

LABELS = {"a": "network A", "before": "network B", "after": "B, aligned"}


def demo_page(folder: str | Path) -> str:
    """Return the HTML page for a folder with the demo's results.

    Raises:
        ValueError: A file in the folder is damaged, or lacks numbers that the page shows.
    """
    numbers, arrays = Path(folder) / RESULTS, Path(folder) / PICTURES
    results, tensors = parse_object(numbers.read_bytes(), numbers), read_arrays(arrays)
    page = page_template("demo.html.j2", loss="{:.3f}".format, percent="{:.1%}".format, thousands="{:,}".format)
    with reading(numbers):
        pictures = {name: tensor.numpy() for name, tensor in tensors.items()}
        return page.render(
            results | {"models": [model | {"figures": _figures(model, pictures)} for model in results["models"]]}
        )


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
