"""The reference of the site lists every public name. The test does not need Sphinx."""

import re
import sys
from pathlib import Path

import pytest
from sources import PUBLIC

from regauge.checkpoints import FORMATS
from regauge.cli.command_help import options_of
from regauge.cli.commands import _flags

DOCS = Path(__file__).parents[1] / "docs"


sys.path.append(str(DOCS))
from generators.api import api_pages  # noqa: E402
from generators.commands import command_pages, commands  # noqa: E402
from generators.formats import format_page  # noqa: E402
from generators.public import class_names  # noqa: E402
from generators.types import TYPES, shorten, types_page  # noqa: E402


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Return the text of every page of public names."""
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


def test_every_option_of_every_command_has_an_entry() -> None:
    found, listed = command_pages(), commands()
    assert len(listed) > 35
    for words, options in listed.items():
        text = found[words.split()[0]].partition(f".. program:: regauge {words}\n")[2].partition(".. program::")[0]
        flags = {"-h", "--help", "--help-all", *re.findall(r"^\.\. option:: .*?(--[a-z-]+)", text, re.M)}
        positional = {f"--{one.name.replace('_', '-')}" for one in options_of(options) if one.is_positional}
        assert {one for one in _flags(options) if one.startswith("--")} <= flags | positional | {"--command"}
        assert not re.search(r"^\.\. option:: .*\n\n   $", text, re.M), f"{words} has an option without a text"


def test_formats_are_those_that_are_read() -> None:
    text = format_page()
    assert all(f"``{ending}``" in text for one in FORMATS.values() for ending in one.suffixes)


def test_signatures_have_short_names_of_types(pages: dict[str, str]) -> None:
    signatures = re.findall(r"^\.\. auto(?:function|class):: [\w.]+(\(.*)", "\n".join(pages.values()), re.M)
    assert len(signatures) > 200
    text = "\n".join(signatures)
    assert all(re.search(rf"\b{short}\b", text) for short in TYPES), "a short name that nothing uses"
    assert all(f".. py:type:: {short}\n" in types_page() for short in TYPES)
    assert not re.search(
        r"\b(?:Union|Optional)\[|Mapping\[str, Tensor\]|/(?:root|home|usr|work)/|_Buffer|ndarray\[tuple", text
    )
    assert max(len(default) for default in re.findall(r" = ('[^']*'|\S+?)[,)]", text)) <= 42
    # Written twice, a signature stays as it is; the path of the library keeps its name.
    known = class_names()
    assert all(shorten(one, known) == one for one in signatures)
    given = "(a: ~typing.Optional[~pathlib.Path], b: regauge.connect.Path, c: ~typing.Union[str, ~pathlib.Path, None])"
    assert shorten(given, known) == "(a: pathlib.Path | None, b: regauge.connect.Path, c: FilePath | None)"
