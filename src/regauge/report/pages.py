"""Page templates. A missing value in a template raises an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import UndefinedError

from regauge.checkpoints.plain_files import parse_object
from regauge.core.escaping import escape_lines


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a ValueError that names the file, if the numbers in the file do not fit the page."""
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        ArithmeticError,
        UndefinedError,
    ) as error:
        raise ValueError(
            f"{str(path)!r} does not contain the numbers of this page ({type(error).__name__}: {error}); run the "
            "command that writes it again"
        ) from error


def of_results(make: Callable[[dict[str, Any]], str]) -> Callable[[str | Path], str]:
    """Return a function that makes a page from the path of a JSON file, given a function that makes the page from
    numbers.
    """

    @wraps(make)
    def page(path: str | Path) -> str:
        results = parse_object(Path(path).read_bytes(), Path(path))
        with reading(Path(path)):
            return make(results)

    return page


def page_template(name: str, **filters: Callable[..., str]) -> jinja2.Template:
    """Return a page template from the folder `templates`, with the filters that the template uses."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("regauge.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(name)


def _shown(value: Any) -> Any:
    """Escape invisible characters and characters that change the text direction, in text from files."""
    return escape_lines(value) if type(value) is str else value
