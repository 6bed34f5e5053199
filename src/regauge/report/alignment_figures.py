"""Figures of alignments: the share of each group that an element changes."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from regauge.report.figures import COLORS, abridge, draw_figure

WORDS = {"moved": "units in another place", "flipped": "signs flipped", "turned": "rotated; 100: as far as at random"}
"""The legend text for each share, by column name."""
FEW = 40
"""The largest number of groups for which the text of a figure has the usual size. With more groups, the text is
smaller."""
LABELED = 240
"""The largest number of groups that are labeled with their names."""


def moves_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the shares of each group that an element changes, in network order, and the factors of its scales.

    Args:
        rows: The rows of `Result.moves`: "group", "units", shares (None if a group has no such part), and "low" and
            "high". Nine in ten factors lie between "low" and "high".
    """
    scaled = [(k, row["low"], row["high"]) for k, row in enumerate(rows) if row["low"] is not None]
    has_scales = any(not low == high == 1 for _, low, high in scaled)
    height, size = (0.26, 9.0) if len(rows) <= FEW else (0.13, 6.0) if len(rows) <= LABELED else (0.05, 6.0)
    with draw_figure(7.2 if has_scales else 5.2, 1.3 + height * len(rows)) as figure:
        grid: Any = {"width_ratios": [3, 2]} if has_scales else {}
        first, *others = figure.subplots(1, 1 + has_scales, squeeze=False, sharey=True, gridspec_kw=grid)[0]
        for k, row in enumerate(rows):
            known = [name for name in WORDS if row[name] is not None]
            for j, name in enumerate(known):
                thick = 0.8 / len(known)
                where = k + (j - (len(known) - 1) / 2) * thick
                first.barh(where, 100 * row[name], height=0.9 * thick, color=COLORS[1 + [*WORDS].index(name)])
        shown = [name for name in WORDS if any(row[name] for row in rows)]
        for name in shown:
            first.barh(0, 0, color=COLORS[1 + [*WORDS].index(name)], label=WORDS[name])
        first.set(xlim=(0, 100), xlabel="share (%)", title="what moved" if shown else "no unit moved")
        labels = [f"{abridge(row['group'], 30)} ({row['units']})" for row in rows] if len(rows) <= LABELED else []
        first.set_yticks(range(len(labels)), labels, fontsize=size)
        first.set_ylim(len(rows) - 0.4, -0.6)
        for axes in others:
            places, low, high = ([part[k] for part in scaled] for k in range(3))
            axes.hlines(places, low, high, color=COLORS[0], linewidth=3)
            axes.plot([*low, *high], [*places, *places], "|", color=COLORS[0], markersize=5)
            axes.axvline(1, color=COLORS[5], linewidth=1, linestyle=":")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
            axes.set(xlabel="nine in ten factors", title="scales")
        for axes in (first, *others):
            axes.grid(visible=False, axis="y")
        if shown:
            figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)
        return figure
