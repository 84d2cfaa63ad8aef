"""Messages to the page from buses at work: live, stuck, daemonless, dead, removed, made again."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Daemon, Spawner, segments_named, wait_until
from msgspec import to_builtins
from operators import cli
from pages import WORKER, Web

from shmbus import Bus, Consumer, Producer, unlink
from shmbus.inspect.status import read_status
from shmbus.web import settings

pytestmark = pytest.mark.slow

Start = Callable[..., Web]
Picture = dict[str, Any]


def status_of(name: str) -> Picture:
    found: Picture = cli("status", name, "--json").json()
    return found


def test_numbers_are_the_status(web: Start, bus_name: str, daemon: Callable[..., Daemon]) -> None:
    daemon("--capacity", "4MiB", "--sample-retries", "1")
    with Producer(bus_name, label="worker") as producer, Consumer(bus_name) as taker:
        for number in range(6):
            for index in range(4 - (number > 3)):
                producer.put(f"q{number}", group_size=4, index=index, score=index, tokens=[1] * 9)
        groups = taker.take(max_groups=3, timeout=5.0)
        groups[0].ack()
        groups[1].drop()
        producer.fail("q5", group_size=4, index=3, reason="boom")
        wanted = wait_until(
            lambda: (s := status_of(bus_name))["wanted"] and not s["ledger"]["in_ring"] and s,
            what="the request of the failed sample",
        )
        page = web(bus_name)
        shown = page.until(
            "", lambda p: p["wall"]["order"] == ["q4", "q5"], what="two incomplete groups"
        )
    assert shown["ledger"] == wanted["ledger"]
    assert shown["groups"] == {
        "open": wanted["daemon"]["groups_open"],
        "ready": wanted["daemon"]["groups_ready"],
        "leased": wanted["daemon"]["groups_leased"],
    }
    assert shown["capacity"] - shown["used"] == wanted["free"]
    cells = shown["wall"]["rows"]["q5"]["cells"]
    assert [cells[index]["s"] for index in "0123"] == ["t", "t", "t", "a"]
    assert cells["3"]["r"] == "boom"
    (row,) = shown["producers"]["rows"].values()
    assert (row["name"], row["pid"], row["committed"]) == ("worker", os.getpid(), 23)
    (holder,) = shown["holders"]
    assert holder["groups"] == sum(lease["groups"] for lease in wanted["daemon"]["leases"])


def facts_of_status(status: Picture) -> Picture:
    daemon, collector = status["daemon"], status["collector"]
    holders = {}
    if daemon is not None:
        holders = {lease["pid"]: lease["groups"] for lease in daemon["leases"]}
    elif collector["alive"]:
        holders = {collector["pid"]: collector["leased_groups"]}
    return {
        "free": status["free"],
        "space_wanted": status["space_wanted"],
        "policy_version": status["policy_version"],
        "given_up": status["groups_given_up"],
        "asked": len(status["wanted"]),
        "paused": status["paused"] and status["paused"]["reason"],
        "open": daemon["groups_open"] if daemon else status["groups_incomplete"],
        "ledger": {**status["ledger"], "exact": True},
        "producers": {p["label"]: (p["committed"], p["held_bytes"]) for p in status["producers"]},
        "holders": holders,
        "delivered": {each["name"]: each["buckets"] for each in status["delivered"]},
        "sentence": status["verdict"]["sentence"] if not status["verdict"]["findings"] else "",
    }


def facts_of_page(shown: Picture) -> Picture:
    verdict = shown["verdict"]
    return {
        "free": shown["capacity"] - shown["used"],
        "space_wanted": shown["space_wanted"],
        "policy_version": shown["policy_version"],
        "given_up": shown["given_up"],
        "asked": shown["asked"],
        "paused": shown.get("paused"),
        "open": shown["groups"].get("open"),
        "ledger": {**shown["ledger"], "exact": True},
        "producers": {
            row["name"]: (row["committed"], row["held"])
            for row in shown["producers"]["rows"].values()
        },
        "holders": {row["pid"]: row["groups"] for row in shown["holders"]},
        "delivered": {name: each["buckets"] for name, each in shown["delivered"].items()},
        "sentence": verdict["sentence"] if not verdict["findings"] else "",
    }


def states_of_a_ledger(name: str, producer: Producer, served: bool) -> Iterator[str]:
    """Bring a bus from state to state; yield the states."""

    def put(key: str, *indices: int, size: int = 2, **more: Any) -> None:
        for index in indices:
            producer.put(key, group_size=size, index=index, score=index, tokens=[1], **more)

    yield "empty"
    put("early", 0)
    yield "an open group" if served else "nobody reads"
    options: dict[str, Any] = {} if served else {"sample_retries": 1, "skip_zero_variance": True}
    with Consumer(name, label="train.py", **options) as taker:
        for key in "abcd":
            put(key, 0, 1)
        held = taker.take(max_groups=3, timeout=10)
        while len(held) < 3:
            held += taker.take(max_groups=3 - len(held), timeout=10)
        yield "leased"
        held[0].ack()
        held[1].drop()
        yield "acknowledged and malformed"
        put("early", 0)
        for index in range(2):
            producer.put("flat", group_size=2, index=index, score=1.0, tokens=[1])
        put("early", 1, size=3)
        taker.policy_version = 3
        taker.take(timeout=0.5)
        yield "duplicate, size mismatch, zero variance"
        producer.fail("f", group_size=2, index=1, reason="boom")
        put("f", 0)
        taker.take(timeout=0.5)
        yield "asked for again"
        for _ in producer.requests.retries():
            producer.fail("f", group_size=2, index=1, reason="boom again")
        taker.take(timeout=0.5)
        yield "given up"
        with Bus.open(name) as bus:
            bus.pause("new weights")
            yield "paused"
            bus.resume()
        held[2].give_back()
        yield "given back"
    yield "nobody takes"


@pytest.mark.parametrize("served", [False, True])
def test_in_each_state_of_the_ledger_the_page_says_what_the_status_says(
    web: Start, bus_name: str, daemon: Callable[..., Daemon], served: bool
) -> None:
    reached: set[str] = set()
    deadline = time.monotonic() + 120
    with contextlib.ExitStack() as stack:
        if served:
            daemon("--capacity", "2MiB", "--sample-retries", "1", "--skip-zero-variance")
        else:
            stack.enter_context(Bus.create(bus_name, "2MiB"))
        pictures = web(bus_name).pictures()
        producer = stack.enter_context(Producer(bus_name, label="w"))
        for what in states_of_a_ledger(bus_name, producer, served):
            seen: list[Picture] = []
            asked = time.time()
            for shown in pictures:
                if shown["now"] < asked:
                    continue  # already under way
                seen = [facts_of_status(to_builtins(read_status(bus_name))), facts_of_page(shown)]
                if seen[0] == seen[1]:
                    break
                assert time.monotonic() < deadline, (what, seen)
            ledger = seen[0]["ledger"]
            reached |= {name for name, count in ledger.items() if count} | set(ledger["dropped"])
    wanted = {"committed", "acknowledged", "leased", "stashed", "malformed", "duplicate"}
    wanted |= {"size_mismatch", "zero_variance", "failed", "balanced"}
    assert reached >= wanted | (set() if served else {"in_ring"}), reached


def test_a_worker_that_dies_is_named(
    web: Start, bus_name: str, spawn: Spawner, daemon: Callable[..., Daemon]
) -> None:
    daemon("--capacity", "4MiB")
    workers = [spawn.script(WORKER, bus_name, n, 3, 9 if n < 2 else 4, 0.0) for n in range(3)]
    for worker in workers:
        worker.expect("ready")
    page = web(bus_name)
    page.until(
        "",
        lambda p: any(row["waits"] == 5 for row in p["producers"]["rows"].values()),
        what="five groups that wait for one",
    )
    workers[2].kill()
    shown = page.until(
        "", lambda p: "nobody will send" in p["verdict"]["sentence"], what="the dead worker"
    )
    assert shown["verdict"]["sentence"].startswith(f"rollout-2 (pid {workers[2].pid}) ")
    assert "5 groups wait for it alone" in shown["verdict"]["sentence"]
    (row,) = [r for r in shown["producers"]["rows"].values() if r["name"] == "rollout-2"]
    assert row["state"] in ("dead", "gone")
    assert {r["waits_for"] for r in shown["wall"]["rows"].values()} == {
        int(number) for number, r in shown["producers"]["rows"].items() if r["name"] == "rollout-2"
    }


def test_a_daemon_that_is_killed_and_started_again_leaves_the_page_going_on(
    web: Start, bus_name: str, daemon: Callable[..., Daemon]
) -> None:
    served = daemon("--capacity", "4MiB")
    page = web(bus_name)
    with Producer(bus_name) as producer:
        producer.put("q", group_size=2, index=0, score=1.0, tokens=[1])
        seen = []
        for picture in page.pictures():
            state = (picture["state"], picture.get("daemon", {}).get("pid"))
            if not seen or seen[-1] != state:
                seen.append(state)
            if len(seen) == 1 and state[0] == "live" and picture["wall"]["order"]:
                first = state[1]
                served.kill()
            elif len(seen) == 2 and served.child.pid == first:
                assert "Nobody reads" in picture["verdict"]["sentence"]
                served.start()
            elif state[1] not in (None, first) and picture["wall"]["order"] == ["q"]:
                break
    assert seen[0][0] == seen[-1][0] == "live"


def test_a_stuck_daemon_is_told(web: Start, bus_name: str, daemon: Callable[..., Daemon]) -> None:
    served = daemon("--capacity", "4MiB")
    page = web(bus_name)
    page.until("", lambda p: p["state"] == "live", what="a live bus")
    served.child.send_signal(signal.SIGSTOP)
    try:
        said = f"(pid {served.child.pid}) is stopped"
        page.until(
            "",
            lambda p: p["state"] == "stuck" and said in p["verdict"]["sentence"],
            what="a stopped daemon",
        )
    finally:
        served.child.send_signal(signal.SIGCONT)
    page.until("", lambda p: p["state"] == "live", what="the daemon again")


def test_a_bus_that_is_removed_and_made_again_is_told_and_shown(web: Start, bus_name: str) -> None:
    page = web(bus_name)
    pictures = page.pictures()
    assert "There is no bus" in next(pictures)["verdict"]["sentence"]
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        producer.put("old", group_size=2, index=0, score=1.0, tokens=[1])
        next(p for p in pictures if p["state"] == "unread" and p["wall"]["order"] == ["old"])
        unlink(bus_name)
        gone = next(p for p in pictures if p["state"] == "removed")
        assert "was removed" in gone["verdict"]["sentence"]
        assert "ledger" not in gone
    with Bus.create(bus_name, "2MiB"), Producer(bus_name) as producer:
        producer.put("new", group_size=2, index=0, score=1.0, tokens=[1])
        again = next(p for p in pictures if p["state"] == "unread" and p["wall"]["order"])
        assert again["wall"]["order"] == ["new"]
        assert "made again" in again["note"]
        assert again["ledger"]["committed"] == 1


def test_a_bus_that_is_truncated_or_foreign_is_told(web: Start, bus_name: str) -> None:
    page = web(bus_name)
    pictures = page.pictures()
    with Bus.create(bus_name, "1MiB"):
        next(p for p in pictures if p["state"] not in ("absent", "unreadable"))
        (path,) = segments_named(bus_name)
        whole = path.read_bytes()
    for bytes_, text in (
        (whole[:9000], "fewer than its header says"),
        (whole[:8] + b"\x63" + whole[9:], "layout version 99"),
        (whole[:24] + b"\x63" + whole[25:], "is damaged"),
        (b"x" * 5000, "not a shmbus segment"),
        (b"", "never finished"),
    ):
        path.write_bytes(bytes_)
        shown = next(p for p in pictures if text in p["verdict"]["sentence"])
        assert shown["state"] == "unreadable" and bus_name in shown["verdict"]["sentence"]
    path.unlink()
    next(p for p in pictures if p["state"] == "removed")


def test_what_producers_write_is_text(web: Start, bus_name: str) -> None:
    evil = [
        "<script>document.title='x'</script>", "<img src=x onerror=alert(1)>", "a\x1b[31mb\x00c",
        "\u202eevil", "x" * 255, "\n\ndata: {}\n\n", "\N{SNOWMAN} \N{PILE OF POO}",
    ]  # fmt: skip
    page = web(bus_name)
    with Bus.create(bus_name, "1MiB"), Producer(bus_name, label="<b>\u202e\x1b") as producer:
        for name in evil:
            producer.put(name, group_size=2, index=0, score=-1e38, tokens=[1])
            producer.fail(name, group_size=2, index=1, reason=name)
        shown = page.until(
            "", lambda p: len(p.get("wall", {}).get("order", [])) == len(evil), what="the groups"
        )
    text = json.dumps(shown["wall"], ensure_ascii=False)
    assert "\u202e" not in text and "\x1b" not in text
    assert {row["id"] for row in shown["wall"]["rows"].values()} >= {evil[0], evil[1], "x" * 255}


def test_an_overview_has_every_bus_to_watch(web: Start, bus_name: str, spawn: Spawner) -> None:
    other = f"{bus_name}-b"
    with Bus.create(bus_name, "1MiB"), Bus.create(other, "1MiB"):
        page = web(bus_name, other)
        shown = page.until("", lambda p: len(p["buses"]) == 2, what="two buses")
        assert shown["buses"][other]["state"] == "unread"
        assert next(page.pictures(other))["name"] == other
        every = web()
        shown = every.until("", lambda p: {bus_name, other} <= p["buses"].keys(), what="all")


def wait_until_polls_end(page: Web) -> None:
    """The server notices a browser's leaving at its next write."""

    def reads() -> int:
        fields = Path(f"/proc/{page.child.pid}/io").read_text()
        return int(re.findall(r"^syscr: (\d+)", fields, re.M)[0])

    def reads_stop() -> bool:
        before = reads()
        time.sleep(1.5)
        # A poll reads many times more.
        return reads() - before <= 8

    wait_until(reads_stop, what="an end of the polls")


def test_nobody_who_watches_means_no_poll(web: Start, bus_name: str) -> None:
    page = web(bus_name)
    with Bus.create(bus_name, "1MiB"):
        next(page.pictures())
        wait_until_polls_end(page)


def test_a_page_that_comes_back_begins_with_what_is_there_now(web: Start, bus_name: str) -> None:
    page = web(bus_name)
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        assert next(page.pictures())["ledger"]["committed"] == 0
        wait_until_polls_end(page)
        time.sleep(settings.OLD_S)
        producer.put("q", group_size=2, index=0, score=1.0, tokens=[1])
        assert next(page.pictures())["ledger"]["committed"] == 1
