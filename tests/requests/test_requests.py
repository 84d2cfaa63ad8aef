"""Prompts out, samples in: the request lane over real processes, with real deaths."""

import asyncio
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from conftest import Daemon, beside, next_request
from lane import take_all, totals
from supervisor import forked

import shmbus
from shmbus import Bus, Consumer, Feeder, Producer, Request

X = np.zeros(4, np.float32)
Serve = Callable[..., Daemon]


# -- offering and taking ---------------------------------------------------------------------------


def test_a_prompt_is_taken_sample_by_sample_and_becomes_a_group(
    bus: Bus, producer: Producer, feeder: Feeder
) -> None:
    prompt = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert (
        feeder.request("q", group_size=3, round=2, meta={"a": [1]}, prompt=prompt, empty=X[:0]) == 1
    )
    with Consumer(bus.name) as consumer:
        for index in range(3):
            request = next_request(producer)
            assert (request.instance_id, request.round, request.index) == ("q", 2, index)
            assert (request.group_size, request.need, request.split) == (3, 3, "train")
            assert (request.priority, request.attempt, request.reason) == (0, 0, "")
            assert request.meta == {"a": [1]}
            assert request["prompt"].dtype == np.int32
            assert (request["prompt"] == prompt).all()
            assert request["empty"].shape == (0,) and "empty" in request and "no" not in request
            assert sorted(request.fields) == ["empty", "prompt"]
            assert producer.requests.answer(request, score=float(index), x=X)
        assert producer.requests.next(0) is None
        (group,) = consumer.take(timeout=10)
        assert (group.instance_id, group[0].round, group.size) == ("q", 2, 3)
        assert [t.score for t in group] == [0.0, 1.0, 2.0]
        assert consumer.stats().requests.groups == 1
        group.ack()
        counts = consumer.stats().requests
        assert counts.balanced and (counts.offered, counts.done, counts.groups) == (3, 3, 0)


def test_the_highest_priority_comes_first_and_within_it_what_was_offered_first(
    producer: Producer, feeder: Feeder
) -> None:
    for name, priority in (("a", 0), ("b", 7), ("c", 3), ("d", 7), ("e", 0)):
        feeder.request(name, group_size=2, priority=priority)
    assert [request.instance_id for request in take_all(producer)] == list("bbddccaaee")


def test_every_array_comes_back_as_it_was_sent(producer: Producer, feeder: Feeder) -> None:
    sent = {
        "scalar": np.float64(2.5) * np.ones(()),
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "strided": np.arange(20)[::3],
        "bools": np.array([True, False]),
        "text": np.array(["ab", "c"]),
        "none": np.zeros((0, 5), np.int16),
        "struct": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    }
    feeder.request("q", group_size=1, **sent)
    request = next_request(producer)
    assert request.meta is None
    for name, value in sent.items():
        assert request[name].dtype == value.dtype and request[name].shape == value.shape
        assert (request[name] == value).all()
        assert not request[name].flags.writeable
    with pytest.raises(KeyError, match="has the fields"):
        request["nope"]


def test_the_round_tells_repetitions_apart(bus: Bus, producer: Producer, feeder: Feeder) -> None:
    for round in range(3):
        feeder.request("q", group_size=2, round=round)
    with Consumer(bus.name) as consumer:
        for request in take_all(producer):
            producer.requests.answer(request, x=X)
        groups = consumer.take(timeout=10)
        assert [group[0].round for group in groups] == [0, 1, 2]
        consumer.ack(groups[1])
        assert [each["round"] for each in consumer.state_dict()["open"]] == [0, 2]
        consumer.ack([groups[0], groups[2]])
        assert totals(bus) == (6, 0, 0, 6, 0, 0)


def test_a_repeated_key_without_an_round_ends_oldest_first(
    bus: Bus, producer: Producer, feeder: Feeder
) -> None:
    for round_ in range(2):
        feeder.request("q", group_size=1, meta=round_)
    with Consumer(bus.name) as consumer:
        for request in take_all(producer):
            producer.requests.answer(request, x=X)
        for left in (1, 0):
            consumer.take(1, timeout=10)[0].ack()
            assert len(consumer.state_dict()["open"]) == left


def test_what_was_acknowledged_to_a_daemon_that_has_not_read_it_is_open_no_more(
    bus_name: str, daemon: Serve
) -> None:
    served = daemon("--capacity", "4MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
        for number in range(2):
            consumer.request(f"q{number}", group_size=1)
        for request in take_all(producer):
            producer.requests.answer(request, x=X)
        (group,) = consumer.take(1, timeout=30)
        served.child.send_signal(signal.SIGSTOP)
        group.ack()
        with ThreadPoolExecutor(1) as pool:
            state = pool.submit(consumer.state_dict)
            wait([state], timeout=0.2)
            served.child.send_signal(signal.SIGCONT)
            assert [each["instance_id"] for each in state.result(30)["open"]] == ["q1"]


def test_a_sample_is_answered_once(bus: Bus, producer: Producer, feeder: Feeder) -> None:
    feeder.request("q", group_size=1)
    request = next_request(producer)
    assert producer.requests.is_wanted(request)
    assert producer.requests.answer(request, x=X) is True
    assert not producer.requests.is_wanted(request)
    assert producer.requests.answer(request, x=X) is False
    assert producer.requests.fail(request, "late") is False
    assert producer.requests.release(request) is False
    assert bus.stats().committed == 1


def test_what_is_given_back_is_anothers_before_what_is_new(bus: Bus, feeder: Feeder) -> None:
    with Producer(bus.name) as one, Producer(bus.name) as two:
        feeder.request("a", group_size=3)
        feeder.request("b", group_size=1)
        first, second = one.requests.next(5), one.requests.next(5)
        assert first is not None and second is not None
        assert one.requests.release(first)
        again = next_request(two)
        assert (again.instance_id, again.index) == ("a", 0)
        assert not one.requests.answer(first, x=X), "it is the other's"
        one.close()
        assert [(r.instance_id, r.index) for r in take_all(two)] == [("a", 1), ("a", 2), ("b", 0)]


# -- waiting ---------------------------------------------------------------------------------------


def test_a_worker_sleeps_until_something_is_offered(bus: Bus, producer: Producer) -> None:
    assert producer.requests.next(0) is None
    assert producer.requests.next(0.05) is None

    def offer() -> None:
        time.sleep(0.3)
        with Feeder(bus.name) as feeder:
            feeder.request("q", group_size=1)

    with beside(offer):
        before = time.process_time()
        request = producer.requests.next(30)
        spent_s = time.process_time() - before
    assert request is not None and request.instance_id == "q"
    assert spent_s < 0.25, "it did not sleep"


def test_tasks_of_a_loop_share_one_wait_and_each_gets_a_sample(
    bus: Bus, producer: Producer, feeder: Feeder
) -> None:
    async def scenario() -> list[Request | None]:
        tasks = [asyncio.create_task(producer.requests.anext(30)) for _ in range(8)]
        await asyncio.sleep(0.1)
        feeder.request("q", group_size=8, timeout=0)
        found = await asyncio.gather(*tasks)
        for request in found:
            assert request is not None
            assert await producer.requests.aanswer(request, x=X)
        assert await producer.requests.anext(0) is None
        return found

    found = asyncio.run(scenario())
    assert sorted(r.index for r in found if r is not None) == list(range(8))
    with Consumer(bus.name) as consumer:
        assert len(consumer.take(timeout=10)) == 1


def test_nothing_is_handed_out_while_the_bus_is_paused(
    bus: Bus, producer: Producer, feeder: Feeder
) -> None:
    bus.pause("weights")
    feeder.request("q", group_size=1)
    assert producer.requests.next(0.1) is None
    thread = threading.Timer(0.2, bus.resume)
    thread.start()
    assert producer.requests.next(30) is not None
    thread.join()


def test_a_worker_hears_that_its_bus_was_removed(bus_name: str) -> None:
    bus = Bus.create(bus_name, "1MiB")
    with Producer(bus_name) as producer, Feeder(bus_name) as feeder:
        bus.close()
        shmbus.unlink(bus_name)
        with pytest.raises(shmbus.BusRemovedError):
            producer.requests.next(30)
        with pytest.raises(shmbus.BusRemovedError):
            while True:
                feeder.request("q", group_size=1, prompt=np.zeros(4000), timeout=30)


def test_a_full_lane_waits_and_says_who_serves_it(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB", request_capacity="64KiB") as bus, Feeder(bus_name) as feeder:
        prompt = np.zeros(1000, np.int64)
        offered = 0
        with pytest.raises(shmbus.BusFullError) as caught:
            while True:
                feeder.request(f"q{offered}", group_size=2, timeout=0.05, prompt=prompt)
                offered += 1
        assert 4 <= offered <= 6  # as the rounding of the tables leaves room
        lane = (f"{offered} groups are in the lane", f"{2 * offered} samples")
        for words in (*lane, "0 producers", "requests.next"):
            assert words in str(caught.value)
        with pytest.raises(shmbus.RecordTooLargeError, match="request_capacity"):
            feeder.request("large", group_size=2, prompt=np.zeros(10_000))
        with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
            with beside(feeder.request, "last", group_size=2, prompt=prompt) as waiting:
                for _ in range(2):
                    request = next_request(producer)
                    producer.requests.answer(request, x=X)
                consumer.take(1, timeout=10)[0].ack()
                waiting.result(30)
            assert totals(bus) == (2 * offered + 2, 2 * offered, 0, 2, 0, offered)


def test_a_stall_report_names_a_lane_that_nobody_serves(bus_name: str) -> None:
    reports: list[shmbus.StallReport] = []
    with (
        Bus.create(bus_name, "1MiB", request_capacity="64KiB"),
        Feeder(bus_name, on_stall=reports.append, stall_timeout=0.2) as feeder,
        pytest.raises(shmbus.BusFullError),
    ):
        for number in range(100):
            feeder.request(f"q{number}", group_size=1, prompt=np.zeros(1000), timeout=1.0)
    assert reports
    assert reports[0].waits_for == "room in the request lane"


# -- arguments and handles -------------------------------------------------------------------------


def test_what_the_request_says_is_not_given_again(producer: Producer, feeder: Feeder) -> None:
    feeder.request("q", group_size=1)
    (request,) = take_all(producer)
    with pytest.raises(TypeError, match="index is the request's"):
        producer.requests.answer(request, index=0, x=X)
    with pytest.raises(TypeError, match="reason"):
        producer.requests.fail(request, None)  # type: ignore[arg-type]
    assert producer.requests.is_wanted(request)


def test_a_feeder_pickles_by_name_and_ends_where_it_is_closed(bus: Bus, feeder: Feeder) -> None:
    with pickle.loads(pickle.dumps(feeder)) as copy:
        assert copy.request("q", group_size=1) == 1
        assert repr(copy) == f"<Feeder {bus.name!r}>"
    assert copy.closed
    with pytest.raises(shmbus.BusClosedError):
        copy.request("q", group_size=1)


def test_a_feeder_of_before_a_fork_is_closed_in_the_child(feeder: Feeder) -> None:
    def request() -> None:
        with pytest.raises(shmbus.BusClosedError):
            feeder.request("q", group_size=1)

    assert forked(request) == 0
    assert feeder.request("q", group_size=1) == 1
