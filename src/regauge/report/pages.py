"""How pages are filled: strictly, so that nothing that a page shows can be missing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2


def read_results(path: str | Path) -> dict[str, Any]:
    """The numbers that a command wrote for its page, a JSON object."""
    results: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return results


def page_template(name: str, **filters: Callable[..., str]) -> jinja2.Template:
    """A page of the folder `templates`, with the filters that it uses."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("regauge.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(name)
