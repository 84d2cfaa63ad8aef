"""The page on the narrowest screens, and of a missing bus."""

from collections.abc import Callable

import pytest
from conftest import Daemon
from playwright.sync_api import Browser
from test_browser import Open, Start, browser, open_page, picture, wait_for

from shmbus import Bus, Consumer, Producer

__all__ = ["browser", "open_page"]

WIDER = "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"
FITS = "document.documentElement.scrollWidth <= innerWidth"


@pytest.mark.parametrize("group_size", [4, 8, 10, 16, 17])
def test_groups_of_every_size_fit_on_320_pixels(
    group_size: int, web: Start, bus_name: str, open_page: Open, daemon: Callable[..., Daemon]
) -> None:
    daemon("--capacity", "4MiB", "--sample-retries", "1")
    page = open_page(web(bus_name), width=320)
    with Producer(bus_name, label="rollout") as producer, Consumer(bus_name) as taker:
        # Two incomplete groups share no beginning: the wall would print it once.
        for number in range(3):
            for index in range(group_size - (number > 0)):
                producer.put(
                    f"a-prompt-of-a-long-name-{1000 + 77 * number**5}",
                    group_size=group_size, index=index, score=index / 7, tokens=[1] * 300,
                )  # fmt: skip
        taker.ack(taker.take(timeout=20))
        producer.fail(
            "a-prompt-of-a-long-name-1077", group_size - 1, "no memory", group_size=group_size
        )
        wait_for(page, lambda: page.locator(".wall button").count() == 2, "the groups")
        wait_for(page, lambda: page.locator(".cell.f, .cell.a").count(), "the failed sample")
        assert page.evaluate(FITS)
        # No word of a stage is wider than the stage: it would cover a neighbour or border.
        assert page.eval_on_selector_all(".flow li", WIDER) == []
        page.locator(".wall button").first.click()
        wait_for(page, lambda: page.locator("#history table").count(), "the history")
        assert page.evaluate(FITS)
        picture(page, f"page-320-{group_size}")


def test_a_bus_that_is_not_there_is_awaited(web: Start, bus_name: str, open_page: Open) -> None:
    page = open_page(web())
    page.wait_for_selector("h1")
    page.evaluate(f"location.hash = '#{bus_name}'")
    wait_for(page, lambda: f"There is no bus '{bus_name}' yet" in page.inner_text("body"), "that")
    assert page.locator("#state").inner_text() == "not there"
    assert page.locator("[role=alert]").count() == 0
    with Bus.create(bus_name, "1MiB"):
        wait_for(page, lambda: page.locator(".flow").count(), "the bus")


def test_an_unshown_bus_is_told(web: Start, bus_name: str, browser: Browser) -> None:
    with Bus.create(bus_name, "1MiB"), Bus.create(f"{bus_name}-b", "1MiB"):
        server = web(bus_name, f"{bus_name}-b")
        # Not by open_page: a browser logs a refused stream.
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.address)
        page.wait_for_selector("table")
        page.evaluate(f"location.hash = '#{bus_name}-c'")
        wait_for(page, lambda: "shows no such bus" in page.inner_text("body"), "the refusal")
        assert "lost" not in page.inner_text("body")
        page.get_by_role("link", name="all buses").click()
        wait_for(page, lambda: page.locator("table").count(), "the overview")
        context.close()


def test_the_longest_names_fit_on_320_pixels(web: Start, bus_name: str, open_page: Open) -> None:
    name = f"{bus_name}-{'x' * 160}"
    with Bus.create(name, "1MiB"), Producer(name) as producer:
        producer.put("y" * 250, group_size=2, index=0, score=1.0, tokens=[1])
        page = open_page(web(name), width=320)
        page.locator(".wall button").click()
        wait_for(page, lambda: page.locator("#history table").count(), "the history")
        assert page.evaluate(FITS)
        assert page.eval_on_selector_all("#history p", WIDER) == []
