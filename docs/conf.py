"""Settings of the site: `make docs` builds it into docs/_build/html, without a network."""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

from regauge.names import VERSION

project = "regauge"
author = "The regauge developers"
copyright = author
version = release = VERSION

extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-dark"
html_title = f"regauge {VERSION}"
html_show_sphinx = False
html_copy_source = False

DOCS = Path(__file__).parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "papers/README.md": "papers.md",
}
"""Files outside docs/, and the pages of the site that include them."""


def rebase(text: str, file: Path, page: Path) -> str:
    """The text of a file with its links rewritten for a page; files that pages include become these pages."""

    def lead(link: re.Match[str]) -> str:
        if "://" in link[1] or not link[1]:
            return link[0]
        place = (file.parent / link[1]).resolve()
        inside = PAGES.get(os.path.relpath(place, DOCS.parent))
        return f"]({os.path.relpath(DOCS / inside if inside else place, page.parent)}"

    return re.sub(r"\]\(([^)#\s]*)", lead, text)


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put in the files that a page includes, up to the line that it names, and lead links to pages of the site."""
    page = DOCS / f"{docname}.md"

    def include(block: re.Match[str]) -> str:
        file = (page.parent / block[1]).resolve()
        text = file.read_text(encoding="utf-8")
        return rebase(text.partition(f"\n{block[2]}\n")[0] if block[2] else text, file, page)

    text = rebase(source[0], page, page)
    source[0] = re.sub(r":::\{include\} (\S+)\n(?::end-before: (.*)\n)?:::", include, text)


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_page)
