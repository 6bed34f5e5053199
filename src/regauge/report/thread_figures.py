"""A figure of a model's symmetry, in which layers are bands, and groups are threads across the bands."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from regauge.core.groups import Frozen, Group
from regauge.report.figures import COLORS, INK, MISSING, MUTED, draw_figure
from regauge.report.thread_layout import lay_out

THREADS = 7
"""The colors of threads. Gray is used for frozen axes."""
FEW = 60
"""The largest number of layers for which the text of the figure is large."""
WORDS = 64
"""The largest number of letters in the text that lists the groups whose threads begin at a layer."""


def threads_figure(
    groups: Sequence[Group],
    shapes: Mapping[str, tuple[int, ...]],
    frozen: Sequence[Frozen],
    readers: Collection[tuple[str, int]],
) -> Figure:
    """Plot a layer in each row and a group in each color.

    Full dots mark layers that compute a group's units, and rings mark layers that read the units. Gray squares mark
    layers with an axis on which no group acts. The names of groups are written where their threads begin.
    """
    layout = lay_out(groups, shapes, frozen, readers)
    count, lanes = len(layout.bands), layout.lanes
    size = 9.0 if count <= FEW else 5.5
    step = 0.027 * size
    names = [band.name or "model" for band in layout.bands]
    beginning: dict[int, list[int]] = {}
    for k, thread in enumerate(layout.threads):
        beginning.setdefault(thread.ends[0], []).append(k)
    words = {row: _name([layout.threads[k].group for k in own]) for row, own in beginning.items()}
    reach = 0.0076 * size
    room = reach * max(map(len, words.values()), default=0)
    width = reach * max(map(len, names), default=0) + step * (lanes + 3) + room
    with draw_figure(max(5.0, width), 0.9 + step * count) as figure:
        axes = figure.add_subplot()
        for row in range(1, count, 2):
            axes.axhspan(row - 0.5, row + 0.5, color="#f6f7f9", linewidth=0)
        pinned = [row for row, band in enumerate(layout.bands) if band.is_pinned]
        dot = 0.55 * size
        axes.plot([-1] * len(pinned), pinned, "s", color=MISSING, markersize=dot)
        for k, thread in enumerate(layout.threads):
            color = COLORS[k % THREADS]
            is_matrix = thread.group.matrix != "none" or thread.group.behind_gains != "none"
            axes.plot([thread.lane] * 2, thread.ends, color=color, linewidth=0.3 * size if is_matrix else 0.15 * size)
            for is_read, face in ((True, "white"), (False, color)):
                rows = [mark.band for mark in thread.marks if mark.is_read == is_read]
                style: Any = {
                    "color": color,
                    "markerfacecolor": face,
                    "markersize": dot,
                    "markeredgewidth": 0.13 * size,
                }
                axes.plot([thread.lane] * len(rows), rows, "o", **style)
        for row, own in beginning.items():
            color = COLORS[own[0] % THREADS] if len(own) == 1 else INK
            axes.text(lanes, row, words[row], fontsize=size, color=color, va="center")
        axes.set_yticks(range(count), names, fontsize=size)
        axes.set(xlim=(-1.7, lanes + room / step + 0.5), ylim=(count - 0.4, -0.6), xticks=[])
        axes.grid(visible=False)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_title(f"{len(groups)} groups in {count} layers")
        caption = "full: writes the units; ring: reads them; thick: rotation or matrix; gray: a frozen axis"
        figure.text(0.01, 0.0, caption, fontsize=min(size, 8), color=MUTED, va="bottom")
        axes.set_xlabel(" ")
        return figure


def _name(groups: Sequence[Group]) -> str:
    """Return the names and kinds of the groups that begin at a layer, as many as fit."""
    parts = [f"{group.name} ({group.kind})" for group in groups]
    shown = [part for k, part in enumerate(parts) if len(", ".join(parts[: k + 1])) <= WORDS]
    if not shown:
        return f"{parts[0][: WORDS - 1]}…" + (f", {len(parts) - 1} more" if len(parts) > 1 else "")
    return ", ".join(shown) + (f", {len(parts) - len(shown)} more" if len(shown) < len(parts) else "")
