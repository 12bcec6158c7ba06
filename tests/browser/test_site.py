"""Every page of the built site loads completely, and only from the site's server."""

import functools
import http.server
import pathlib
import threading

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

SITE = pathlib.Path(__file__).parents[2] / "build" / "site"
PAGES = sorted(
    page.relative_to(SITE).as_posix()
    for page in SITE.rglob("*.html")
    if "files/" not in page.as_posix() and page.name != "404.html"
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_there_are_pages():
    assert {"index.html", "trust.html", "round.html", "recovery.html"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_page(browser, server, page):
    browser.get(f"{server}/{page}")
    asked = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert all(name.startswith(server) for name in asked)
    broken = browser.execute_script(
        "return [...document.images].filter((i) => !i.naturalWidth).map((i) => i.src)"
    )
    assert broken == []
    assert browser.find_element(By.TAG_NAME, "h1").text
    texts = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert texts == []


@pytest.mark.parametrize("by", ["server", "files"])
def test_search(browser, server, by):
    start = server if by == "server" else SITE.as_uri()
    browser.get(f"{start}/index.html")
    browser.execute_script("document.querySelector('[for=__search]').click()")
    browser.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]").send_keys(
        "amplification"
    )
    found = WebDriverWait(browser, 60).until(
        lambda _: browser.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
    )
    links = [link.get_attribute("href") for link in found]
    assert any("codes.html" in link for link in links)


def test_no_marks_of_doctests():
    for page in PAGES:
        text = (SITE / page).read_text(encoding="utf-8")
        assert "&lt;BLANKLINE&gt;" not in text and "<BLANKLINE>" not in text
