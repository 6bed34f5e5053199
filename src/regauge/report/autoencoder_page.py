"""The report of an autoencoder: one HTML page that needs nothing but itself, from the numbers of the training."""

import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from regauge.report.autoencoder_figures import latents_figure, outputs_figure, pictures_figure
from regauge.report.figures import data_uri
from regauge.report.predictor_figures import curves_figure


def autoencoder_page(path: str | Path) -> str:
    """The page for a file of numbers that `regauge learn autoencoder` wrote."""
    results: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("regauge.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(thousands="{:,}".format)
    figures = {"latents": data_uri(latents_figure(**results["latents"]), "png")}
    if results["pictures"] is not None:
        pictures = {name: np.array(results["pictures"][name]) for name in ("originals", "decoded")}
        figures["twins"] = data_uri(pictures_figure(**pictures), "png")
    else:
        figures["twins"] = data_uri(outputs_figure(**results["outputs"]), "png")
    if results["history"]:
        figures["curves"] = data_uri(curves_figure(results["history"], results["best"]), "svg")
    names = list(results["scores"]["autoencoder"])
    return environment.get_template("autoencoder.html.j2").render(results | {"figures": figures, "names": names})
