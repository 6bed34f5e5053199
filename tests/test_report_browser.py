"""The report in a real browser without a network: it opens, every picture is drawn, and there are no errors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import CHROMIUM, DRIVER, REASON, open_browser
from page_cases import make_pages, many_groups

from regauge.report.symmetry_page import symmetry_page

webdriver = pytest.importorskip("selenium.webdriver")

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=REASON)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[webdriver.Chrome]":
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def open_page(browser: "webdriver.Chrome", page: Path, width: int, scheme: str = "light") -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())


def too_wide(browser: "webdriver.Chrome") -> list[str]:
    """Return the elements that extend beyond their box, by their first words."""
    found: list[str] = browser.execute_script(
        """return [...document.querySelectorAll('table, img')]
            .filter(e => e.getBoundingClientRect().right > e.parentElement.getBoundingClientRect().right + 1)
            .map(e => `${e.tagName} ${(e.innerText || e.alt).slice(0, 40)}`)"""
    )
    return found


@pytest.mark.parametrize("width", [1280, 375])
def test_the_report_opens(browser: "webdriver.Chrome", demo_folder: Path, width: int) -> None:
    open_page(browser, demo_folder / "report.html", width)
    assert browser.title == "regauge: MLP and CNN on digits"
    pictures = browser.execute_script(
        "return [...document.images].map(i => [i.complete, i.naturalWidth, i.clientWidth, i.alt])"
    )
    assert len(pictures) == 2 * 2 + (2 + 1) + (2 + 3)
    assert all(complete and natural > 0 and shown > 0 and alt for complete, natural, shown, alt in pictures)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert too_wide(browser) == []
    requests = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith("data:") for name in requests)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")] == []


def test_tables_fit_a_phone_and_a_dark_page_is_dark_but_for_its_pictures(
    browser: "webdriver.Chrome", demo_folder: Path, tmp_path: Path
) -> None:
    color = "return getComputedStyle({}).backgroundColor.match(/[\\d.]+/g).map(Number)"
    for name, text in [*make_pages(tmp_path), ("demo", (demo_folder / "report.html").read_text())]:
        page = tmp_path / f"{name}.html"
        page.write_text(text)
        for scheme, is_dark in (("light", False), ("dark", True)):
            open_page(browser, page, 375, scheme)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 375
            assert too_wide(browser) == []
            assert (max(browser.execute_script(color.format("document.body"))) < 60) == is_dark
            for k in range(browser.execute_script("return document.images.length")):
                assert browser.execute_script(color.format(f"document.images[{k}]")) == [255, 255, 255]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_a_hundred_groups_are_threads_that_light_up(
    browser: "webdriver.Chrome", tmp_path: Path, width: int, scheme: str
) -> None:
    page = tmp_path / "symmetry.html"
    page.write_text(symmetry_page(many_groups(100), "a deep model"))
    open_page(browser, page, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert len(browser.find_elements("css selector", ".thread")) == 100
    # Dots stand in the band of their layer, and every thread is wide enough to be hit.
    off = browser.execute_script(
        """const bands = [...document.querySelectorAll('.net li')].map(e => e.getBoundingClientRect());
        const places = [...document.querySelectorAll('.dot')].map(e => e.getBoundingClientRect());
        return places.filter(p => !bands.some(b => p.top >= b.top && p.bottom <= b.bottom)).length"""
    )
    assert off == 0
    names = browser.find_elements("css selector", ".layer")
    assert [names[0].text, names[-1].text] == ["blocks.0", "blocks.99"]
    assert all(name.size["width"] > 100 for name in names[:3])
    fixed = browser.find_elements("css selector", ".axis.fixed")
    assert [one.get_attribute("title").partition(": ")[2] for one in fixed] == [
        "tied to an input",
        "output of the model",
    ]
    faded = "return [...document.querySelectorAll('.thread')].filter(e => getComputedStyle(e).opacity < 1).length"
    assert browser.execute_script(faded) == 0
    link = next(one for one in browser.find_elements("css selector", "#groups a") if one.text == "h50")
    browser.execute_script("arguments[0].click()", link)
    assert browser.execute_script(faded) == 99
    lit = (
        "return [...document.querySelectorAll('.axis')].filter(e => getComputedStyle(e).outlineStyle == 'solid').length"
    )
    assert browser.execute_script(lit) == 2  # One layer writes these units, and the next one reads them.
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")] == []
