"""Pages without a browser: tags are closed, pictures have descriptions, and pages support phones and both color
schemes.
"""

import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from page_cases import PAGES, make_pages

import regauge.report

TEMPLATES = Path(regauge.report.__file__).parent / "templates"
EMPTY = {"meta", "link", "img", "br"}
"""Elements without an end tag."""
INLINE = {"p", "h1", "h2", "h3", "figcaption", "code", "strong", "span", "sup", "title"}
"""Elements that contain only text and other inline elements."""
PHONE = 360
"""The width of a phone in pixels."""


class Page(HTMLParser):
    """The elements of a page. An assertion fails if an element is not closed, is closed twice, or is inside of a text
    element.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.inside

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not (self.inside and self.inside[-1] in INLINE and tag not in INLINE | EMPTY), (self.inside, tag)
        assert tag != "p" or not INLINE & {*self.inside}
        # A title in a picture is what a pointer reads there.
        self.elements.append(("tip" if tag == "title" and "svg" in self.inside else tag, dict(attrs)))
        if tag not in EMPTY:
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.inside
        assert self.inside.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]


def _pages(demo: Path, folder: Path) -> Iterator[tuple[str, str]]:
    yield "demo", (demo / "report.html").read_text(encoding="utf-8")
    yield from make_pages(folder)


@pytest.fixture(scope="module")
def pages(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the text of every page by the name of its template."""
    return dict(_pages(demo_folder, tmp_path_factory.mktemp("pages")))


def test_every_page_is_among_them(pages: dict[str, str]) -> None:
    """A new page template needs numbers in `page_cases`."""
    whole = {path.name.partition(".")[0] for path in TEMPLATES.iterdir() if "<!doctype" in path.read_text()}
    assert whole == {*pages} > {*PAGES}


def test_tags_close_and_pictures_have_words(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert text.lstrip().startswith("<!doctype html>"), name
        page = Page(text)
        count = Counter(tag for tag, _ in page.elements)
        assert [count[tag] for tag in ("html", "head", "title", "body", "main", "h1")] == [1] * 6, name
        assert count["script"] == count["iframe"] == 0
        assert page.all("html") == [{"lang": "en"}]
        assert {"charset": "utf-8"} in page.all("meta")
        assert page.all("img") or page.all("svg"), name
        for picture in page.all("svg"):
            assert len((picture["aria-label"] or "").split()) > 2, name
        for picture in page.all("img"):
            assert len((picture["alt"] or "").split()) > 2, (name, picture["alt"])
            assert (picture["src"] or "").startswith("data:image/")
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(ids) == len({*ids}), name


def test_pages_fit_a_phone(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
        assert viewport in Page(text).all("meta"), name
        own = re.sub(r"data:[^\"')]*", "", text)
        fixed = re.findall(r"(?<![-\w])(?:min-)?width\s*[:=]\s*[\"']?([\d.]+)(px|rem|em|)", own)
        assert not [one for one in fixed if float(one[0]) * (1 if one[1] in ("px", "") else 16) > PHONE], (name, fixed)
        assert text.count("<table") == text.count('<div class="scroll"><table'), name


def test_both_schemes_set_every_color(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert "color-scheme: light dark" in text, name
        dark = re.search(r"@media \(prefers-color-scheme: dark\) \{(.*?)\n\}", text, re.S)
        assert dark, name
        colors = re.compile(r"(--[\w-]+): (#\w+)")
        light, other = (dict(colors.findall(part)) for part in (text[: dark.start()], dark[1]))
        assert light.keys() == other.keys(), name
        assert not {*light.items()} & {*other.items()}
        used = set(re.findall(r"var\((--[\w-]+)\)", text))
        assert used <= light.keys(), name
