"""The reference of the site lists every public name; this needs no Sphinx."""

import re
import sys
from pathlib import Path

import pytest
from sources import PUBLIC

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The text of every page of public names."""
    sys.path.insert(0, str(DOCS))
    try:
        from generators.api import api_pages
    finally:
        sys.path.remove(str(DOCS))
    return api_pages()


def test_every_public_name_has_an_entry(pages: dict[str, str]) -> None:
    text = "\n".join(pages.values())
    entries = re.findall(r"^\.\. (?:autofunction|autoclass|automodule|py:data|py:module):: ([\w.]+)", text, re.M)
    others = re.findall(r"^Also ``([\w.]+)``\.$", text, re.M)
    packages = {"regauge", "regauge.data", "regauge.nets", "regauge.report"}  # the last three are no names of `regauge`
    assert set(entries) | set(others) == PUBLIC | packages
    assert len(entries) == len(set(entries))


def test_every_entry_is_reached_from_the_page_of_its_package(pages: dict[str, str]) -> None:
    links = {package: set(re.findall(r":doc:`\w+ <([\w.-]+)>`", text)) for package, text in pages.items()}
    reference = (DOCS / "reference.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^reference/api/([\w.]+)$", reference, re.M))
    assert {name for name, text in pages.items() if ":orphan:" not in text} == listed
    assert set().union(*(links[package] for package in listed)) | listed == set(pages)


def test_every_entry_has_a_text(pages: dict[str, str]) -> None:
    rows = [row for text in pages.values() for row in re.findall(r":doc:`(.*)`\n     - ?(.*)", text)]
    assert len(rows) > 460
    assert [name for name, text in rows if not text] == []
