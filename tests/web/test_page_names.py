"""The page with names and numbers open to misreading by a browser."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Daemon
from playwright.sync_api import Browser, Page
from test_browser import Open, Start, browser, open_page, wait_for

import shmbus.web
from shmbus import Bus, Producer

__all__ = ["browser", "open_page"]

#: No number of a browser equals it.
ROUND = 2**62 + 1


def cells_of(page: Page) -> list[str]:
    return page.locator(".wall .cell.t").evaluate_all(
        "cells => cells.map((cell) => cell.style.getPropertyValue('--v'))"
    )


def test_a_round_beyond_a_browsers_numbers_has_its_history(
    web: Start, bus_name: str, open_page: Open, daemon: Callable[..., Daemon]
) -> None:
    """Requests of adapters have such rounds: nanoseconds since 1970."""
    daemon("--capacity", "1MiB", "--sample-retries", "1")
    page = open_page(web(bus_name))
    with Producer(bus_name) as producer:
        producer.put("q", group_size=2, index=0, round=ROUND, score=1.0, tokens=[1])
        producer.fail("q", 1, "the sandbox is gone", round=ROUND, group_size=2)
        page.locator(".wall button").first.click()
        wait_for(page, lambda: "sample 1 failed" in page.inner_text("#history"), "its history")
        assert f"round {ROUND}:" in page.inner_text("#history")


def test_a_group_that_is_found_by_its_id_shows_its_samples(
    web: Start, bus_name: str, open_page: Open, daemon: Callable[..., Daemon]
) -> None:
    daemon("--capacity", "4MiB")
    page = open_page(web(bus_name))
    with Producer(bus_name) as producer:
        for number in range(100):
            producer.put(f"q{number}", group_size=2, index=0, score=0.25, tokens=[1])
        wait_for(page, lambda: page.locator(".wall button").count() == 48, "the oldest groups")
        page.get_by_label("History of a group").fill("q99")
        page.keyboard.press("Enter")
        wait_for(page, lambda: "there" in page.inner_text("#history table"), "its samples")
        assert "0.25" in page.inner_text("#history table")


def test_scores_far_apart_have_shades(web: Start, bus_name: str, open_page: Open) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        for index, score in enumerate((-1e38, 0.0, 1e38)):
            producer.put("q", group_size=4, index=index, score=score, tokens=[1])
        page = open_page(web(bus_name))
        wait_for(page, lambda: len(cells_of(page)) == 3, "the samples")
        assert cells_of(page) == ["0%", "50%", "100%"]


def test_a_half_letter_is_cut_before(web: Start, bus_name: str, open_page: Open) -> None:
    faces = ["\N{GRINNING FACE}", "\N{SMILING FACE WITH OPEN MOUTH}", "\N{FACE WITH TEARS OF JOY}"]
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        for face in faces:
            producer.put(f"math{face}", group_size=2, index=0, score=1.0, tokens=[1])
        page = open_page(web(bus_name))
        wait_for(page, lambda: page.locator(".wall button").count() == 3, "the groups")
        assert page.locator(".wall .id").all_inner_texts() == faces


@pytest.mark.parametrize("ending", ["\u202eevil", "<script>alert(1)<", "%zz?&#a b"])
def test_any_bus_name_is_opened(ending: str, web: Start, bus_name: str, open_page: Open) -> None:
    other = bus_name + ending
    with Bus.create(bus_name, "1MiB"), Bus.create(other, "1MiB"):
        page = open_page(web(bus_name, other))
        page.locator("tbody a").nth(1).click()
        wait_for(page, lambda: page.locator("#sentence").count(), "the bus")
        assert page.inner_text("h1").startswith(bus_name) and page.inner_text("h1") != bus_name
        assert "\u202e" not in page.inner_text("body")


def test_a_bus_that_comes_while_the_overview_is_open_may_have_any_name(browser: Browser) -> None:
    """The page applies a change by its keys, among them a word of its language."""
    source = (Path(shmbus.web.__file__).parent / "static" / "page.js").read_text()
    merge = re.search(r"function merge.*?\n}", source, re.DOTALL)
    assert merge is not None
    context = browser.new_context()
    keys = context.new_page().evaluate(
        f"(change) => {{ {merge[0]}\n"
        "return Object.keys(merge({ buses: {} }, JSON.parse(change)).buses); }",
        '{"buses": {"__proto__": {"state": "live"}}}',
    )
    context.close()
    assert keys == ["__proto__"]


def test_an_unencoded_address_is_kept(web: Start, bus_name: str, open_page: Open) -> None:
    other = f"{bus_name}%zz"
    with Bus.create(bus_name, "1MiB"), Bus.create(other, "1MiB"):
        page = open_page(web(bus_name, other))
        page.wait_for_selector("table")
        page.evaluate(f"location.hash = '#{other}'")
        wait_for(page, lambda: page.locator("h1").inner_text() == other, "the bus")
