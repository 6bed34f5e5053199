"""The report of a comparison: a self-contained HTML page from the results of `regauge compare`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regauge.report.comparison_figures import shares_figure, tree_figure
from regauge.report.figures import data_uri, data_uris
from regauge.report.pages import page_template
from regauge.report.population_figures import matrices_figure


def comparison_page(facts: Mapping[str, Any]) -> str:
    """Return the page of two networks.

    Args:
        facts: Verdict, reason, numbers, layers, tensors, tested groups, draws and notes, as in the command's JSON, with
            the names of both networks (`a`, `b`), `seed` and `version`.
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
    """Return the page of many networks.

    Args:
        facts: Pairs, families, trees, names and omissions, as in the command's JSON, with `seed` and `version`.
        matrices: Distances modulo the group of the networks of each architecture.
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
    """Return the page of two implementations of one network.

    Args:
        facts: `TensorMap.facts`, with `rows`, `notes`, the names of both networks (`a`, `b`) and `version`.
    """
    page = page_template("tensor_map.html.j2", digits="{:.2g}".format, sentence=_begin_sentence)
    return page.render(dict(facts))


def _begin_sentence(text: str) -> str:
    """Return a text with a capital letter at its beginning, unless it begins with a name, which has non-letters."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text
