"""The report on an autoencoder: figures, and a self-contained HTML page made from the training results."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from regauge.report.figures import COLORS, MUTED, data_uri, data_uris, draw_figure
from regauge.report.pages import of_results, page_template
from regauge.report.population_figures import map_figure
from regauge.report.predictor_page import curves_figures


@of_results
def autoencoder_page(results: dict[str, Any]) -> str:
    """Return the page for a JSON file of results that `regauge learn autoencoder` wrote."""
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


def pictures_figure(originals: NDArray[np.float64], decoded: NDArray[np.float64]) -> Figure:
    """Return a figure of the images of networks, above the images of their reconstructions, given arrays `[networks,
    height, width, channels]`.
    """
    count, height, width = originals.shape[:3]
    with draw_figure(0.85 * count, 1.8 * height / width) as figure:
        for row, (images, label) in enumerate(((originals, "original"), (decoded, "decoded"))):
            for k, image in enumerate(images):
                axes = figure.add_subplot(2, count, row * count + k + 1)
                style: Any = {"cmap": "gray", "vmin": 0, "vmax": 1} if image.shape[-1] == 1 else {}
                axes.imshow(image[..., 0] if image.shape[-1] == 1 else image[..., :3].clip(0, 1), **style)
                axes.set_xticks([])
                axes.set_yticks([])
                if not k:
                    axes.set_ylabel(label, color=MUTED)
        return figure


def outputs_figure(originals: Sequence[float], decoded: Sequence[float]) -> Figure:
    """Return a plot of the outputs of decoded networks against the outputs of the original networks, with the line of
    equality.
    """
    ends = (min(originals), max(originals))
    with draw_figure(4.6, 4.4) as figure:
        axes = figure.add_subplot()
        axes.plot(ends, ends, color=MUTED, linewidth=1)
        axes.scatter(originals, np.clip(decoded, *ends), s=5, color=COLORS[1], alpha=0.5, linewidths=0)
        axes.set(xlabel="output of a network", ylabel="output of its decoded twin")
        return figure


def latents_figure(points: Sequence[Sequence[float]], labels: Sequence[Any], share: float, column: str) -> Figure:
    """Return a plot of latent vectors in the plane of their largest variance. A column determines the colors of the
    points.
    """
    title = f"{len(points)} test networks"
    places = np.array(points)
    if labels and all(type(one) is float for one in labels):
        return map_figure(places, [0] * len(places), title=title, share=share, values=np.array(labels), what=column)
    groups = list(map(str, labels)) or [""] * len(places)
    return map_figure(places, groups, title=title, share=share, what=column)
