"""Files of results: the numbers as JSON, and the page that shows them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from regauge.checkpoints.writing import save_text
from regauge.report.autoencoder_page import autoencoder_page
from regauge.report.flow_page import flow_page
from regauge.report.predictor_page import predictor_page

PAGES: Mapping[str, Callable[[str | Path], str]] = {
    "regauge.autoencoder": autoencoder_page,
    "regauge.judgement": flow_page,
    "regauge.predictor": predictor_page,
}
"""The page of each format of results."""


def write_page(results: Mapping[str, Any], page: str | Path) -> Path:
    """Write results as a self-contained page, and their numbers to the same name with `.json`.

    Args:
        results: Results such as `Predictor.results()`; their "format" names the page.
        page: The page, `.html`; files of both names are replaced.

    Returns:
        The path of the numbers.

    Raises:
        ValueError: There is no page for this format.
    """
    if results.get("format") not in PAGES:
        raise ValueError(f"there is no page for the format {results.get('format')!r}; there are {', '.join(PAGES)}")
    page = Path(page)
    numbers = page.with_suffix(".json")
    save_text(json.dumps(results, indent=1) + "\n", numbers)
    save_text(PAGES[results["format"]](numbers), page)
    return numbers
