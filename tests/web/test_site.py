"""The built documentation site in a real browser: 40 questions of newcomers, in four views."""

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from test_browser import browser

__all__ = ["browser"]

ROOT = Path(__file__).resolve().parents[2]
DRAWINGS = ROOT / "docs"
SITE = ROOT / "build" / "site"
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="`make docs` builds the site")

# Words typed into the search box, and the pages of which one must be the first hit.
QUESTIONS = {
    "torch": ("first-hour", "compat", "index", "trainer", "faq"),
    "transfer": ("weights", "gains", "vllm"),
    "weights to vLLM": ("weights", "vllm"),
    "vllm": ("vllm", "weights"),
    "sglang": ("weights",),
    "install": ("index", "first-hour"),
    "getting started": ("first-hour",),
    "quickstart": ("first-hour",),
    "resume after a kill": ("faq", "first-hour"),
    "kill -9": ("first-hour", "reliability", "faq", "index"),
    "BusFullError": ("errors", "api/errors"),
    "CapacityError": ("errors", "api/errors"),
    "StallError": ("errors", "api/errors"),
    "bus is full": ("errors", "tuning", "operating"),
    "how much /dev/shm": ("faq", "tuning"),
    "kubernetes": ("faq", "operating"),
    "slurm": ("faq", "relay", "operating"),
    "docker": ("faq", "operating", "errors"),
    "ray": ("relay", "faq"),
    "why not ray": ("faq",),
    "two runs on one machine": ("faq",),
    "daemon or embedded": ("faq", "operating"),
    "reboot": ("faq", "reliability"),
    "prometheus metrics": ("operating", "page"),
    "multi node": ("relay",),
    "stale samples": ("trainer", "operating"),
    "zero variance": ("trainer",),
    "reward model": ("trainer",),
    "reference model": ("trainer",),
    "exactly once": ("reliability",),
    "segfault": ("errors",),
    "timeout": ("trainer", "operating"),
    "pause producers": ("operating",),
    "backpressure": ("operating",),
    "group_size": ("trainer", "index", "schema", "first-hour"),
    "importance sampling": ("trainer", "api/objectives"),
    "tool calls": ("agents",),
    "openai endpoint": ("agents", "index"),
    "lora": ("weights",),
    "trl": ("adapters/trl",),
}
COUNT = "document.querySelector('.md-search-result__meta').textContent"
EMPTY = f"!/document/.test({COUNT})"
ANSWERED = f"/document/.test({COUNT})"
VIEWS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.endswith("/versions.json"):
                return super().do_GET()
            self.send_response(200)  # of a release's deployment
            self.end_headers()
            self.wfile.write(b'[{"version": "1.0", "title": "1.0", "aliases": []}]')
            return None

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def opened(browser: Browser, width: int, scheme: str, said: list[str]) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: said.append(f"{message.text} {message.location}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    return page


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_search_answers_newcomers(browser: Browser, address: str, width: int, scheme: str) -> None:
    said: list[str] = []
    page = opened(browser, width, scheme, said)
    page.goto(f"{address}/index.html")
    if width < 1000:
        page.locator("label.md-header__button[for=__search]").click()
    found = {}
    box = page.locator("input.md-search__input")
    box.click()
    for question, answers in QUESTIONS.items():
        box.fill("")
        box.press("End")  # the search listens to keys
        page.wait_for_function(EMPTY)
        box.fill(question)
        box.press("End")
        page.wait_for_function(ANSWERED)
        hits = page.locator(".md-search-result__link")
        first = hits.first.get_attribute("href") if hits.count() else "nothing"
        where = str(first).split("?")[0].removeprefix(f"{address}/").split(".html")[0]
        if where not in answers:
            found[question] = first
    page.close()
    assert not found, json.dumps(found, indent=1)
    assert not said


#: Labels of a drawing that are small, or not whole inside a filled rectangle.
LABELS = """
const box = each => each.getBoundingClientRect();
const rects = [...document.querySelectorAll('rect')].map(box);
const inside = (a, b) =>
  a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
const small = text => parseFloat(getComputedStyle(text).fontSize) < 13;
[...document.querySelectorAll('text')]
  .filter(text => small(text) || !rects.some(rect => inside(box(text), rect)))
  .map(text => text.textContent)
"""


@pytest.mark.parametrize("drawing", sorted(DRAWINGS.glob("*.svg")), ids=lambda path: path.stem)
def test_a_drawing_is_read_on_a_phone_in_light_and_dark(browser: Browser, drawing: Path) -> None:
    page = browser.new_page()
    page.goto(drawing.as_uri())
    assert page.evaluate("document.documentElement.viewBox.baseVal.width") <= 480
    assert page.evaluate(LABELS) == []
    page.close()


@pytest.mark.parametrize(("width", "scheme"), VIEWS[::3])
def test_no_page_is_wider_than_its_screen(
    browser: Browser, address: str, width: int, scheme: str
) -> None:
    said: list[str] = []
    wide = {}
    page = opened(browser, width, scheme, said)
    for file in sorted(SITE.rglob("*.html")):
        if file.name == "404.html":
            continue
        page.goto(f"{address}/{file.relative_to(SITE)}")
        over = page.evaluate(
            "[document.documentElement.scrollWidth - innerWidth,"
            " ...[...document.querySelectorAll('article table')]"
            " .map(table => table.getBoundingClientRect().right - innerWidth)]"
        )
        if max(over) > 0:
            wide[str(file.relative_to(SITE))] = max(over)
    page.close()
    assert not wide
    assert not said
