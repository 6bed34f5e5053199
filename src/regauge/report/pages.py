"""How pages are filled: strictly, so that nothing that a page shows can be missing."""

from collections.abc import Callable

import jinja2


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
