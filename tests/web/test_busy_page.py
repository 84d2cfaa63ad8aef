"""The page of a busy run: what is looked for first is seen first, nothing is cut off or lost."""

import itertools
import signal
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Daemon, Spawner
from pages import TRAINER
from playwright.sync_api import Page
from test_browser import Open, Start, at_work, browser, open_page, wait_for

from shmbus import Bus, Producer

__all__ = ["browser", "open_page"]

ENDS = "[...document.querySelectorAll('.stack')].map(e => e.lastElementChild.getBoundingClientRect().bottom)"  # noqa: E501
CUT = (
    "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    ".map(e => e.textContent)"
)


def test_who_holds_is_on_the_first_screen_and_columns_end_together(
    web: Start, bus_name: str, spawn: Spawner, daemon: Callable[..., Daemon], open_page: Open
) -> None:
    at_work(bus_name, spawn, daemon)
    server = web(bus_name)
    page, phone = open_page(server), open_page(server, width=390)
    for each in (page, phone):
        wait_for(each, lambda: each.locator("[aria-label=producers] tbody tr").count() >= 8, "all")  # noqa: B023
    holders = page.locator("[aria-label=holders]").bounding_box()
    assert holders is not None and holders["y"] + holders["height"] < 900
    left, right = page.evaluate(ENDS)
    assert left == pytest.approx(right, abs=1)
    assert page.evaluate(CUT) == phone.evaluate(CUT) == []
    row = phone.locator("[aria-label=producers] tbody tr").first
    assert row.locator("[data-is=committed]").is_visible()


def test_who_died_stands_right_behind_all_policy_versions_since(
    web: Start, bus_name: str, spawn: Spawner, daemon: Callable[..., Daemon], open_page: Open
) -> None:
    daemon("--capacity", "2MiB")
    worker = spawn.script(
        "import sys, time, shmbus\n"
        "producer = shmbus.Producer(sys.argv[1], label='victim')\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)",
        bus_name,
        until="ready",
    )
    page = open_page(web(bus_name))
    happened = page.locator("[aria-label='what happened']")
    wait_for(page, lambda: "victim" in happened.inner_text(), "that it came")
    worker.kill()
    wait_for(page, lambda: "died" in happened.inner_text(), "that it died")
    with Bus.open(bus_name) as bus:
        for version in (7, 8, 9):
            bus.policy_version = version
            wait_for(page, lambda: f" {version}\n" in happened.inner_text(), "it")  # noqa: B023
    lines = happened.inner_text().splitlines()
    assert sum("policy version" in line for line in lines) == 1
    assert "policy versions 7 to 9" in lines[1] and "died" in lines[2]


def ask(page: Page, what: str, *arguments: Any) -> Any:
    return page.evaluate(
        "([what, given]) => import('/charts.js').then(found => found[what](...given))",
        [what, list(arguments)],
    )


def test_versions_are_marked_at_most_every_10th(web: Start, bus_name: str, open_page: Open) -> None:
    with Bus.create(bus_name, "1MiB"):
        page = open_page(web(bus_name))
        page.wait_for_selector(".flow")
        for seconds in (20, 60, 300):
            for a_second in (0.05, 0.5, 2.0, 40.0):
                points = [[1000.0 + s, int(s * a_second)] for s in range(seconds)]
                found = ask(page, "marks", points, 1)
                times = [mark["t"] for mark in found]
                gap = max(60, seconds - 1) / 10
                assert all(b - a >= gap for a, b in itertools.pairwise(times))
                assert found or points[-1][1] == 0, (seconds, a_second)
                later = ask(page, "marks", [*points, [1000.0 + seconds, points[-1][1]]], 1)
                assert [m["v"] for m in found] == [m["v"] for m in later]
        [*_, mark] = ask(page, "marks", [[s, 100 + s if s < 40 else 50] for s in range(60)], 1)
        assert mark["v"] in (50, 140)


def test_ticks_are_whole_seconds_or_minutes(web: Start, bus_name: str, open_page: Open) -> None:
    with Bus.create(bus_name, "1MiB"):
        page = open_page(web(bus_name))
        page.wait_for_selector(".flow")
        assert ask(page, "said", [-80, -60, -40, 0]) == ["-80 s", "-60 s", "-40 s", "now"]
        assert ask(page, "said", [-300, -60, 0]) == ["-5 min", "-1 min", "now"]


@pytest.mark.parametrize("served", [False, True])
def test_a_trainer_that_is_stopped_is_shown_so(
    served: bool, web: Start, bus_name: str, spawn: Spawner, daemon: Callable[..., Daemon],
    open_page: Open,
) -> None:  # fmt: skip
    if served:
        daemon("--capacity", "1MiB")
    with Bus.ensure(bus_name, "1MiB"), Producer(bus_name) as producer:
        trainer = spawn.script(TRAINER, bus_name, "train.py", 600, until="ready")
        producer.put("q", group_size=1, index=0, tokens=[1])
        page = open_page(web(bus_name))
        held = page.locator("[aria-label=holders]")
        wait_for(page, lambda: "train.py" in held.inner_text(), "the trainer")
        trainer.send_signal(signal.SIGSTOP)
        wait_for(page, lambda: held.locator(".chip.stopped").count(), "that it is stopped")
        trainer.send_signal(signal.SIGCONT)
