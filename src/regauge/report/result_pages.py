"""Result files: the numbers as JSON, and the HTML page that shows them."""

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
"""The function that makes the page for each format of results."""


def write_page(results: Mapping[str, Any], page: str | Path) -> Path:
    """Write results as a self-contained HTML page, and their numbers to a file with the same name and suffix `.json`.

    Args:
        results: Results such as `Predictor.results()`. The "format" of the results determines the page.
        page: The path of the page, which must end in `.html`. An existing page and an existing JSON file of the same
            name are replaced.

    Returns:
        The path of the JSON file.

    Raises:
        ValueError: There is no page for the format of the results.
    """
    if results.get("format") not in PAGES:
        raise ValueError(f"there is no page for the format {results.get('format')!r}; there are {', '.join(PAGES)}")
    page = Path(page)
    numbers = page.with_suffix(".json")
    save_text(json.dumps(results, indent=1) + "\n", numbers)
    save_text(PAGES[results["format"]](numbers), page)
    return numbers
