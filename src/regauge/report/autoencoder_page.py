"""The report of an autoencoder: a self-contained HTML page from the numbers of the training."""

from typing import Any

import numpy as np

from regauge.report.autoencoder_figures import latents_figure, outputs_figure, pictures_figure
from regauge.report.figures import data_uri, data_uris
from regauge.report.pages import of_results, page_template
from regauge.report.predictor_figures import curves_figures


@of_results
def autoencoder_page(results: dict[str, Any]) -> str:
    """Return the page for a file of numbers that `regauge learn autoencoder` wrote."""
    figures: dict[str, str | list[str]] = {"latents": data_uri(latents_figure(**results["latents"]), "png")}
    if results["pictures"] is not None:
        pictures = {name: np.array(results["pictures"][name]) for name in ("originals", "decoded")}
        figures["twins"] = data_uri(pictures_figure(**pictures), "png")
    else:
        figures["twins"] = data_uri(outputs_figure(**results["outputs"]), "png")
    if results["history"]:
        figures["curves"] = data_uris(curves_figures(results["history"], results["best"]))
    names = list(results["scores"]["autoencoder"])
    page = page_template("autoencoder.html.j2", thousands="{:,}".format)
    return page.render(results | {"figures": figures, "names": names})
