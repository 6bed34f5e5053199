"""A real browser for tests of pages, without a network."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium import webdriver

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
REASON = "needs chromium and chromedriver (Debian: chromium chromium-driver)"


@contextmanager
def open_browser(profile: Path) -> "Iterator[webdriver.Chrome]":
    """Open Chromium with a separate profile, which can reach only this machine."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(str(DRIVER), env={**os.environ, "NO_PROXY": "*"})
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()
