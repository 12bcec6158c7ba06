"""The documentation in a real browser: ``make browser``, which needs Chromium and its driver
(on Debian: ``apt-get install chromium chromium-driver``)."""

import os
import shutil

import pytest

if not os.environ.get("JAXCODED_BROWSER"):
    collect_ignore_glob = ["test_*.py"]

QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=980,1250",
]


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    service = webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver")
    driver = webdriver.Chrome(options, service)
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()
