"""Failed samples over real processes: asked for again, alone; no failing prompt stops a run."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Daemon, Spawner, ends_of, take_groups, wait_until, work_until
from operators import cli

import shmbus
from shmbus import Bus, Consumer, Group, Producer, Request
from shmbus.inspect.status import read_status

Serve = Callable[..., Daemon]
Reader = Callable[..., Consumer]

# Puts prompts of four; each third sample of `poison` fails, at every attempt.
WORKER = """
import sys, time, numpy as np, shmbus
name, mine, of, prompts = sys.argv[1], *map(int, sys.argv[2:])

def roll_out(producer, key, index):
    if key.startswith("poison") and index == 2:
        producer.fail(key, index, "the environment crashed", group_size=4)
    else:
        producer.put(key, group_size=4, index=index, score=index, x=np.zeros(16), timeout=60)

with shmbus.Producer(name, label=f"worker-{mine}") as producer:
    for number in range(prompts):
        for index in range(mine, 4, of):
            roll_out(producer, "poison" if number == 3 else f"p{number}", index)
    print("done", flush=True)
    while True:
        for wanted in producer.requests.retries(limit=1):
            print(f"again {wanted.instance_id} {wanted.index} {wanted.attempt}", flush=True)
            roll_out(producer, wanted.instance_id, wanted.index)
        time.sleep(0.005)
"""

# Takes a wanted sample, reports, and never answers.
TAKER = """
import sys, time, shmbus
producer = shmbus.Producer(sys.argv[1], label="taker")
while not (found := producer.requests.retries()):
    time.sleep(0.005)
print("took", *(f"{w.instance_id}/{w.index}/{w.attempt}" for w in found), flush=True)
time.sleep(600)
"""


def put(producer: Producer, key: str, *indices: int, round: int | None = None) -> None:
    for index in indices:
        producer.put(key, group_size=4, index=index, score=float(index), round=round, x=np.ones(8))


def wanted(consumer: Consumer, producer: Producer, count: int = 1) -> list[Request]:
    found: list[Request] = []

    def have_come() -> bool:
        found.extend(producer.requests.retries())
        return len(found) >= count

    work_until(consumer, have_come)
    return found


@pytest.mark.parametrize("sized", [True, False])
def test_a_failed_sample_that_nobody_offered_is_answered_as_a_request(
    reader: Reader, bus_name: str, sized: bool
) -> None:
    consumer = reader(sample_retries=3)
    with Producer(bus_name) as producer:
        producer.fail("a", 0, "first", group_size=2 if sized else None)
        [asked] = wanted(consumer, producer)
        assert producer.requests.is_wanted(asked) and producer.requests.release(asked)
        assert not producer.requests.is_wanted(asked)
        [asked] = wanted(consumer, producer)
        assert producer.requests.fail(asked, "second")
        [asked] = wanted(consumer, producer)
        assert (asked.attempt, asked.reason) == (2, "second")
        assert asked.group_size == (2 if sized else 0)
        more = {} if sized else {"group_size": 2}
        assert producer.requests.answer(asked, score=1.0, x=np.ones(8), **more)
        assert not producer.requests.is_wanted(asked)
        producer.put("a", group_size=2, index=1, x=np.ones(8))
        [group] = take_groups(consumer, 1)
        assert [sample.score for sample in group] == [1.0, 0.0]


@pytest.fixture(params=["embedded", "daemon"])
def reader(request: pytest.FixtureRequest, bus_name: str) -> Iterator[Reader]:
    """Makes a bus with a consumer of these options, or a daemon."""
    made: list[Any] = []

    def make(**options: Any) -> Consumer:
        if request.param == "daemon":
            flags = [
                str(part)
                for name, value in options.items()
                for part in ("--" + name.replace("_", "-"), value)
            ]
            request.getfixturevalue("daemon")("--capacity", "4MiB", *flags)
            made.append(Consumer(bus_name))
        else:
            made.append(Bus.create(bus_name, "4MiB"))
            made.append(Consumer(bus_name, **options))
        consumer: Consumer = made[-1]
        return consumer

    yield make
    for each in made:
        each.close()


def test_one_prompt_that_always_fails_does_not_stop_the_run(
    reader: Reader, bus_name: str, spawn: Spawner
) -> None:
    consumer = reader(sample_retries=2)
    workers = [spawn.script(WORKER, bus_name, mine, 2, 20) for mine in range(2)]
    groups = take_groups(consumer, 19)
    assert sorted(g.instance_id for g in groups) == sorted(f"p{n}" for n in range(20) if n != 3)
    wait_until(lambda: consumer.take(timeout=0.01) or consumer.stats().groups_given_up == 1)
    consumer.ack(groups)
    ledger = consumer.stats()
    assert ledger.balanced and ledger.acknowledged == 76
    # Its three good samples, and the report of each of the three attempts.
    assert ledger.dropped == {"failed": 6} and ledger.samples_wanted == 0
    assert (ledger.stashed, ledger.leased, ledger.in_ring) == (0, 0, 0)
    assert groups[0].complete and not any(t.failed for g in groups for t in g.trajectories)
    again = [line for w in workers for line in w.output().splitlines() if "again" in line]
    assert sorted(again) == ["again poison 2 1", "again poison 2 2"]
    status = read_status(bus_name)
    assert status.groups_given_up == 1 and status.ledger.balanced


def test_an_aborted_sample_is_asked_for_alone_and_its_group_completes(
    reader: Reader, bus_name: str
) -> None:
    consumer = reader(sample_retries=1)
    with Producer(bus_name) as first, Producer(bus_name) as second:
        put(first, "a", 0, 1, 3)
        slot = first.reserve("a", group_size=4, index=2, fields={"x": ("f8", 8)})
        with pytest.raises(MemoryError), slot:
            raise MemoryError
        first.fail("a", 2, "out of memory", group_size=4)
        (asked,) = wanted(consumer, second)
        assert (asked.instance_id, asked.round, asked.index, asked.split) == ("a", None, 2, "train")
        assert (asked.group_size, asked.need) == (4, 4)
        assert (asked.attempt, asked.reason, asked.fields) == (1, "out of memory", {})
        assert first.requests.retries() == second.requests.retries() == []  # handed out once
        put(second, "a", 2)
        (group,) = take_groups(consumer, 1)
        assert [t.index for t in group] == [0, 1, 2, 3] and group.complete
        assert [t.producer_id for t in group] == [first.producer_id] * 2 + [
            second.producer_id, first.producer_id
        ]  # fmt: skip
        group.ack()
        ledger = consumer.stats()
        assert ledger.balanced and ledger.dropped == {"failed": 1} and ledger.acknowledged == 4
        assert wait_until(lambda: consumer.take(timeout=0.01) == [] == second.requests.retries())


def test_a_sample_whose_taker_is_killed_is_asked_for_again(
    reader: Reader, bus_name: str, spawn: Spawner
) -> None:
    consumer = reader(sample_retries=2)
    with Producer(bus_name) as producer:
        put(producer, "a", 0, 1, 3)
        producer.fail("a", 2, "flaky", group_size=4)
        taker = spawn.script(TAKER, bus_name)
        wait_until(lambda: consumer.take(timeout=0.01) or "took a/2/1" in taker.output())
        assert producer.requests.retries() == []
        taker.kill()
        (again,) = wanted(consumer, producer)
        assert (again.instance_id, again.index, again.attempt) == ("a", 2, 2)
        assert "died" in again.reason
        put(producer, "a", 2)
        (group,) = take_groups(consumer, 1)
        group.ack()
        assert consumer.stats().balanced


def test_a_taker_that_leaves_in_order_uses_up_nothing(reader: Reader, bus_name: str) -> None:
    consumer = reader(sample_retries=1)
    with Producer(bus_name) as producer:
        producer.fail("a", 2, "flaky", group_size=4)
        with Producer(bus_name) as leaver:
            assert [w.attempt for w in wanted(consumer, leaver)] == [1]
            assert producer.requests.retries() == []
        assert [w.attempt for w in producer.requests.retries()] == [1]
        left = Producer(bus_name)
        producer.fail("b", 0, "flaky", group_size=4)
        assert [w.instance_id for w in wanted(consumer, left)] == ["b"]
        del left  # like an ending process
        assert [w.attempt for w in wanted(consumer, producer)] == [1]


def test_more_failures_than_rows_are_all_asked_for(reader: Reader, bus_name: str) -> None:
    consumer = reader(sample_retries=1)
    count = 300
    with Producer(bus_name) as producer:
        for number in range(count):
            put(producer, f"p{number}", 0, 1, 3)
            producer.fail(f"p{number}", 2, "flaky", group_size=4)
        groups: list[Group] = []

        def answer() -> bool:
            for sample in producer.requests.retries(limit=20):
                put(producer, sample.instance_id, sample.index)
            groups.extend(consumer.take(timeout=0.01))
            return len(groups) == count

        wait_until(answer)
        consumer.ack(groups)
        assert consumer.stats().dropped == {"failed": count} and consumer.stats().balanced


# --- deaths of the collector

CONSUMER = """
import sys, time, shmbus
consumer = shmbus.Consumer(sys.argv[1], sample_retries=3)
while True:
    consumer.take(timeout=0.01)
"""


def test_a_new_collector_finds_what_failed_and_who_has_taken_what(
    bus_name: str, spawn: Spawner
) -> None:
    with Bus.create(bus_name, "4MiB"), Producer(bus_name) as producer:
        put(producer, "a", 0, 1, 3)
        put(producer, "b", 0, 1, 3)
        old = spawn.script(CONSUMER, bus_name)
        for key in "ab":
            producer.fail(key, 2, f"flaky {key}", group_size=4)
        taker = Producer(bus_name, label="taker")
        assert wait_until(lambda: taker.requests.retries(limit=1))[0].instance_id == "a"
        # The other's taker dies, without a trace in the ring.
        doomed = spawn.script(TAKER, bus_name, until="took b/2/1")
        doomed.kill()
        wait_until(lambda: [w.attempt for w in read_status(bus_name).wanted] == [1, 2])
        old.kill()
        with Consumer(bus_name, sample_retries=3) as consumer:
            (again,) = wanted(consumer, producer)
            assert (again.instance_id, again.attempt) == ("b", 2)
            taken = [(w.instance_id, w.taken_by) for w in read_status(bus_name).wanted]
            assert taken == [("a", taker.producer_id), ("b", producer.producer_id)]
            put(taker, "a", 2)
            put(producer, "b", 2)
            assert {g.instance_id for g in take_groups(consumer, 2)} == {"a", "b"}
            assert consumer.stats().balanced
        taker.close()


def test_a_request_whose_sample_came_while_nobody_collected_is_withdrawn(
    bus_name: str, spawn: Spawner
) -> None:
    with Bus.create(bus_name, "4MiB"), Producer(bus_name) as producer:
        put(producer, "a", 0, 1, 3)
        old = spawn.script(CONSUMER, bus_name)
        producer.fail("a", 2, "flaky", group_size=4)
        wait_until(producer.requests.retries)
        old.kill()
        put(producer, "a", 2)
        with Consumer(bus_name, sample_retries=3) as consumer:
            (group,) = take_groups(consumer, 1)
            assert consumer.take(timeout=0.01) == [] == producer.requests.retries()
            assert read_status(bus_name).wanted == []
            group.ack()
            assert consumer.stats().balanced


def test_a_collector_that_asks_for_nothing_withdraws_what_another_asked_for(
    bus_name: str, spawn: Spawner
) -> None:
    with Bus.create(bus_name, "4MiB"), Producer(bus_name) as producer:
        put(producer, "a", 0, 1, 3)
        old = spawn.script(CONSUMER, bus_name)
        producer.fail("a", 2, "flaky", group_size=4)
        wait_until(lambda: read_status(bus_name).wanted)
        old.kill()
        with Consumer(bus_name) as consumer:
            wait_until(lambda: consumer.take(timeout=0.01) or consumer.stats().dropped)
            assert consumer.stats().dropped == {"failed": 4} and producer.requests.retries() == []
            assert consumer.stats().groups_given_up == 1


def test_a_killed_daemon_asks_on(daemon: Serve, bus_name: str) -> None:
    served = daemon("--capacity", "4MiB", "--sample-retries", "2")
    with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
        put(producer, "a", 0, 1, 3)
        producer.fail("a", 2, "flaky", group_size=4)
        (sample,) = wanted(consumer, producer)
        served.kill()
        daemon("--sample-retries", "2")
        put(producer, "a", sample.index)
        (group,) = take_groups(consumer, 1)
        assert group.complete
        group.ack()
        wait_until(lambda: consumer.stats().dropped == {"failed": 1})
        assert consumer.stats().balanced


def test_a_stopped_taker_does_not_stop_the_bus(bus_name: str, spawn: Spawner) -> None:
    bus = Bus.create(bus_name, "4MiB")
    with ends_of(bus, sample_retries=999, retry_timeout=0.5) as (producer, consumer):
        producer.fail("a", 0, "flaky", group_size=1)
        taker = spawn.script(TAKER, bus_name)
        # A slow machine gives the taker a later attempt than the first.
        wait_until(lambda: consumer.take(timeout=0.01) or "took a/0/" in taker.output())
        os.kill(taker.pid, signal.SIGSTOP)
        taken = int(taker.output().split("took a/0/")[1].split()[0])
        (again,) = wanted(consumer, producer)
        assert again.attempt > taken and "after it was asked for" in again.reason
        producer.put("a", group_size=1, index=0)
        assert len(take_groups(consumer, 1)) == 1


# --- the operators' view


def test_status_names_what_failed_and_who_has_been_asked(reader: Reader, bus_name: str) -> None:
    consumer = reader(sample_retries=1)
    with Producer(bus_name) as producer:
        put(producer, "a", 0, 1)
        producer.fail("a", 2, "bad \x1b[31m tool call", group_size=4)
        (sample,) = wanted(consumer, producer)
        status = cli("status", bus_name, "--json").json()
        (group,) = status["oldest_incomplete"]
        assert (group["present"], group["size"]) == (2, 4)
        (failed,) = (cell for cell in group["cells"] if cell.get("state") == "asked")
        assert (failed["index"], failed["attempts"]) == (2, 1)
        assert failed["reason"] == "bad \\x1b[31m tool call"
        (asked,) = status["wanted"]
        assert asked["taken_by"] == producer.producer_id and asked["attempt"] == 1
        assert asked["index"] == sample.index and asked["reason"] == failed["reason"]
        assert status["ledger"]["balanced"] and status["ledger"]["stashed"] == 3
        shown = cli("status", bus_name)
        assert shown.status == 0
        assert "failed: a[2], once: bad \\x1b[31m tool call" in shown.out
        assert f"producer {producer.producer_id}" in shown.out and "\x1b" not in shown.out
        ledger = consumer.stats()
        assert ledger.samples_wanted == 1 and ledger.stashed == 3 and ledger.balanced


def test_a_stall_report_names_the_failed_sample(reader: Reader, bus_name: str) -> None:
    reader(sample_retries=1).close()
    with (
        Producer(bus_name) as producer,
        Consumer(bus_name, on_stall="raise", stall_timeout=0.2, sample_retries=1) as consumer,
    ):
        put(producer, "a", 0, 1, 3)
        producer.fail("a", 2, "the sandbox is gone", group_size=4)
        assert wait_until(lambda: consumer.take(timeout=0) == [] and read_status(bus_name).wanted)
        with pytest.raises(shmbus.StallError, match=r"(?s)a\[2\].*the sandbox is gone"):
            consumer.take(timeout=None)


# --- snapshots and errors


def test_reports_survive_a_snapshot(bus_name: str, tmp_path: Path) -> None:
    with Bus.create(bus_name, "4MiB") as bus:
        with Producer(bus_name) as producer:
            put(producer, "a", 0, 1, 3)
            producer.fail("a", 2, "flaky", group_size=4)
            producer.fail("b", 1, "flaky too")
        assert cli("snapshot", bus_name, str(tmp_path / "s")).status == 0
        bus.unlink()
    assert cli("restore", str(tmp_path / "s")).status == 0
    with Producer(bus_name) as producer, Consumer(bus_name, sample_retries=1) as consumer:
        found = wanted(consumer, producer, 2)
        # In either order: each waits for its own backoff.
        assert {(w.instance_id, w.index, w.group_size, w.reason) for w in found} == {
            ("a", 2, 4, "flaky"), ("b", 1, 0, "flaky too"),
        }  # fmt: skip
        put(producer, "a", 2)
        (group,) = take_groups(consumer, 1)
        assert group.complete and consumer.stats().balanced
    shmbus.unlink(bus_name)


def test_a_full_bus_is_an_answer_to_a_report_too(bus_name: str) -> None:
    with Bus.create(bus_name, "128KiB", max_producers=2), Producer(bus_name) as producer:
        with pytest.raises(shmbus.BusFullError):
            for number in range(100_000):
                producer.fail(f"p{number}", 0, "x" * 500, group_size=1, timeout=0)
        with Consumer(bus_name) as consumer:
            assert consumer.take(timeout=0.2) == []
            producer.fail("more", 0, "x", group_size=1, timeout=10)
            assert consumer.take(timeout=0.2) == []
            ledger = consumer.stats()
            assert ledger.balanced and ledger.dropped["failed"] == ledger.committed
