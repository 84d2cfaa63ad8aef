"""The daemon's memory: arrivals and deaths, ends of groups, places of open groups."""

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Daemon, Spawner, wait_until
from operators import cli, usage

from shmbus import Bus, Consumer, Producer
from shmbus.daemon.history import GROUP_EVENTS, OTHER_EVENTS, Events, ProducerWatch
from shmbus.inspect.history import read_events, read_group
from shmbus.inspect.status import read_status

Start = Callable[..., Daemon]


def put(producer: Producer, key: str, indices: range, size: int = 4, **more: Any) -> None:
    for index in indices:
        producer.put(key, group_size=size, index=index, score=index % 2, tokens=[1], **more)


def kinds(name: str) -> list[tuple[str, str]]:
    return [(event.kind, event.instance_id) for event in read_events(name, limit=500).events]


def events_of(name: str, key: str) -> list[str]:
    return [event.kind for event in read_group(name, key).events]


def test_a_group_is_told_from_its_first_sample_to_its_end(bus_name: str, daemon: Start) -> None:
    daemon("--capacity", "2MiB", "--sample-retries", "1")
    with Producer(bus_name, label="w0") as producer, Consumer(bus_name, label="train.py") as taker:
        put(producer, "q", range(2))
        producer.fail("q", 2, "out of memory", group_size=4)
        found = wait_until(
            lambda: (g := read_group(bus_name, "q")).events and g, what="the failed sample"
        )
        assert found.state == "open" and found.group is not None
        states = [(cell.index, cell.state) for cell in found.group.cells]
        assert states == [(0, "there"), (1, "there"), (2, "asked")]
        assert found.group.cells[2].reason == "out of memory"
        [event] = found.events
        assert (event.kind, event.index, event.count) == ("asked", 2, 1)
        assert event.text == "out of memory" and event.who.startswith("w0 (pid ")
        [wanted] = wait_until(lambda: producer.requests.retries(), what="the request")
        put(producer, "q", range(2, 4))
        assert wanted.index == 2
        wait_until(lambda: read_group(bus_name, "q").state == "ready", what="a complete group")
        [group] = taker.take(timeout=10)
        found = read_group(bus_name, "q")
        assert (found.state, found.holder[:9]) == ("leased", "train.py ")
        assert found.group is not None and found.group.present == 4
        group.give_back()
        wait_until(lambda: read_group(bus_name, "q").state == "ready", what="it to be ready again")
        [group] = taker.take(timeout=10)
        group.ack()
        wait_until(lambda: read_group(bus_name, "q").state == "gone", what="its end")
    story = ["asked", "leased", "given_back", "leased", "acknowledged"]
    assert [kind for kind in events_of(bus_name, "q") if kind != "dropped"] == story


def test_a_drop_names_its_reason_and_who_did_it(bus_name: str, daemon: Start) -> None:
    daemon("--capacity", "2MiB", "--skip-zero-variance")
    with Producer(bus_name) as producer, Consumer(bus_name, label="train.py") as taker:
        put(producer, "refused", range(4))
        [group] = taker.take(timeout=10)
        group.drop()
        for index in range(2):
            producer.put("flat", group_size=2, index=index, score=1.0, tokens=[1])
        wait_until(lambda: events_of(bus_name, "flat"), what="the drop")
    [leased, dropped] = read_group(bus_name, "refused").events
    assert (leased.kind, dropped.kind, dropped.text) == ("leased", "dropped", "malformed")
    assert dropped.who.startswith("train.py (pid ")
    [flat] = read_group(bus_name, "flat").events
    assert (flat.kind, flat.text, flat.who, flat.count) == ("dropped", "zero_variance", "", 2)


SLEEPER = """
import sys, time, shmbus
producer = shmbus.Producer(sys.argv[1], label="victim")
print("ready", flush=True)
time.sleep(600)
"""


def test_who_leaves_is_told_from_who_is_killed(
    bus_name: str, daemon: Start, spawn: Spawner
) -> None:
    daemon("--capacity", "2MiB")
    child = spawn.script(SLEEPER, bus_name, until="ready")
    wait_until(lambda: ("producer_came", "") in kinds(bus_name), what="who came")
    child.kill()
    wait_until(lambda: ("producer_died", "") in kinds(bus_name), what="who died")
    with Producer(bus_name, label="orderly"):
        wait_until(lambda: kinds(bus_name).count(("producer_came", "")) == 2, what="who came")
    wait_until(lambda: ("producer_left", "") in kinds(bus_name), what="who left")
    assert ("producer_gone", "") not in kinds(bus_name)


def test_pauses_versions_and_trainers_are_told(bus_name: str, daemon: Start) -> None:
    daemon("--capacity", "2MiB")
    with Consumer(bus_name, label="train.py") as taker, Bus.open(bus_name) as bus:
        taker.policy_version = 7
        bus.pause("new weights")
        wait_until(lambda: ("paused", "") in kinds(bus_name), what="the pause")
        bus.resume()
        wait_until(lambda: ("resumed", "") in kinds(bus_name), what="its end")
    wait_until(lambda: ("trainer_left", "") in kinds(bus_name), what="the trainer's end")
    by_kind = {event.kind: event for event in read_events(bus_name).events}
    assert by_kind["paused"].text == "new weights"
    assert by_kind["policy_version"].text == "7"
    assert by_kind["trainer_came"].who.startswith("train.py (pid ")


def test_the_command_says_the_same(bus_name: str, daemon: Start) -> None:
    daemon("--capacity", "2MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as taker:
        put(producer, "q", range(4))
        [group] = taker.take(timeout=10)
        assert cli("events", bus_name, "--json").json()["events"][-1]["kind"] == "leased"
        group.ack()
        assert cli("events", bus_name, "--json").json()["events"][-1]["kind"] == "acknowledged"
        assert "q  acknowledged by" in cli("events", bus_name).out
        told = cli("events", bus_name, "--group", "q", "--json").json()
        assert (told["state"], told["source"]) == ("gone", "daemon")
        # A split that the bus does not have ends no daemon.
        for split in ("eval", "eval"):
            assert read_group(bus_name, "q", split=split).source == "daemon"
    assert usage("events", bus_name, "--limit", "0").status == 2


def test_without_a_daemon_a_group_is_told_by_its_records(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        put(producer, "q", range(2), round=3)
        found = read_group(bus_name, "q", round=3)
        assert (found.source, found.state) == ("records", "open")
        assert found.group is not None and found.group.present == 2
        assert "shmbus serve" in found.problem
        assert read_group(bus_name, "q").state == "gone"
        done = cli("events", bus_name)
        assert done.status == 1 and "kept by a daemon" in done.err
        done = cli("events", bus_name, "--group", "q", "--round", "3")
        assert done.status == 0 and "2 of 4 samples" in done.out


def test_texts_of_producers_steer_no_terminal(bus_name: str, daemon: Start) -> None:
    daemon("--capacity", "1MiB")
    evil = "a\x1b[31m\u202eb"
    with Producer(bus_name, label=evil) as producer:
        producer.fail(evil, 0, evil, group_size=1)
        wait_until(lambda: read_group(bus_name, evil).events, what="the failure")
    for arguments in ((), ("--group", evil)):
        printed = cli("events", bus_name, *arguments).out
        assert "failed" in printed and "\x1b" not in printed.replace(evil, "")


def test_trainers_of_a_daemon_are_counted_while_they_wait(bus_name: str, daemon: Start) -> None:
    daemon("--capacity", "1MiB")
    with Consumer(bus_name) as taker:
        assert taker.take(timeout=0.3) == []
    wait_until(lambda: read_status(bus_name).waited.trainers_s >= 0.25, what="what it waited")


# -- pure ---------------------------------------------------------------------------------------


@pytest.fixture
def events(bus_name: str) -> Any:
    with Bus.create(bus_name, "1MiB") as bus:
        yield Events(bus._segment)


def test_what_is_kept_is_bounded_and_groups_push_out_no_deaths(events: Events) -> None:
    events.note("producer_died", "w0")
    for number in range(GROUP_EVENTS + 100):
        events.note_group("leased", f"q{number}", "train.py", count=8)
    found, newest, missed = events.read(0, 10)
    assert [event.instance_id for event in found] == [
        f"q{number}" for number in range(GROUP_EVENTS + 90, GROUP_EVENTS + 100)
    ]
    assert (newest, missed) == (GROUP_EVENTS + 101, GROUP_EVENTS + 91)
    everything, _, missed = events.read(0, 10**6)
    assert everything[0].kind == "producer_died" and missed == 100
    for _ in range(OTHER_EVENTS):
        events.note("paused")
    assert events.read(0, 10**6)[0][0].kind == "leased"


def test_versions_that_follow_each_other_are_one_event_and_push_out_no_deaths(
    events: Events,
) -> None:
    events.note("producer_died", "w0")
    for version in range(1, OTHER_EVENTS + 100):
        events.note_version(version)
        events.note_group("leased", f"q{version}", "train.py", count=8)
    told = [(e.kind, e.text) for e in events.read(0, 3, groups=False)[0]]
    last = OTHER_EVENTS + 99
    assert told == [("producer_died", ""), ("policy_version", f"1 to {last}")]
    # A version that goes back begins a new line, as does a version behind a different event.
    events.note_version(7)
    events.note("paused", text="weights")
    events.note_version(8)
    told = [(e.kind, e.text) for e in events.read(0, 5, groups=False)[0]]
    assert told[1:] == [
        ("policy_version", f"1 to {last}"), ("policy_version", "7"), ("paused", "weights"),
        ("policy_version", "8"),
    ]  # fmt: skip


def test_who_follows_is_told_the_versions_that_are_new_and_misses_none(events: Events) -> None:
    after, noted, told = 0, 0, []
    for upto in (1, 2, 5, 6):
        for version in range(noted + 1, upto + 1):
            events.note_version(version)
        noted = upto
        found, after, missed = events.read(after, 10)
        assert missed == 0
        told += [event.text for event in found]
    assert told == ["1", "2", "3 to 5", "6"]


def test_a_number_of_an_earlier_daemon_begins_anew(events: Events) -> None:
    events.note("daemon_began")
    found, newest, missed = events.read(10**9, 10)
    assert ([event.kind for event in found], newest, missed) == (["daemon_began"], 1, 0)
    assert events.read(newest, 10) == ([], 1, 0)


def test_a_slot_that_is_taken_again_at_once_is_two_producers(bus_name: str) -> None:
    watch = ProducerWatch()
    with Bus.create(bus_name, "1MiB", max_producers=1) as bus:
        segment = bus._segment
        watch.look(segment, 0)
        with Producer(bus_name, label="one"):
            assert [kind for kind, _ in watch.look(segment, 0)] == ["producer_came"]
            assert watch.look(segment, 0) == ()
        with Producer(bus_name, label="two"):
            told = list(watch.look(segment, 0))
    # Nobody looked at the first's close: it left or died.
    assert sorted(kind for kind, _ in told) == ["producer_came", "producer_gone"]
