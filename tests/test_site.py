"""The site is built without a warning, loads nothing from other hosts, fits phones, and a search for `align` finds its
page.

The folder `REGAUGE_SITE` contains the pages. `make docs-test` builds them, and treats warnings as errors.
"""

import functools
import os
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from chromium import CHROMIUM, DRIVER, REASON, open_browser

if "REGAUGE_SITE" not in os.environ:
    pytest.skip("the site is built and looked at by `make docs-test`", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver")

ROOT = Path(__file__).parents[1]
in_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=REASON)
PAGES = ("index", "howto", "gallery", "reference/api/regauge.align", "reference/commands/merge", "measurements/flows")


@pytest.fixture(scope="module")
def site() -> Path:
    """Return the folder of the built pages."""
    return ROOT / os.environ["REGAUGE_SITE"]


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Return the address on this machine at which the pages are served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[webdriver.Chrome]":
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        driver.implicitly_wait(120)  # The search loads its index, and on a busy machine that takes a while.
        yield driver


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 500
    loaded = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=\"(?:https?:)?//|<link[^>]*\shref=\"(?:https?:)?//")
    assert [page.name for page in pages if loaded.search(page.read_text(encoding="utf-8"))] == []


def test_notebooks_ran_and_can_be_downloaded(site: Path) -> None:
    page = (site / "tutorials.html").read_text(encoding="utf-8")
    links = re.findall(r'href="(_downloads/[^"]*\.ipynb)"', page)
    assert len(links) == 2
    assert all('"output_type"' in (site / link).read_text(encoding="utf-8") for link in links)


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_pages_fit_a_screen_and_a_phone(browser: "webdriver.Chrome", address: str, width: int, scheme: str) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for page in PAGES:
        browser.get(f"{address}/{page}.html")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page
        color = browser.execute_script(
            "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        )
        assert (max(color) < 60) == (scheme == "dark"), page
        broken = "return [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        assert browser.execute_script(broken) == [], page
    complaints = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in complaints if "favicon.ico" not in message] == []


@in_browser
def test_a_search_for_align_leads_to_its_page(browser: "webdriver.Chrome", address: str) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    browser.get(f"{address}/index.html")
    box = browser.find_element("css selector", "input.sidebar-search")
    box.send_keys("align\n")
    browser.find_element("link text", "regauge.align").click()
    assert browser.current_url.partition("#")[0].partition("?")[0] == f"{address}/reference/api/regauge.align.html"
    assert "regauge.align" in browser.find_element("tag name", "h1").text
