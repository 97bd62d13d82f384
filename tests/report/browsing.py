"""A real browser without a window, for pages that zerocheck writes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

BROWSER, DRIVER = "chromium", "chromedriver"


class NoBrowser(Exception):
    """There is none here, and why."""


@contextmanager
def browser(*, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """Chromium with a window of that size in pixels. Raises NoBrowser."""
    found = {name: shutil.which(name) for name in (BROWSER, DRIVER)}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise NoBrowser(f"no {' and no '.join(missing)} (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = str(found[BROWSER])
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(found[DRIVER])))
    try:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        yield driver
    finally:
        driver.quit()


def opened(driver: Any, page: Path) -> None:
    """Open a file, offline."""
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    driver.get(page.as_uri())


def complaints(driver: Any) -> list[str]:
    """What the browser wrote to its console, warnings and errors."""
    return [one["message"] for one in driver.get_log("browser")]
