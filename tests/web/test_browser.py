"""The page in a real browser; SHMBUS_PICTURES names a folder for pictures of its states."""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Daemon, Spawner
from pages import TRAINER, WORKER, Web
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from shmbus import Bus, Consumer, Producer

CHROMIUM = os.environ.get("SHMBUS_CHROMIUM", "/usr/bin/chromium")
Start = Callable[..., Web]
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Open a server's page; require an empty console, no refusals, and no foreign requests."""
    offences: list[str] = []
    contexts = []

    def open_(web: Web, *, width: int = 1280, scheme: str = "light", **options: Any) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(
            "addEventListener('securitypolicyviolation',"
            " event => console.error('policy', event.violatedDirective))"
        )
        page.on("console", lambda message: offences.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: offences.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(f"http://127.0.0.1:{web.port}/")
                or offences.append(f"request: {request.url}")
            ),
        )
        page.goto(web.address)
        assert "token" not in page.url
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not offences, offences


def picture(page: Page, name: str, *, whole: bool = True) -> None:
    """Write a picture, if wanted: of the whole page, or of the screen."""
    folder = os.environ.get("SHMBUS_PICTURES")
    if folder:
        # The names of tests are long and meaningless.
        page.evaluate("document.querySelector('h1').firstChild.nodeValue = 'math-run7'")
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"{name}.png"
        page.screenshot(path=path, full_page=whole)
        # A page has few colours: a palette shrinks the file to a third.
        Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)


def sentence(page: Page) -> str:
    return page.locator("#sentence").inner_text()


def wait_for(page: Page, wanted: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 30
    while not wanted():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for {what}; the page: {page.inner_text('body')[:2000]}")
        page.wait_for_timeout(50)


def at_work(bus_name: str, spawn: Spawner, daemon: Callable[..., Daemon]) -> list[Any]:
    daemon("--capacity", "8MiB", "--sample-retries", "1")
    workers = []
    for n in range(8):
        rest = 0.9 if n == 5 else 0.25
        workers.append(spawn.script(WORKER, bus_name, n, 8, 400, rest))
    for worker in workers:
        worker.expect("ready")
    spawn.script(TRAINER, bus_name, "train.py", 0.3).expect("ready")
    return workers


def test_a_bus_at_work_is_drawn_and_a_dead_worker_named_at_once(
    web: Start, bus_name: str, spawn: Spawner, daemon: Callable[..., Daemon], open_page: Open
) -> None:
    workers = at_work(bus_name, spawn, daemon)
    server = web(bus_name)
    page = open_page(server)
    dark = open_page(server, scheme="dark")
    narrow = open_page(server, width=390, scheme="light")
    page.wait_for_selector(".wall button")
    page.wait_for_timeout(int(os.environ.get("SHMBUS_PICTURE_S", "3")) * 1000)
    with Producer(bus_name, label="verifier") as producer:
        waits = page.locator(".wall .id").nth(5).get_attribute("title")
        producer.fail(waits, group_size=8, index=5, reason="timed out")
        wait_for(page, lambda: page.locator(".wall .cell.a").count(), "a failed sample")
        assert "verifier" in page.inner_text("[aria-label=producers]")
    workers[5].kill()
    died = time.monotonic()
    wait_for(page, lambda: "rollout-5" in sentence(page) and "nobody" in sentence(page), "it")
    print(f"a killed worker was named after {time.monotonic() - died:.2f} s")
    assert page.locator("tr", has_text="rollout-5").locator(".chip").inner_text() in (
        "dead",
        "gone",
    )
    page.wait_for_timeout(1200)
    picture(page, "page-readme", whole=False)
    page.locator(".wall button").first.focus()
    page.keyboard.press("Enter")
    assert "there" in page.locator("#history").inner_text()
    for each, name in ((page, "light"), (dark, "dark"), (narrow, "narrow")):
        each.wait_for_timeout(1200)
        picture(each, f"page-{name}")
    page.keyboard.press("Escape")
    page.wait_for_selector("#history", state="detached")
    assert narrow.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_click_tells_the_history_of_a_group_to_its_end(
    web: Start, bus_name: str, daemon: Callable[..., Daemon], open_page: Open
) -> None:
    daemon("--capacity", "2MiB", "--sample-retries", "1")
    page = open_page(web(bus_name))
    with (
        Producer(bus_name, label="first") as first,
        Producer(bus_name, label="second") as second,
        Consumer(bus_name, label="train.py") as taker,
    ):
        taker.request("math-1", group_size=4)
        for score in range(2):
            first.requests.answer(first.requests.next(10.0), score=float(score), tokens=[1])
        held, failed = (second.requests.next(10.0) for _ in range(2))
        second.requests.fail(failed, "<b>out of memory</b>")
        wait_for(page, lambda: page.locator(".cell.b").count() > 1, "the sample that was begun")
        page.locator(".wall button").click()
        story = page.locator("#history")
        wait_for(page, lambda: "failed at second" in story.inner_text(), "the failure")
        # The wall's row comes from the last poll; the events are newer.
        wait_for(page, lambda: "1 failed attempt" in story.inner_text(), "the row with the failure")
        text = story.inner_text()
        assert "begun" in text and "<b>out of memory</b>" in text
        for request in (held, second.requests.next(10.0)):
            second.requests.answer(request, score=1.0, tokens=[1])
        wait_for(page, lambda: "waits for a trainer" in story.inner_text(), "that it is complete")
        [group] = taker.take(timeout=10)
        wait_for(page, lambda: "leased to train.py" in story.inner_text(), "its holder")
        assert "4 of 4 there" in story.inner_text()
        group.ack()
        wait_for(page, lambda: "acknowledged by train.py" in story.inner_text(), "its end")
        assert "no longer on the bus" in story.inner_text()
        page.keyboard.press("Escape")
        page.wait_for_selector("#history", state="detached")
        page.get_by_label("History of a group").fill("math-1")
        page.keyboard.press("Enter")
        wait_for(page, lambda: "leased to" in page.inner_text("#history"), "the same again")
        happened = page.inner_text("[aria-label='what happened']")
        assert "second (pid" in happened and "train.py (pid" in happened


def test_numbers_are_those_of_the_status(web: Start, bus_name: str, open_page: Open) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer, Consumer(bus_name) as taker:
        for number in range(3):
            for index in range(2):
                producer.put(f"q{number}", group_size=2, index=index, score=1.0, tokens=[1])
        groups = taker.take(max_groups=2, timeout=5.0)
        groups[0].ack()
        page = open_page(web(bus_name))
        wait_for(
            page,
            lambda: "6 committed = 2 acknowledged" in page.locator("[data-ledger]").inner_text(),
            "the ledger",
        )
        assert "balances" in page.locator(".ledger").inner_text()
        stats = taker.stats()
        text = page.locator("[data-ledger]").inner_text()
        assert f"{stats.leased} leased" in text
        page.locator("h1").click()
        page.keyboard.press("Space")
        producer.put("late", group_size=2, index=0, score=1.0, tokens=[1])
        page.wait_for_timeout(2500)
        assert "6 committed" in page.locator("[data-ledger]").inner_text()
        page.keyboard.press("Space")
        wait_for(page, lambda: "7 committed" in page.locator("[data-ledger]").inner_text(), "it")


#: Parts of a page of a bus with a daemon, by their names for a screen reader.
PARTS = {
    "flow of trajectories", "groups filling up", "producers", "holders", "what happened",
    "Trajectories a second", "Reward of delivered samples", "Age at delivery",
    "Fill of the ring", "Tokens a second", "Reward", "Solved", "Policy lag", "Length",
}  # fmt: skip


def test_every_part_has_a_name_and_is_reached_by_keys(
    web: Start, bus_name: str, daemon: Callable[..., Daemon], open_page: Open
) -> None:
    daemon("--capacity", "2MiB")
    with Producer(bus_name, label="worker") as producer, Consumer(bus_name) as taker:
        for index in range(2):
            producer.put("done", group_size=2, index=index, score=index, tokens=[1])
        taker.ack(taker.take(timeout=10))
        producer.put("q1", group_size=3, index=0, score=1.0, tokens=[1])
        page = open_page(web(bus_name), reduced_motion="reduce")
        page.get_by_role("button", name=re.compile("q1: 1 of 3 there")).wait_for()
        wait_for(page, lambda: page.get_by_role("region", name="Solved").count(), "what was taken")
        assert page.get_by_role("status").first.inner_text()
        moving = "getComputedStyle(document.querySelector('.flow li'), '::after').animationName"
        assert page.evaluate(moving) in ("none", "")
        tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")
        nodes = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tree["nodes"] if not node["ignored"]
        ]  # fmt: skip
        named = {"button", "textbox", "region", "image", "img", "link"}
        assert [role for role, name in nodes if role in named and not name] == []
        assert {name for role, name in nodes if role == "region"} >= PARTS
        assert any(role == "textbox" and "History of a group" in name for role, name in nodes)
        reached = []
        for _ in range(6):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.tagName"))
        assert {"BUTTON", "INPUT"} <= set(reached), reached
        page.locator(".wall button").focus()
        page.keyboard.press("Enter")
        wait_for(page, lambda: page.locator("#history").count(), "the history")
        page.wait_for_timeout(2200)
        # Pictures came meanwhile, and the focus stayed.
        assert page.evaluate("document.activeElement.tagName") == "BUTTON"
        page.keyboard.press("Enter")
        page.wait_for_selector("#history", state="detached")


def test_a_server_returns(web: Start, bus_name: str, browser: Browser, spawn: Spawner) -> None:
    with Bus.create(bus_name, "1MiB"):
        server = web(bus_name)
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.address)
        page.wait_for_selector(".flow")
        server.stop()
        wait_for(page, lambda: page.locator("[role=alert]").count(), "that it is lost")
        os.environ["SHMBUS_WEB_TOKEN"] = server.token
        try:
            web(bus_name, "--port", str(server.port))
        finally:
            del os.environ["SHMBUS_WEB_TOKEN"]
        wait_for(page, lambda: not page.locator("[role=alert]").count(), "the server again")
        context.close()


#: Becomes another user after the imports: the libraries may be private.
AS_NOBODY = """
import argparse, os, sys
from shmbus.web import command, server
"x".encode("idna")
os.setgid(65534)
os.setuid(65534)
"""


def at_peace(page: Page, text: str, what: str) -> None:
    """Wait until the sentence has a text; the page stays whole throughout."""
    wait_for(page, lambda: text in page.inner_text("body"), what)
    assert page.locator("h1").count() == 1


def test_ids_and_scores_of_every_kind_are_text_and_numbers(
    web: Start, bus_name: str, open_page: Open, daemon: Callable[..., Daemon]
) -> None:
    evil = [
        "<script>document.title='x'</script>", "<img src=x onerror=alert(1)>", "a\x1b[31mb\x00c",
        "\u202eevil\u2066", "x" * 255, "&lt;&#x41;", "${7*7}", "\n\ndata: {}\n\n", "é" * 127,
        "\N{PILE OF POO}", "constructor", "__proto__", "toString",
    ]  # fmt: skip
    daemon("--capacity", "64MiB")
    page = open_page(web(bus_name))
    with Producer(bus_name, label="<b>\u202e\x1b") as producer:
        for number, name in enumerate(evil):
            producer.put(name, group_size=3, index=0, score=1e38 * (-1) ** number, tokens=[1])
            producer.fail(name, group_size=3, index=1, reason=name)
        for broken in ("\ud800", "a\udfff"):
            with pytest.raises(ValueError):
                producer.put(broken, group_size=3, index=0, tokens=[1])
        for score in (float("nan"), float("inf")):
            with pytest.raises(ValueError):
                producer.put("q", group_size=3, index=0, score=score, tokens=[1])
        wait_for(page, lambda: page.locator(".wall button").count() == len(evil), "the groups")
        for at in range(len(evil)):
            button = page.locator(".wall button").nth(at)
            shown = button.locator(".id").get_attribute("title")
            button.click()
            wait_for(page, lambda s=shown: s in page.inner_text("#history"), "its history")
            assert "3" in page.inner_text("#history")
        text = page.inner_text("body")
        assert "<b>" in page.inner_text("[aria-label=producers]")
        assert not {"\u202e", "\u2066", "\x1b", "\x00"} & set(text)
        page.get_by_label("History of a group").fill("<svg onload=alert(1)>")
        page.keyboard.press("Enter")
        wait_for(page, lambda: "not on the bus" in page.inner_text("#history"), "an answer")
    assert page.title() == f"{bus_name} · shmbus"


def test_a_foreign_bus_is_told(spawn: Spawner, bus_name: str, open_page: Open) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    server = Web(spawn, (bus_name,), before=AS_NOBODY)
    page = open_page(server)
    with Bus.create(bus_name, "1MiB"):
        at_peace(page, "may not read", "that it is another's")
    at_peace(page, "There is no bus", "its end")
