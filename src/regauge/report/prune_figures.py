"""Figures of pruning: units of each group, and the loss, before and after."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from regauge.report.figures import COLORS, abridge, draw_figure

SHOWN = 40
"""Groups that are drawn: the first ones."""


def units_figure(groups: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the share of the kept units of each group, in the order of the network."""
    shown = groups[:SHOWN]
    with draw_figure(4.6, 0.9 + 0.26 * len(shown)) as figure:
        axes = figure.add_subplot()
        shares = [100 * row["after"] / row["before"] for row in shown]
        axes.barh(range(len(shown)), [100.0] * len(shown), color="#e4e4e4", height=0.7)
        axes.barh(range(len(shown)), shares, color=COLORS[0], height=0.7)
        labels = [f"{abridge(row['group'], 24)}  {row['before']} → {row['after']}" for row in shown]
        axes.set_yticks(range(len(shown)), labels)
        axes.invert_yaxis()
        axes.set(xlabel="units that stay (%)", xlim=(0, 100))
        return figure


def losses_figure(losses: Mapping[str, Mapping[str, float]]) -> Figure:
    """Return each metric of the given network, of the network after exact removals, and of the result."""
    metrics = list(next(iter(losses.values())))
    with draw_figure(4.6, 2.4 * len(metrics)) as figure:
        for k, metric in enumerate(metrics):
            axes = figure.add_subplot(len(metrics), 1, k + 1)
            bars = axes.bar(list(losses), [row[metric] for row in losses.values()], color=COLORS[0], width=0.6)
            axes.bar_label(bars, fmt="%.3g", fontsize=9)
            axes.set_title(metric)
            axes.margins(y=0.15)
        return figure
