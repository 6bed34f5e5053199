"""Settings of the site: `make docs` builds it into docs/_build/html, without a network."""

import os
import re
import sys
from operator import attrgetter
from pathlib import Path

from docutils import nodes
from jupyter_client.manager import KernelManager
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc import Documenter, FunctionDocumenter
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import regauge
from regauge.names import VERSION

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from generators.api import api_pages, write  # noqa: E402
from generators.commands import command_pages  # noqa: E402
from generators.formats import format_page  # noqa: E402
from generators.public import class_names, public  # noqa: E402
from generators.types import TYPES, shorten, types_page  # noqa: E402

project = "regauge"
author = "The regauge developers"
copyright = author
version = release = VERSION

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "generators"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", ".*")
]  # types of torch and names within the library; `link_names` checks public names
default_role = "literal"
smartquotes = False  # options keep their two hyphens, and quoted values their quotes
python_maximum_signature_line_length = 100
python_display_short_literal_types = True
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_attr_annotations = False
python_use_unqualified_type_names = True
napoleon_use_rtype = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# Else each kernel prints a warning that it talks in the clear.
KernelManager.transport_encryption.default_value = "auto"
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-dark"
html_title = f"regauge {VERSION}"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["phone.css"]
WIDE = 650
"""Pixels from which on a picture scrolls on phones."""

LOG = logging.getLogger("regauge")
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
        app.env.note_dependency(str(file))
        text = file.read_text(encoding="utf-8")
        return rebase(text.partition(f"\n{block[2]}\n")[0] if block[2] else text, file, page)

    text = rebase(source[0], page, page)
    source[0] = re.sub(r":::\{include\} (\S+)\n(?::end-before: (.*)\n)?:::", include, text)


def read_docstring(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Mark indented code as code, and take bars and stars of sentences for what they are."""
    is_code = is_section = False
    written: list[str] = []
    for line in lines:
        is_section |= bool(re.match(r"(Args|Attributes|Raises|Returns|Yields|References):$", line))
        is_indented = line.startswith("    ") and not is_section
        if is_indented and not is_code and not "".join(written[-1:]).strip():
            written += [".. code-block:: python", ""]
            is_code = True
        is_code &= is_indented or not line.strip()
        parts = line.split("`")
        if not is_code:
            parts[::2] = [re.sub(r"[|*]", r"\\\g<0>", part) for part in parts[::2]]
        written.append("`".join(parts))
    lines[:] = written


KNOWN = class_names()


def shorten_types(
    app: Sphinx, what: str, name: str, found: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Write short names for the types of a signature."""
    return signature and shorten(signature, KNOWN), returned and shorten(returned, KNOWN)


def lead_to_types(app: Sphinx, env: BuildEnvironment, node: nodes.Element, content: nodes.Node) -> nodes.Node | None:
    """Let a short name of a type lead to the page that explains it."""
    target = node["reftarget"]
    return make_refnode(app.builder, node["refdoc"], "reference/types", target, content) if target in TYPES else None


def add_other_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Let every further public name of an object lead to its page."""
    known = env.get_domain("py").objects
    for one in public():
        for name in one.others:
            if one.name in known:
                known[name] = known[one.name]._replace(aliased=True)


class WholeFunction(FunctionDocumenter):
    """Documents a function with the signature that a page gives, not with those of its overloads."""

    def format_signature(self, **kwargs: object) -> str:
        return (
            Documenter.format_signature(self, **kwargs) if self.args is not None else super().format_signature(**kwargs)
        )


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Let code that is a public name lead to its page; warn of names that do not exist."""
    known = app.env.get_domain("py").objects
    shorts = {
        name.rpartition(".")[2]: name for name in known if name.count(".") < 3 and name.rpartition(".")[2][0].isupper()
    }
    for node in list(doctree.findall(nodes.literal)):
        code = re.match(r"(rg\.|regauge\.)?([A-Za-z_][\w.]*)(?:\(.*)?$", node.astext())
        if not code or isinstance(node.parent, nodes.reference | nodes.title | nodes.term):
            continue
        name = f"regauge.{code[2]}"
        if code[1] == "rg." and name not in known:
            try:
                attrgetter(code[2])(regauge)
            except AttributeError:
                LOG.warning("there is no name %s", node.astext(), location=node, type="names")
        if not code[1] and code[2][0].isupper():
            first, _, rest = code[2].partition(".")
            name = ".".join(filter(None, (shorts.get(first), rest)))
        if name in known and known[name].docname != docname:
            place = known[name]
            node.replace_self(make_refnode(app.builder, docname, place.docname, place.node_id, node.deepcopy(), name))


def mark_wide_pictures(app: Sphinx, doctree: nodes.document) -> None:
    """Give a class to pictures whose letters would be too small on a phone; PNG keeps the width in bytes 16 to 20."""
    for image in doctree.findall(nodes.image):
        file = DOCS / image["uri"]
        if file.suffix == ".png" and int.from_bytes(file.read_bytes()[16:20], "big") > WIDE:
            image["classes"].append("wide")


def write_pages(app: Sphinx) -> None:
    """Write the pages that are made from the library."""
    write(DOCS / "reference" / "api", api_pages())
    write(DOCS / "reference" / "commands", command_pages())
    write(DOCS / "reference", {"formats": format_page(), "types": types_page()})


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("missing-reference", lead_to_types)
    app.add_autodocumenter(WholeFunction, override=True)
    app.connect("doctree-read", mark_wide_pictures)
    app.connect("doctree-resolved", link_names)
    app.connect("env-updated", add_other_names)
    app.connect("source-read", read_page)
