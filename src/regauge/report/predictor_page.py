"""The report on a predictor: figures, and a self-contained HTML page made from the training results."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from regauge.report.figures import COLORS, INK, MUTED, data_uri, data_uris, draw_figure
from regauge.report.pages import of_results, page_template

PERCENT = ("accuracy",)
"""The scores that are shares and shown in percent."""
MOST_NAMES = 30
"""The largest number of class labels for which names and counts are written."""
WORDS = {"validation_accuracy": "accuracy on validation networks", "validation_R2": "R2 on validation networks"}
"""The curves that are plotted next to the loss if the history contains them."""


@of_results
def predictor_page(results: dict[str, Any]) -> str:
    """Return the HTML page for a JSON file of results that `regauge learn predictor` wrote."""
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


def curves_figures(history: Sequence[Mapping[str, Any]], best: int) -> list[Figure]:
    """Return plots of training and validation losses by epoch, and of the score.

    A dot marks the epoch whose net was returned.
    """
    panels = [("loss", {"training": "loss", "validation": "validation_loss"})]
    panels += [(label, {"validation": name}) for name, label in WORDS.items() if name in history[0]]
    return [_curves_figure(history, best, title, names) for title, names in panels]


def scatter_figure(measured: NDArray[np.float64], predicted: NDArray[np.float64], name: str) -> Figure:
    """Return predicted against measured numbers with the line of equality.

    Both axes of the plot have the range of the measured numbers.
    """
    low, high = float(measured.min()), float(measured.max())
    margin = 0.05 * (high - low) or 1.0
    ends = (low - margin, high + margin)
    with draw_figure(4.6, 4.4) as figure:
        axes = figure.add_subplot()
        axes.plot(ends, ends, color=MUTED, linewidth=1)
        size = float(np.clip(4000 / len(measured), 3, 25))
        axes.scatter(measured, np.clip(predicted, *ends), s=size, color=COLORS[1], alpha=0.6, linewidths=0)
        axes.set(xlim=ends, ylim=ends, xlabel=f"{name}, measured", ylabel="predicted")
        axes.set_title(f"{len(measured):,} test networks")
        axes.set_aspect("equal")
        return figure


def confusion_figure(counts: NDArray[np.int64], names: Sequence[str], name: str) -> Figure:
    """Return the confusion matrix: counts of predictions (columns) by class (rows), shaded by shares of the row."""
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    size = float(np.clip(0.42 * len(names) + 1.8, 3.4, 8))
    with draw_figure(size, size) as figure:
        axes = figure.add_subplot()
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.grid(False)
        if len(names) <= MOST_NAMES:
            ticks = range(len(names))
            is_long = max(map(len, names)) > 3
            axes.set_xticks(ticks, names, rotation=90 if is_long else 0)
            axes.set_yticks(ticks, names)
            for row in ticks:
                for column in ticks:
                    if counts[row, column]:
                        color = "white" if shares[row, column] > 0.5 else INK
                        axes.text(
                            column, row, f"{counts[row, column]}", ha="center", va="center", color=color, fontsize=8
                        )
        axes.set(xlabel="predicted", ylabel=f"{name}, measured")
        axes.set_title(f"{counts.sum():,} test networks")
        return figure


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


def _curves_figure(history: Sequence[Mapping[str, Any]], best: int, title: str, names: Mapping[str, str]) -> Figure:
    epochs = [row["epoch"] + 1 for row in history]
    with draw_figure(4.4, 3.3) as figure:
        axes = figure.add_subplot()
        for label, name in names.items():
            values = [row[name] for row in history]
            color = COLORS[label == "training"]
            axes.plot(epochs, values, color=color, linewidth=2, label=label, marker="o" if len(epochs) < 3 else "")
        if title == "loss" and min(min(row[name] for name in names.values()) for row in history) > 0:
            axes.set_yscale("log")
        axes.plot(epochs[best], history[best][names["validation"]], "o", color=INK, markersize=6, zorder=5)
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(names) > 1:
            axes.legend(frameon=False, labelcolor=MUTED)
        return figure
