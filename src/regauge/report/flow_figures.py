"""Figures of drawn networks: their losses beside others, where they lie among trained ones, and how sure they are."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from regauge.report.figures import COLORS, INK, MUTED, draw_figure


def losses_figure(losses: Mapping[str, Sequence[float]]) -> Figure:
    """The losses of every kind of networks: each network a point, and the median a line; on a logarithmic axis."""
    chance = np.random.default_rng(0)
    with draw_figure(8.4, 0.42 * len(losses) + 1.1) as figure:
        axes = figure.add_subplot()
        for k, (name, values) in enumerate(losses.items()):
            found = np.array(values)
            found = found[np.isfinite(found)]
            color = COLORS[0] if name == "generated" else COLORS[1] if name == "held-out" else MUTED
            heights = k + 0.28 * chance.uniform(-1, 1, len(found))
            axes.scatter(found, heights, s=6, color=color, alpha=0.35, linewidths=0)
            axes.plot([np.median(found)] * 2, [k - 0.38, k + 0.38], color=INK, linewidth=1.6)
        if min(min(values) for values in losses.values()) > 0:
            axes.set_xscale("log")
        axes.set_yticks(range(len(losses)), list(losses))
        axes.invert_yaxis()
        axes.set_xlabel("loss of a network")
        return figure


def places_figure(places: Mapping[str, Sequence[Sequence[float]]], share: float) -> Figure:
    """Training, held-out and generated networks in a plane, with distances to scale."""
    with draw_figure(6.2, 4.6) as figure:
        axes = figure.add_subplot()
        for (name, points), color in zip(places.items(), (MUTED, COLORS[1], COLORS[0]), strict=True):
            x, y = np.array(points).T
            axes.scatter(x, y, s=16, color=color, alpha=0.6, linewidths=0, label=name)
        axes.set_title(f"the plane of {100 * share:.0f}% of the variance")
        axes.set_aspect("equal", adjustable="datalim")
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return figure


def reliability_figure(reliability: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Accuracy against confidence, of single networks and of the average of all; the size is the share of answers."""
    with draw_figure(8.0, 4.0) as figure:
        for place, kind in enumerate(("single", "average")):
            axes = figure.add_subplot(1, 2, place + 1)
            axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1)
            for name, color in (("held-out", COLORS[1]), ("generated", COLORS[0])):
                sure, right, share = np.array(reliability[f"{name}, {kind}"]).T
                axes.plot(sure, right, color=color, linewidth=1.5, label=name)
                axes.scatter(sure, right, s=8 + 160 * share, color=color, alpha=0.7, linewidths=0)
            axes.set(xlabel="confidence", ylabel="accuracy", aspect="equal")
            axes.set_title("single networks" if kind == "single" else "the average of all")
            axes.legend(frameon=False, fontsize=9, loc="upper left")
        return figure
