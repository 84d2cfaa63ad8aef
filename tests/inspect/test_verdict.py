"""A sentence about a bus: the bottleneck, its cause, and the remedy."""

import os
import re
from collections.abc import Callable

import pytest
from conftest import Daemon, Spawner, ends_of, wait_until
from msgspec.structs import replace
from operators import cli

from shmbus import Bus, BusFullError, Consumer, Producer
from shmbus.data.status_types import (
    BusStatus,
    GroupCells,
    MismatchStatus,
    SampleCell,
    Verdict,
)
from shmbus.inspect.groups import read_groups
from shmbus.inspect.rates import Watcher
from shmbus.inspect.status import read_status
from shmbus.inspect.text import groups_text, status_text
from shmbus.inspect.verdict import judge
from shmbus.inspect.who_is_missing import waiting_for


def said(name: str) -> Verdict:
    verdict = read_status(name).verdict
    assert verdict is not None
    return verdict


def group(name: str, *cells: SampleCell, size: int = 4) -> GroupCells:
    there = sum(cell.state == "there" for cell in cells)
    return GroupCells(
        instance_id=name, round=None, size=size, present=there, age_s=1.0, cells=list(cells)
    )


def cell(index: int, producer: int) -> SampleCell:
    return SampleCell(index=index, producer=producer, score=0.0)


def test_a_bus_in_order_has_no_finding(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer, Consumer(bus_name) as taker:
        for index in range(2):
            producer.put("q", group_size=2, index=index, score=1.0, tokens=[1])
        taker.ack(taker.take(timeout=5.0))
        verdict = said(bus_name)
        assert (verdict.level, verdict.findings) == ("good", [])
        assert "1 producer" in verdict.sentence


def test_a_ring_names_both(bus_name: str, daemon: Callable[..., Daemon], spawn: Spawner) -> None:
    daemon("--capacity", "1MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as trainer:
        producer.put("first", group_size=1, index=0, tokens=[1])
        held = trainer.take(timeout=10.0)  # and asks for no more
        for number in range(60):
            producer.put(f"open{number}", group_size=4, index=0, tokens=[1])
        with pytest.raises(BusFullError):
            for number in range(1000):
                producer.put(f"q{number}", group_size=1, index=0, tokens=[1] * 8000, timeout=0.2)
        script = "import sys, shmbus\nshmbus.Producer(sys.argv[1]).put('z', group_size=1, index=0, "
        waiting = spawn.script(script + "tokens=[1] * 20000)", bus_name)
        wait_until(lambda: read_status(bus_name).space_wanted, what="a producer that waits")
        sentence = said(bus_name).sentence
        waiting.kill()
        assert held and re.search(
            r"60 incomplete groups, and \d+ complete ones that wait", sentence
        ), sentence
        assert "Have the trainer take groups, set group_timeout" in sentence, sentence


def test_unread_aborted_reservations_are_no_shortage(bus_name: str, spawn: Spawner) -> None:
    script = (
        "import sys, shmbus\n"
        "producer = shmbus.Producer(sys.argv[1])\n"
        "fields = {'tokens': ('int32', 8000)}\n"
        "while True:\n"
        "    producer.reserve('q', group_size=1, index=0, fields=fields).abort()\n"
    )
    with Bus.create(bus_name, "1MiB"):
        filler = spawn.script(script, bus_name)
        wait_until(lambda: read_status(bus_name).space_wanted, what="a full ring")
        sentence = said(bus_name).sentence
        assert "reservations stay until somebody reads the bus" in sentence, sentence
        assert "Start the trainer" in sentence
        filler.kill()


def test_groups_with_one_producer_each_wait_for_it() -> None:
    assert waiting_for([group(f"q{n}", cell(0, n), cell(1, n)) for n in range(1, 4)]) == [1, 2, 3]


def test_a_missing_index_is_expected_from_who_always_sends_it() -> None:
    full = [cell(index, index + 1) for index in range(3)]
    assert waiting_for([group("a", *full), group("b", *full[:2], cell(3, 4))]) == [4, 3]


def test_whoever_it_cannot_be_told_of_is_not_blamed() -> None:
    assert waiting_for([group("a", cell(0, 1), cell(1, 2))]) == [None]
    failed = SampleCell(index=1, state="failed", producer=2)
    assert waiting_for([group("a", cell(0, 1), failed, size=2)]) == [None]


def test_who_took_a_request_is_waited_for() -> None:
    asked = SampleCell(index=1, state="asked", producer=2, taken_by=7)
    assert waiting_for([group("a", cell(0, 1), asked, size=2)]) == [7]


def test_a_bus_that_stands_still_blames_no_producer_for_a_slow_judge(bus_name: str) -> None:
    with ends_of(Bus.create(bus_name, "1MiB"), label="judge.py") as (producer, consumer):
        producer.put("q", group_size=1, index=0, score=1.0, tokens=[1])
        (held,) = consumer.take(1, 10)
        watcher = Watcher(bus_name, groups=10)
        watcher.poll()
        first = watcher.still_s
        wait_until(lambda: watcher.poll() or watcher.still_s > first, what="time in which it stood")
        assert watcher.idle_s.keys() == {1}
        for still_s, level in ((61.0, "note"), (700.0, "trouble")):
            found = judge(read_status(bus_name), still_s=still_s)
            assert (found.level, found.findings[0].kind) == (level, "still")
            assert found.findings[0].who == [f"judge.py (pid {os.getpid()})"]
        held.ack()


@pytest.mark.parametrize("with_daemon", [False, True])
def test_sources_agree(bus_name: str, daemon: Callable[..., object], with_daemon: bool) -> None:
    if with_daemon:
        daemon("--capacity", "4MiB", "--sample-retries", "2")
    bus = None if with_daemon else Bus.create(bus_name, "4MiB")
    try:
        with Producer(bus_name) as producer:
            producer.put("a", group_size=4, index=2, score=0.5, tokens=[1])
            producer.put("a", group_size=4, index=0, score=0.25, tokens=[1])
            producer.put("b\x1b[31m", group_size=2, index=1, score=1.0, tokens=[1], round=3)
            producer.fail("b\x1b[31m", group_size=2, index=0, reason="the tool\x07 died", round=3)
            found = wait_until(
                lambda: (
                    (groups := read_groups(bus_name)).source
                    == ("daemon" if with_daemon else "records")
                    and len(groups.groups) == 2
                    and len(groups.groups[1].cells) == 2
                    and groups
                ),
                what="two groups",
            )
        first, second = found.groups
        assert [(c.index, c.score) for c in first.cells] == [(0, 0.25), (2, 0.5)]
        assert {c.producer for c in first.cells} == {
            read_status(bus_name).producers[-1].producer_id
        }
        assert (first.size, first.present, second.round) == (4, 2, 3)
        assert second.instance_id == "b\\x1b[31m"
        failed = second.cells[0]
        assert failed.state == ("asked" if with_daemon else "failed")
        assert (failed.reason, failed.attempts) == ("the tool\\x07 died", 1)
    finally:
        if bus is not None:
            bus.close()


def test_a_bounded_answer_counts_omissions(bus_name: str, daemon: Callable[..., object]) -> None:
    daemon("--capacity", "32MiB")
    with Producer(bus_name) as producer:
        for number in range(40):
            producer.put_many(
                [
                    {"instance_id": f"q{number}", "group_size": 513, "index": index, "score": 0.0,
                     "tokens": [1]}
                    for index in range(512)
                ]
            )  # fmt: skip
    found = wait_until(
        lambda: len((groups := read_groups(bus_name)).groups) + groups.omitted == 40 and groups,
        what="40 groups",
    )
    assert found.omitted > 0
    shown = sum(len(each.cells) for each in found.groups)
    assert shown + sum(each.cells_omitted for each in found.groups) == 512 * len(found.groups)
    few = read_groups(bus_name, 3)
    assert (len(few.groups), few.omitted) == (3, 37)


@pytest.mark.parametrize("with_daemon", [False, True])
def test_groups_say_needs(bus_name: str, daemon: Callable[..., object], with_daemon: bool) -> None:
    bus = None if with_daemon else Bus.create(bus_name, "4MiB")
    if with_daemon:
        daemon("--capacity", "4MiB")
    with Producer(bus_name) as producer:
        for split, need in (("eval", 3), ("train", 4)):
            producer.put(
                "q", group_size=4, need=need, index=0, score=1.0, tokens=[1], split=split, round=7
            )
        found = wait_until(
            lambda: len((groups := read_groups(bus_name)).groups) == 2 and groups, what="two groups"
        )
    assert [(each.split, each.need, each.round) for each in found.groups] == [
        ("eval", 3, 7), ("train", 4, 7)
    ]  # fmt: skip
    assert waiting_for(found.groups) == [None, None]
    if bus is not None:
        bus.close()


def test_too_many_records_are_left_out_and_said(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        for index in range(3):
            producer.put("q", group_size=4, index=index, score=1.0, tokens=[1])
        found = read_groups(bus_name, walk_records=2)
        assert (found.source, found.groups) == ("none", [])
        assert "3 undelivered trajectories are more than the 2" in found.problem


def test_the_command_line_says_it_too(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        producer.put("q", group_size=3, index=1, score=1.0, tokens=[1])
        producer.fail("q", group_size=3, index=0, reason="boom")
        told = cli("inspect", bus_name)
        assert told.status == 0
        assert "x#." in told.out and "failed: q[0], once: boom" in told.out
        found = cli("inspect", bus_name, "--groups", "5", "--json").json()
        assert found["groups"][0]["cells"][0]["state"] == "failed"
        told = cli("status", bus_name, "--json").json()
        assert told["verdict"]["findings"][0]["kind"] == "nobody_reads"
        status = read_status(bus_name)
        relay = replace(status.collector, label="shmbus relay", pid=7)
        assert "shmbus relay" in judge(replace(status, collector=relay)).findings[0].advice


def test_failures_alike_are_one_line(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        for number in range(5):
            producer.put(f"p{number}", group_size=8, index=0, score=1.0, tokens=[1])
            for index in range(1, 7):
                producer.fail(f"p{number}", index, "timed out", group_size=8)
        for text in (groups_text(read_groups(bus_name)), status_text(read_status(bus_name))):
            (line,) = [line for line in text.splitlines() if "failed: " in line]
            assert line == "  failed: p0[1], p0[2], p0[3] and 27 more, once: timed out"


@pytest.mark.parametrize(("omitted", "least"), [(0, ""), (1, "at least ")])
def test_counts_of_the_oldest_groups_alone_are_lower_bounds(
    omitted: int, least: str, bus_name: str
) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        status, number = read_status(bus_name), producer.producer_id
    waiting = [group(f"p{at}", cell(0, number), cell(1, number)) for at in range(2)]
    failed = SampleCell(index=1, producer=number, state="asked", reason="timed out")
    failing = [group(f"q{at}", cell(0, number), failed, size=2) for at in range(4)]
    for groups, said in (
        (waiting, f"is the slowest: {least}2 groups wait for it alone"),
        (failing, f"{least.capitalize()}4 samples failed, 4 of them alike"),
    ):
        found = judge(status, groups, omitted=omitted).findings
        assert any(said in finding.what for finding in found), found


def test_a_trainers_wait_is_counted(bus_name: str, daemon: Callable[..., object]) -> None:
    daemon("--capacity", "1MiB")

    def waited() -> float:
        status: BusStatus = read_status(bus_name)
        assert status.daemon is not None
        return max((lease.waited_s for lease in status.daemon.leases), default=0.0)

    with Consumer(bus_name) as taker, Producer(bus_name) as producer:
        assert taker.take(timeout=0.2) == []
        before = wait_until(waited, what="time that was waited")
        producer.put("q", group_size=1, index=0, score=1.0, tokens=[1])
        (taken,) = taker.take(timeout=5.0)
        assert before >= 0.2
        taken.ack()


def test_a_worker_that_gives_back_is_a_finding_until_it_works(bus_name: str) -> None:
    with (
        Bus.create(bus_name, "1MiB"),
        Consumer(bus_name) as taker,
        Producer(bus_name, label="away") as away,
        Producer(bus_name, label="works") as works,
    ):
        taker.request("q", group_size=4)
        away.requests.release(away.requests.next(timeout=5.0), reason="engine away")
        works.requests.next(timeout=5.0)
        [found] = [each for each in said(bus_name).findings if each.kind == "worker_held"]
        assert len(found.who) == 1 and found.who[0].startswith("away (pid ")
        assert (found.cause, found.cost) == ("engine away", pytest.approx(0.4))
        away.requests.next(timeout=5.0)
        assert "worker_held" not in [each.kind for each in said(bus_name).findings]


@pytest.mark.parametrize(
    ("gap_share", "clipped", "kinds"),
    [
        (0.5, 0.05, ["precision_gap"]),
        (0.49, 0.9, []),
        (1.0, 0.04, []),
        (None, 0.9, []),
        (0.9, None, []),
    ],
)
def test_rounding_is_an_obstacle_where_it_dominates_and_clips(
    bus: Bus, gap_share: float | None, clipped: float | None, kinds: list[str]
) -> None:
    measured = MismatchStatus(policy_version=1, gap_share=gap_share, clipped=clipped)
    with Producer(bus.name), Consumer(bus.name):
        status = replace(read_status(bus.name), mismatch=measured)
    verdict = judge(status)
    assert [finding.kind for finding in verdict.findings] == kinds
    assert not any("Engine" in finding.what for finding in verdict.findings)
    assert not judge(status, wants="groups").findings
