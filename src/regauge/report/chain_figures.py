"""Figures of Markov chains: R-hat and effective sample sizes of all entries."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from regauge.report.figures import COLORS, draw_figure

LEAST = 1e-4
"""The smallest excess of R-hat over one that is plotted. Smaller excesses are plotted at `LEAST`."""


def chains_figure(
    rhat: Mapping[str, NDArray[np.float64]], ess: Mapping[str, NDArray[np.float64]], converged: float
) -> Figure:
    """Plot, for groups of entries, the share of entries up to each R-hat and above each effective sample size.

    Args:
        rhat: The R-hat of the entries of each group, with the name in the legend as key.
        ess: The effective sample sizes of the entries of each group, with the name in the legend as key.
        converged: The largest R-hat of converged chains, which is marked by a line.
    """
    with draw_figure(7.2, 3.4) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for k, name in enumerate(rhat):
            style: dict[str, Any] = {"color": COLORS[k], "linewidth": 2}
            excess = np.sort(np.maximum(rhat[name] - 1, LEAST))
            shares = 100 * np.arange(1, len(excess) + 1) / max(1, len(excess))
            left.step(excess, shares, where="post", label=name, **style)
            right.step(np.sort(ess[name]), shares[::-1], where="post", **style)
        left.axvline(converged - 1, color=COLORS[5], linewidth=1, linestyle=":")
        left.set(xscale="log", xlabel="R-hat", ylabel="share of entries (%)", title="up to this R-hat", ylim=(0, 101))
        left.xaxis.set_major_formatter(lambda value, _: f"{1 + value:.4g}")
        right.set(xscale="log", xlabel="bulk effective sample size", title="from this size on")
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        return figure
