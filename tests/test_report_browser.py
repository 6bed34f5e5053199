"""The report in a real browser, without a network: it opens, every picture is drawn, nothing complains."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import CHROMIUM, DRIVER, REASON, open_browser
from page_cases import make_pages

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
    """What reaches beyond the box that it stands in, by its first words."""
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
            assert browser.execute_script(color.format("document.images[0]")) == [255, 255, 255]
