"""The pages of public names: one for each package, which lists its names, and one for each name."""

import inspect
import re
from importlib import import_module
from pathlib import Path

from generators.public import Public, class_names, packages, public
from generators.types import shorten

KINDS = {"function": "Functions", "class": "Classes", "data": "Tables and types", "package": "Packages"}
LONGEST = 40
"""Letters of a default; longer ones, such as the environment, are left out."""


def page_of(one: Public, taken: set[str]) -> str:
    """The file name of a name's page without its ending; classes give way where names differ in their case alone."""
    lowered = {name.lower() for name in taken if name != one.name}
    return one.name if one.name.lower() not in lowered or one.kind != "class" else f"{one.name}-class"


def heading(text: str, mark: str = "=") -> str:
    """A heading in reStructuredText."""
    return f"{text}\n{mark * len(text)}\n"


def signature_of(one: Public, known: dict[str, str]) -> str:
    """The arguments of a function or class on one line, with types and defaults as a reader would write them.

    `known` has the public name of a class by its module and name.
    """
    signature = inspect.signature(one.value)
    parts = []
    for parameter in signature.parameters.values():
        default = parameter.default
        is_written = default is parameter.empty or (
            len(repr(default)) <= LONGEST and not re.search("[<>]", repr(default))
        )
        parts.append(parameter if is_written else parameter.replace(default=...))
    text = re.sub(r"= ?(?:Ellipsis)", "= ...", str(signature.replace(parameters=parts)))
    text = shorten(text, known)
    return text.removesuffix(" -> None") if one.kind == "class" else text


def entry(one: Public, known: dict[str, str]) -> str:
    """The page of a name: signature, docstring, methods, and its further names.

    It stands in no list of contents, which would take minutes to build with hundreds of names.
    """
    title = heading(f"``{one.name}``")
    also = [f"Also ``{name}``." for name in one.others]
    if one.kind == "data":
        body = [f".. py:data:: {one.name}", "", *(f"   {line}".rstrip() for line in one.text.splitlines())]
    elif one.kind == "package":
        body = [f".. automodule:: {one.name}", "   :members:"]
    elif one.kind == "function":
        body = [f".. autofunction:: {one.name}{signature_of(one, known)}"]
    else:
        is_called = one.value.__init__ is not object.__init__ and not issubclass(one.value, dict | Exception)
        body = [f".. autoclass:: {one.name}{signature_of(one, known) if is_called else ''}", "   :members:"]
    place = f"In :doc:`{one.package}`."
    return "\n".join([":orphan:", "", title, place, "", *body, "", *also, ""])


def package_page(package: str, names: list[Public], pages: dict[str, str]) -> str:
    """The page of a package: its docstring, and a table of its names, which leads to their pages."""
    text = inspect.getdoc(import_module(package)) or ""
    lines = [heading(f"``{package}``"), f".. py:module:: {package}", "", text, ""]
    for kind, title in KINDS.items():
        rows = [one for one in names if one.kind == kind]
        if rows:
            lines += [heading(title, "-"), ".. list-table::", "   :widths: 30 70", ""]
            for one in rows:
                lines += [f"   * - :doc:`{one.short} <{pages[one.name]}>`", f"     - {one.summary}"]
            lines.append("")
    return "\n".join(lines)


def api_pages() -> dict[str, str]:
    """The text of every page of public names by its file name without ending; `index` lists the packages."""
    found = public()
    taken = {one.name for one in found}
    pages = {one.name: one.name if one.kind == "package" else page_of(one, taken) for one in found}
    known = class_names()
    texts = {pages[one.name]: entry(one, known) for one in found if one.name not in packages()}
    for package in packages():
        listed = [one for one in found if package in {name.rpartition(".")[0] for name in (one.name, *one.others)}]
        texts[package] = package_page(package, sorted(listed, key=lambda one: one.short.lower()), pages)
    return texts


def write(folder: Path, texts: dict[str, str]) -> None:
    """Write pages into a folder and remove others; pages that stay the same are left as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.rst"):
        if path.stem not in texts:
            path.unlink()
    for name, text in texts.items():
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
