"""The watchdog: a waiter on a bus without movement learns of it, and of the cause."""

import asyncio
import itertools
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from conftest import Daemon, Spawner, ends_of, together, wait_until

import shmbus
from shmbus import Bus, Consumer, Producer, StallError, StallReport
from shmbus.base import limits
from trainer_adapter import OnlineDataHandler

Served = Callable[..., Daemon]

#: Short beside any deadline here; the watch looks four times within.
PERIOD_S = 0.2


@pytest.fixture(params=["embedded", "daemon"])
def served(request: pytest.FixtureRequest, bus_name: str) -> Iterator[str]:
    if request.param == "daemon":
        request.getfixturevalue("daemon")("--capacity", "2MiB")
        yield bus_name
    else:
        with Bus.create(bus_name, "2MiB"):
            yield bus_name


def put(producer: Producer, key: str, *indices: int, size: int = 4) -> None:
    for index in indices:
        producer.put(key, group_size=size, index=index, tokens=np.arange(8, dtype=np.int32))


def test_a_consumer_says_who_is_missing(served: str, caplog: pytest.LogCaptureFixture) -> None:
    with Producer(served, label="worker-3") as producer:
        put(producer, "gsm8k-17", 0, 1, 3)
        with (
            Consumer(served, on_stall="log", stall_timeout=PERIOD_S) as consumer,
            caplog.at_level(logging.WARNING, "shmbus.stall"),
        ):
            wait_until(lambda: consumer.take(timeout=2 * PERIOD_S) or caplog.records)
    said = caplog.records[0].getMessage()
    assert "nothing has moved for" in said and "waits for a complete group" in said
    assert "gsm8k-17" in said and "3 of 4" in said and "worker-3" in said
    report = caplog.records[0].args[0]  # type: ignore[index]
    assert isinstance(report, StallReport) and report.status is not None
    assert report.bus == served and report.stalled_s >= PERIOD_S
    (group,) = report.status.oldest_incomplete
    assert (group.instance_id, group.present, group.missing) == ("gsm8k-17", 3, [2])
    (producing,) = report.status.producers
    assert producing.state == "alive" and producing.reservations == 0
    assert producing.idle_s is not None and producing.idle_s >= PERIOD_S


def test_a_consumer_that_shall_raise_does_and_can_go_on(served: str) -> None:
    with ends_of(served, on_stall="raise", stall_timeout=PERIOD_S) as (producer, consumer):
        put(producer, "a", 0, 1, 2)
        with pytest.raises(StallError, match=r"(?s)nothing has moved.*3 of 4") as caught:
            consumer.take(timeout=None)
        assert isinstance(caught.value, shmbus.ShmbusError)
        assert str(pickle.loads(pickle.dumps(caught.value)).report) == str(caught.value.report)
        put(producer, "a", 3)
        (group,) = consumer.take(timeout=10)
        group.ack()
        assert consumer.stats().balanced


def test_a_callback_hears_of_each_period_of_a_stall(served: str) -> None:
    reports: list[StallReport] = []

    def hear(report: StallReport) -> None:
        reports.append(report)
        if len(reports) == 3:
            raise KeyboardInterrupt

    with ends_of(served, on_stall=hear, stall_timeout=PERIOD_S) as (producer, consumer):
        put(producer, "a", 0)
        with pytest.raises(KeyboardInterrupt):
            consumer.take(timeout=None)
    assert [r.stalled_s for r in reports] == sorted(r.stalled_s for r in reports)
    assert all(b.stalled_s - a.stalled_s >= PERIOD_S for a, b in itertools.pairwise(reports))


def test_many_short_waits_are_one_long_one(served: str) -> None:
    reports: list[StallReport] = []
    with Consumer(served, on_stall=reports.append, stall_timeout=PERIOD_S) as consumer:
        wait_until(lambda: consumer.take(timeout=0.01) or reports)
    assert reports[0].stalled_s >= PERIOD_S


def test_a_bus_where_others_move_has_not_stalled(served: str) -> None:
    reports: list[StallReport] = []
    with (
        Producer(served) as producer,
        Consumer(served, on_stall=reports.append, stall_timeout=PERIOD_S) as consumer,
    ):
        # Waits shorter than a slice: something moves before each look, on any machine.
        for number in range(50):
            put(producer, f"never-{number}", 0)
            assert consumer.take(timeout=PERIOD_S / 10) == []
    assert reports == []


def test_who_does_not_wait_is_not_told(served: str) -> None:
    reports: list[StallReport] = []
    with Consumer(served, on_stall=reports.append, stall_timeout=PERIOD_S) as consumer:
        for _ in range(4):
            assert consumer.take(timeout=0.01) == []
            time.sleep(1.5 * PERIOD_S)  # a step of the trainer
    assert reports == []


def test_none_says_nothing(served: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Consumer(served, on_stall=None, stall_timeout=PERIOD_S) as consumer,
        caplog.at_level(logging.WARNING),
    ):
        assert consumer.take(timeout=2 * PERIOD_S) == []
    assert not [r for r in caplog.records if r.name == "shmbus.stall"]


def test_a_rank_that_waits_for_its_step_is_told(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "2MiB")
    with (
        Consumer(
            bus_name, rank=0, world_size=2, on_stall="raise", stall_timeout=PERIOD_S
        ) as consumer,
        pytest.raises(StallError, match="this rank's step") as caught,
    ):
        consumer.take_shard(groups=1)
    status = caught.value.report.status
    assert status is not None and status.daemon is not None
    assert [lease.rank for lease in status.daemon.leases] == [0]


def fill(producer: Producer) -> None:
    with pytest.raises(shmbus.BusFullError):
        for number in range(10_000):
            producer.put(f"p{number}", group_size=1, index=0, x=np.zeros(5000), timeout=0)


def test_a_producer_that_waits_for_space_says_who_holds_it(served: str) -> None:
    with (
        Consumer(served, label="trainer-0") as consumer,
        Producer(served, on_stall="raise", stall_timeout=PERIOD_S) as producer,
    ):
        fill(producer)
        groups = consumer.take(1000, timeout=10)
        fill(producer)
        with pytest.raises(StallError, match=r"(?s)waits for space in the ring.*trainer-0") as e:
            producer.put("more", group_size=1, index=0, x=np.zeros(5000))
        status = e.value.report.status
        assert status is not None and status.space_wanted
        assert status.collector.leased_groups >= len(groups)
        with pytest.raises(StallError):
            asyncio.run(producer.aput("more", group_size=1, index=0, x=np.zeros(5000)))
        with pytest.raises(StallError):
            asyncio.run(producer.wait_ready(0.01))
        consumer.ack(groups)
        producer.put("more", group_size=1, index=0, timeout=30)


def test_a_handle_that_travels_takes_its_watchdog_along(bus_name: str) -> None:
    with Bus.create(bus_name, "2MiB"):
        with Producer(bus_name, on_stall="raise", stall_timeout=PERIOD_S) as producer:
            travelled = pickle.loads(pickle.dumps(producer))
        with Consumer(bus_name, on_stall="raise", stall_timeout=PERIOD_S) as consumer:
            sent = pickle.dumps(consumer)
        with pickle.loads(sent) as consumer, pytest.raises(StallError):
            consumer.take(timeout=None)
        with travelled, pytest.raises(StallError):
            fill(travelled)
            travelled.put("a", group_size=1, index=0, x=np.zeros(5000))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_handler_that_waits_in_vain_raises_as_it_was_told(bus_name: str, prefetch: int) -> None:
    with (
        shmbus.Bus.create(bus_name, "2MiB"),
        OnlineDataHandler(
            bus_name, prefetch=prefetch, on_stall="raise", stall_timeout=0.2
        ) as handler,
        pytest.raises(shmbus.StallError, match="nothing has moved"),
    ):
        next(iter(handler))


def wait_together(producers: list[Producer], timeout_s: float) -> list[Exception]:
    raised: list[Exception] = []

    def wait(producer: Producer) -> None:
        try:
            producer.requests.next(timeout_s)
        except StallError as error:
            raised.append(error)

    together(wait, producers)
    return raised


def test_one_worker_logs(bus_name: str, spawn: Spawner, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        stack.enter_context(Bus.create(bus_name, "8MiB", max_producers=40))
        producers = [
            stack.enter_context(Producer(bus_name, label=f"w-{number}", stall_timeout=PERIOD_S))
            for number in range(30)
        ]
        dead = spawn.script(DIES, bus_name)  # started last: the report names the dead first
        dead.wait()
        began_s = time.monotonic()
        with caplog.at_level(logging.WARNING, "shmbus.stall"):
            assert wait_together(producers, 4 * PERIOD_S) == []
        periods = (time.monotonic() - began_s) / PERIOD_S
    reports = [r.args[0] for r in caplog.records if r.name == "shmbus.stall" and r.args]
    assert 1 <= len(reports) <= periods / 0.9 + 1
    report = reports[0]
    assert isinstance(report, StallReport) and report.status is not None
    assert len(report.status.producers) == 31
    rows = [line for line in str(report).splitlines() if " w-" in line or "worker-7" in line]
    assert len(rows) == 20 and "worker-7" in rows[0]


def test_each_of_many_waiting_workers_that_shall_raise_does(bus_name: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(Bus.create(bus_name, "2MiB"))
        producers = [
            stack.enter_context(Producer(bus_name, on_stall="raise", stall_timeout=PERIOD_S))
            for _ in range(4)
        ]
        assert len(wait_together(producers, 60.0)) == len(producers)


DIES = """
import os, signal, sys, numpy as np, shmbus
producer = shmbus.Producer(sys.argv[1], label="worker-7")
producer.put("q1", group_size=2, index=0, tokens=np.zeros(4, np.int32))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default bounds, a thousandth of them, and no end beside a perhaps working worker."""
    monkeypatch.setattr(limits, "STALL_REPORT_S", PERIOD_S)
    monkeypatch.setattr(limits, "STALL_DEAD_S", 2 * PERIOD_S)
    monkeypatch.setattr(limits, "STALL_SLOW_S", 3600.0)


@pytest.mark.usefixtures("hasty")
def test_a_trainer_with_dead_workers_ends_with_details(served: str, spawn: Spawner) -> None:
    spawn.script(DIES, served).wait()
    with OnlineDataHandler(served, groups_per_batch=1) as handler:
        with pytest.raises(StallError, match=r"(?s)nothing has moved.*q1.*1 of 2") as caught:
            handler.next_batch()
        assert "worker-7" in str(caught.value)
        with Producer(served) as successor:
            put(successor, "q1", 1, size=2)
            assert handler.next_batch(timeout=20.0).num_sequences == 2


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("state", ["a worker at work", "a pause"])
def test_a_slow_run_goes_on(served: str, state: str, caplog: pytest.LogCaptureFixture) -> None:
    with Consumer(served) as consumer, caplog.at_level(logging.WARNING, "shmbus.stall"):
        with ExitStack() as stack:
            if state == "a pause":
                Bus.open(served).pause("evaluation")
            else:
                put(stack.enter_context(Producer(served)), "q1", 0, size=2)
            told = len(caplog.records)
            wait_until(lambda: consumer.take(timeout=0.05) or len(caplog.records) >= told + 4)
        if state == "a pause":
            Bus.open(served).resume()
        with pytest.raises(StallError):
            consumer.take(timeout=None)  # no process remains that could go on


@pytest.mark.usefixtures("hasty")
def test_who_chose_the_log_waits_on(served: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Consumer(served, on_stall="log") as consumer,
        caplog.at_level(logging.WARNING, "shmbus.stall"),
    ):
        wait_until(lambda: consumer.take(timeout=0.05) or len(caplog.records) >= 4)
