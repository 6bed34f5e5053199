"""The report on a comparison: figures, and a self-contained HTML page made from the results of `regauge compare`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from regauge.report.figures import COLORS, MUTED, abridge, data_uri, data_uris, draw_figure
from regauge.report.pages import page_template
from regauge.report.population_figures import matrices_figure

LABELED = 80
"""The largest number of layers that are labeled with their names."""


def comparison_page(facts: Mapping[str, Any]) -> str:
    """Return the HTML page of a comparison of two networks.

    Args:
        facts: Verdict, reason, numbers, layers, tensors, tested groups, draws and notes, as in the command's JSON,
            together with the names of both networks (`a`, `b`), `seed` and `version`.
    """
    page = page_template(
        "comparison.html.j2",
        percent=lambda value: "" if value is None else f"{value:.1%}",
        digits="{:.4g}".format,
        thousands="{:,}".format,
        sentence=_begin_sentence,
    )
    figure = data_uri(shares_figure(facts["layers"]), "svg") if facts["layers"] else None
    return page.render(dict(facts) | {"figure": figure})


def lineage_page(facts: Mapping[str, Any], matrices: Mapping[str, NDArray[np.float64]]) -> str:
    """Return the HTML page of a comparison of many networks.

    Args:
        facts: Pairs, families, trees, names and omissions, as in the command's JSON, together with `seed` and
            `version`.
        matrices: For each architecture, the distances modulo the group between its networks.
    """
    page = page_template(
        "lineage.html.j2",
        percent=lambda value: "" if value is None else f"{value:.1%}",
        digits=lambda value: "" if value is None else f"{value:.3g}",
    )
    figures = {
        "matrix": data_uri(matrices_figure(matrices, "distance modulo the group, relative to the norm"), "png"),
        "trees": data_uris([tree_figure(tree) for tree in facts["trees"]]),
    }
    return page.render(dict(facts) | {"figures": figures})


def tensor_map_page(facts: Mapping[str, Any]) -> str:
    """Return the HTML page of a conversion between two implementations of a model.

    Args:
        facts: `TensorMap.facts`, together with `rows`, `notes`, the names of both networks (`a`, `b`) and `version`.
    """
    page = page_template("tensor_map.html.j2", digits="{:.2g}".format, sentence=_begin_sentence)
    return page.render(dict(facts))


def shares_figure(layers: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the explained share of each layer, as stored and after alignment. Layers are listed from top to bottom."""
    count = len(layers)
    is_labeled = count <= LABELED
    with draw_figure(5.6, 0.9 + (0.24 if is_labeled else 0.06) * count) as figure:
        axes = figure.add_subplot()
        rows = range(count)
        before, after = ([100 * layer[key] for layer in layers] for key in ("before", "after"))
        axes.barh(rows, after, height=0.72, color=COLORS[1], label="after alignment")
        axes.barh(rows, before, height=0.28, color=COLORS[0], label="as stored")
        axes.set_xlim(0, 100)
        axes.set_ylim(count - 0.4, -0.6)
        labels = [abridge(layer["layer"]) for layer in layers] if is_labeled else []
        axes.set_yticks(range(len(labels)), labels)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("share of the layer of A that B explains (%)", color=MUTED, loc="right")
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
    return figure


def tree_figure(branches: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a figure of a tree, with branches from left to right, drawn to scale, and network names at the leaves.

    Uncertain branches are dotted.
    """
    children: dict[str, list[Mapping[str, Any]]] = {}
    for branch in branches:
        children.setdefault(branch["parent"], []).append(branch)
    root = branches[-1]["parent"]
    places: dict[str, tuple[float, float]] = {}
    rows = 0

    def place(name: str, x: float) -> None:
        nonlocal rows
        own = sorted(children.get(name, []), key=lambda branch: branch["length"])
        if not own or not name.startswith("ancestor "):
            places[name], rows = (x, rows), rows + 1
        for branch in own:
            place(branch["child"], x + branch["length"])
        if name not in places:
            places[name] = x, sum(places[branch["child"]][1] for branch in own) / len(own)

    place(root, 0.0)
    with draw_figure(5.6, 0.9 + 0.32 * rows) as figure:
        axes = figure.add_subplot()
        for branch in branches:
            (x, y), (end, level) = places[branch["parent"]], places[branch["child"]]
            style = "-" if branch.get("is_certain", True) else ":"
            axes.plot([x, x, end], [y, level, level], style, color=COLORS[1], linewidth=1.8, solid_joinstyle="round")
        for name, (x, y) in places.items():
            if not name.startswith("ancestor "):
                axes.plot([x], [y], "o", color=COLORS[0], markersize=5)
                axes.annotate(abridge(name, 44), (x, y), xytext=(7, 0), textcoords="offset points", va="center")
        axes.set_ylim(rows - 0.5, -0.5)
        end = max(x for x, _ in places.values()) or 1.0
        axes.set_xlim(-0.02 * end, 1.55 * end)  # names are drawn to the right of their networks
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("squared distance modulo the group, relative to the norm", color=MUTED, loc="left")
    return figure


def _begin_sentence(text: str) -> str:
    """Return a text with a capital first letter.

    If the first word contains characters that are not letters, the text is not changed.
    """
    return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text
