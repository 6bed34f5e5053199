"""The report in a real browser, without a network: it opens, every picture is drawn, nothing complains."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

webdriver = pytest.importorskip("selenium.webdriver")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver (Debian: chromium chromium-driver)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[webdriver.Chrome]":
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(str(DRIVER), env={**os.environ, "NO_PROXY": "*"})
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.mark.parametrize("width", [1280, 400])
def test_the_report_opens(browser: "webdriver.Chrome", demo_folder: Path, width: int) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    browser.get((demo_folder / "report.html").as_uri())
    assert browser.title == "regauge: MLP and CNN on digits"
    pictures = browser.execute_script(
        "return [...document.images].map(i => [i.complete, i.naturalWidth, i.clientWidth, i.alt])"
    )
    assert len(pictures) == 2 * 3 + 2 + 3
    assert all(complete and natural > 0 and shown > 0 and alt for complete, natural, shown, alt in pictures)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    requests = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith("data:") for name in requests)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")] == []
