"""A sample is in one hand: late answers of retries, of first tries, and of recorder sessions."""

from collections.abc import Iterator

import numpy as np
import pytest
from conftest import beside, wait_until
from lane import take_all

from shmbus import Bus, Feeder, Producer, Request
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

X = np.zeros(4, np.float32)
#: Seconds of the collector's clock: a retry's time, and a group's.
RETRY_S, GROUP_S = 10.0, 100.0
POLICY = StashPolicy(
    sample_retries=3, retry_backoff_s=(0.0, 0.0), retry_timeout_s=RETRY_S, group_timeout_s=GROUP_S
)


@pytest.fixture
def collector(bus: Bus) -> Iterator[Collector]:
    collector = Collector(bus.name, POLICY)
    yield collector
    collector.close()


@pytest.fixture
def workers(bus: Bus) -> Iterator[tuple[Producer, Producer]]:
    with Producer(bus.name) as first, Producer(bus.name) as second:
        yield first, second


def pump(collector: Collector, now_s: float) -> None:
    while collector.pump_once(now_s):
        pass
    collector.release_discards()


def retried(collector: Collector, worker: Producer, now_s: float = 0.0) -> Request:
    """Fail the first try of the only open sample; return its retry, which the worker holds."""
    (first,) = take_all(worker)
    assert worker.requests.fail(first, "flaky")
    return asked(collector, worker, now_s)


def asked(collector: Collector, worker: Producer, now_s: float) -> Request:
    pump(collector, now_s)
    # A worker whose last sample failed waits; the claim does not.
    worker._request_state.backoff.reset()
    (request,) = take_all(worker)
    return request


def end_group(collector: Collector) -> int:
    pump(collector, 0.0)
    groups = collector.lease(8)
    for group in groups:
        collector.end(group, _core.ACKED)
    pump(collector, 0.0)
    return sum(len(group.samples) for group in groups)


def committed(bus: Bus) -> int:
    return sum(row[4] for row in bus._segment.producers())


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("round", [None, 3], ids=["no-round", "round"])
@pytest.mark.parametrize("ended", ["timed-out", "taken", "answered", "group-over"])
def test_what_was_asked_of_another_is_not_wanted_of_the_first(
    bus: Bus, feeder: Feeder, workers: tuple[Producer, Producer],
    round: int | None, ended: str, restarts: bool,
) -> None:  # fmt: skip
    late, other = workers
    collector = Collector(bus.name, POLICY)
    feeder.request("q", group_size=1, round=round)
    held = retried(collector, late)
    ticket = late.requests._ticket(held)
    assert late.requests.is_wanted(held) and other.requests._holds(ticket)
    pump(collector, 2 * RETRY_S)
    if ended != "timed-out":
        again = asked(collector, other, 2 * RETRY_S)
        assert again.attempt == held.attempt + 1
    if ended in ("answered", "group-over"):
        assert other.requests.answer(again, x=X)
    if ended == "group-over":
        assert end_group(collector) == 1
    if restarts:
        collector.close()
        collector = Collector(bus.name, POLICY)
        pump(collector, 0.0)
    before = late._counts()[0]
    assert not late.requests.is_wanted(held) and not other.requests._holds(ticket)
    assert not late.requests.answer(held, x=X)
    assert not late.requests.fail(held, "late")
    assert not late.requests.release(held)
    assert late._counts()[0] == before
    assert end_group(collector) == (ended == "answered")
    collector.close()


def test_an_answer_that_waits_for_space_at_its_deadline_is_not_put(
    bus_name: str,
) -> None:
    with (
        Bus.create(bus_name, "1MiB") as bus, Feeder(bus_name) as feeder,
        Producer(bus_name) as late, Producer(bus_name) as other,
    ):  # fmt: skip
        collector = Collector(bus_name, POLICY)
        feeder.request("q", group_size=1)
        held = retried(collector, late)
        big = np.zeros(40_000, np.float32)
        fill = 0
        with pytest.raises(Exception, match="full"):
            while True:
                other.put(f"f{fill}", group_size=2, index=0, x=big, timeout=0)
                fill += 1
        with beside(late.requests.answer, held, x=big) as answered:
            wait_until(lambda: bus._segment.space_wanted())
            pump(collector, 2 * RETRY_S)
            pump(collector, 3 * GROUP_S)  # the others' groups fail, and are asked for
            for now_s in np.arange(3 * GROUP_S, 8 * GROUP_S, RETRY_S):
                pump(collector, float(now_s))
        assert answered.result() is False and late._counts()[0] == 1  # the report of the failure
        collector.close()


@pytest.mark.parametrize("size", [4, 100_000], ids=["small", "large"])
@pytest.mark.parametrize("first", ["first-try", "retry"])
def test_of_a_first_try_and_the_retry_after_its_groups_deadline_one_counts(
    bus: Bus, feeder: Feeder, collector: Collector, workers: tuple[Producer, Producer],
    first: str, size: int,
) -> None:  # fmt: skip
    slow, other = workers
    data = np.zeros(size, np.float32)
    feeder.request("q", group_size=2)
    done, held = take_all(slow)
    assert slow.requests.answer(done, x=X)
    pump(collector, 0.0)
    pump(collector, 2 * GROUP_S)
    if first == "first-try":
        assert slow.requests.answer(held, x=data)
        assert take_all(other) == []  # in the ring, though unread
    else:
        (again,) = take_all(other)
        assert not slow.requests.is_wanted(held)
        assert not slow.requests.answer(held, x=data) and not slow.requests.release(held)
        assert other.requests.answer(again, x=data)
    assert end_group(collector) == 2
    assert end_group(collector) == 0 and collector.stash.open_records == 0


def test_a_claim_of_the_same_producer_is_not_anothers_of_an_older_number(
    feeder: Feeder, collector: Collector, workers: tuple[Producer, Producer]
) -> None:
    worker, other = workers
    feeder.request("q", group_size=1)
    old = retried(collector, worker)
    pump(collector, 2 * RETRY_S)
    new = asked(collector, worker, 2 * RETRY_S)
    assert old._claim[2] == new._claim[2], "the same row"
    assert not worker.requests.release(old) and not worker.requests.answer(old, x=X)
    assert worker.requests.is_wanted(new) and take_all(other) == []
    assert worker.requests.answer(new, x=X) and not worker.requests.answer(new, x=X)


def test_an_answer_under_way_at_its_deadline_gets_one_more(
    bus: Bus, feeder: Feeder, collector: Collector, workers: tuple[Producer, Producer]
) -> None:
    worker, other = workers
    feeder.request("q", group_size=1)
    held = retried(collector, worker)
    assert worker.requests.answer(held, x=X)
    # As if the reader did not see the record: it is committed, and not read.
    collector._update_failing(2 * RETRY_S, drained=True)
    assert take_all(other) == []
    collector._update_failing(4 * RETRY_S, drained=True)
    assert [request.attempt for request in take_all(other)] == [held.attempt + 1]
