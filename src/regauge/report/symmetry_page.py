"""The page of a symmetry. In the picture, layers are bands, groups are colored threads across the bands, and frozen
axes are gray."""

from typing import Any

from regauge.core.counted import count
from regauge.core.symmetry import Symmetry
from regauge.core.symmetry_text import name_families
from regauge.report.pages import page_template
from regauge.report.thread_figures import THREADS
from regauge.report.thread_layout import ThreadLayout, lay_out

LANE, BAND, LEFT = 16, 46, 30
"""Distances in pixels: between two lanes, between two layers, and to the left of the first lane."""


def symmetry_page(symmetry: Symmetry, model: str) -> str:
    """Return the self-contained HTML page of a symmetry.

    If the reader points at a thread, or follows the link of a group, the page highlights the group's thread and all
    axes on which the group acts. If the reader points at a frozen axis, the page shows the reason. A list below
    contains all reasons.

    Args:
        symmetry: A symmetry, with or without known sizes.
        model: The name of the model, which the page shows.
    """
    layout = lay_out(symmetry.groups, symmetry.shapes, symmetry.frozen, symmetry.readers)
    numbers = {thread.group.name: k for k, thread in enumerate(layout.threads)}
    rows = [
        {
            "name": group.name,
            "number": numbers.get(group.name),
            "color": numbers.get(group.name, 0) % THREADS,
            "kind": group.kind,
            "size": group.size,
            "copies": symmetry.count_copies(group.name),
            "families": name_families(group),
            "axes": len({(place.parameter, place.axis) for place in group.placements}),
        }
        for group in symmetry.groups
    ]
    reasons: dict[str, list[str]] = {}
    for row in symmetry.frozen:
        reasons.setdefault(row.reason, []).append(f"{row.parameter}[{row.axis}]")
    axes = [axis for band in layout.bands for axis in band.axes]
    return page_template("symmetry.html.j2", count=count, exponent="{:,.1f}".format).render(
        model=model,
        symmetry=symmetry,
        rows=rows,
        threads=_threads(layout),
        bands=layout.bands,
        reasons=reasons,
        moved=sum(bool(axis.threads) for axis in axes),
        axes=len(axes),
        width=LEFT + LANE * layout.lanes,
        height=BAND * len(layout.bands),
        band=BAND,
        colors=THREADS,
    )


def _threads(layout: ThreadLayout) -> list[dict[str, Any]]:
    """Return the lines and dots of the threads, in pixels."""
    found = []
    for k, thread in enumerate(layout.threads):
        group = thread.group
        where = ", ".join(f"{mark.parameter}[{mark.axis}]" for mark in thread.marks)
        found.append(
            {
                "number": k,
                "color": k % THREADS,
                "x": LEFT + LANE * thread.lane,
                "top": BAND * thread.ends[0] + BAND // 2,
                "bottom": BAND * thread.ends[1] + BAND // 2,
                "is_thick": group.matrix != "none" or group.behind_gains != "none",
                "told": f"{group.name}: {group.kind}, {count(range(group.size), 'unit')} "
                f"({name_families(group)}), on {where}",
                "dots": [
                    {"y": BAND * band + BAND // 2, "is_read": all(m.is_read for m in thread.marks if m.band == band)}
                    for band in dict.fromkeys(mark.band for mark in thread.marks)
                ],
            }
        )
    return found
