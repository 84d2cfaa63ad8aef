"""Ends of requests: acknowledged, failed, dropped, and after deaths of either side."""

import pickle
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Daemon, Spawner, ends_of, next_request, wait_until, work_until
from lane import ask, take_all, totals

import shmbus
from shmbus import Bus, Consumer, Feeder, Producer
from shmbus.inspect.status import read_status
from shmbus.inspect.text import status_text
from shmbus.stash.stash import Stash
from shmbus.stash.upkeep import Requests
from shmbus.store import snapshot as store
from shmbus_ext import _core

X = np.zeros(4, np.float32)
Serve = Callable[..., Daemon]

# Samples prompts made of the group's number; checks every token.
WORKER = """
import sys, numpy as np, shmbus
name = sys.argv[1]
with shmbus.Producer(name) as producer:
    print("works", flush=True)
    while (request := producer.requests.next()) is not None:
        number = int(request.instance_id[1:])
        assert request.meta == {"number": number}, request.meta
        assert (request["prompt"] == number).all(), request
        producer.requests.answer(request, score=1.0, x=np.full(4, number, np.float32))
"""

# Takes so many samples, reports, and answers none.
TAKER = """
import sys, time, shmbus
producer = shmbus.Producer(sys.argv[1])
for _ in range(int(sys.argv[2])):
    request = producer.requests.next(10)
    print("took", request.instance_id, request.index, flush=True)
print("all", flush=True)
time.sleep(600)
"""

FEEDER = """
import sys, numpy as np, shmbus
name, first, count, size, several = sys.argv[1], *map(int, sys.argv[2:])
with shmbus.Feeder(name) as feeder:
    print("feeds", flush=True)
    for at in range(first, first + count, several):
        feeder.request_many(
            [{"instance_id": f"q{number}", "group_size": size, "round": 0,
              "meta": {"number": number}, "prompt": np.full(number % 700, number, np.int32)}
             for number in range(at, at + several)], timeout=60)
print("done", flush=True)
"""


# -- ends


def test_a_failed_sample_comes_again_with_its_prompt(bus: Bus, feeder: Feeder) -> None:
    with ends_of(bus, sample_retries=1, retry_backoff=(0, 0)) as (producer, consumer):
        feeder.request("q", group_size=2, round=4, meta="m", prompt=np.arange(3))
        first, second = take_all(producer)
        assert producer.requests.answer(second, x=X)
        assert producer.requests.fail(first, "the sandbox crashed")
        (retry,) = ask(consumer, producer)
        assert (retry.index, retry.round, retry.attempt, retry.meta) == (0, 4, 1, "m")
        assert retry.reason == "the sandbox crashed" and (retry["prompt"] == np.arange(3)).all()
        assert producer.requests.is_wanted(retry)
        assert producer.requests.answer(retry, score=1.0, x=X)
        assert not producer.requests.is_wanted(retry)
        (group,) = consumer.take(timeout=10)
        group.ack()
        counts = consumer.stats()
        assert counts.balanced and counts.requests.balanced and counts.requests.groups == 0


def test_a_retry_that_is_released_or_fails_for_good(bus: Bus, feeder: Feeder) -> None:
    with ends_of(bus, sample_retries=1, retry_backoff=(0, 0)) as (producer, consumer):
        feeder.request("q", group_size=1)
        (first,) = take_all(producer)
        producer.requests.fail(first, "one")
        (again,) = ask(consumer, producer)
        assert producer.requests.release(again)
        assert producer.requests.next(0) is None, "it is not given back at once"
        retry = next_request(producer)
        assert producer.requests.fail(retry, "two")
        work_until(consumer, lambda: consumer.stats().requests.groups == 0)
        assert consumer.stats().dropped == {"failed": 2}


def test_a_group_that_is_dropped_ends_its_request(bus: Bus, feeder: Feeder) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name, skip_zero_variance=True) as consumer:
        feeder.request("flat", group_size=2)
        feeder.request("good", group_size=2)
        for request in take_all(producer):
            producer.requests.answer(
                request, score=float(request.index * (request.instance_id == "good")), x=X
            )
        (group,) = consumer.take(timeout=10)
        consumer.drop(group)
        work_until(consumer, lambda: consumer.stats().requests.groups == 0)
        assert consumer.stats().requests.balanced


def test_a_request_ends_with_its_trained_samples_though_none_answered_the_request(
    bus: Bus, feeder: Feeder
) -> None:
    """The samples lay on the bus before the offer, as after a relay has brought them back."""
    with Producer(bus.name) as producer:
        producer.put("q", group_size=2, index=0, round=0, x=X)
        producer.put("q", group_size=2, index=1, round=0, x=X)
        feeder.request("q", group_size=2, round=0)
    with Consumer(bus.name) as consumer:
        names = consumer.lasting_names(consumer.take(timeout=10))
        assert len(names) == 2
    with Consumer(bus.name) as consumer:
        consumer.end_trained(names)
        work_until(consumer, lambda: not consumer.open_requests())


def test_a_group_whose_time_is_over_hands_out_nothing_more(bus: Bus, feeder: Feeder) -> None:
    with ends_of(bus, group_timeout=0.2, on_timeout="drop") as (producer, consumer):
        feeder.request("slow", group_size=3)
        first, second = producer.requests.next(5), producer.requests.next(5)
        assert first is not None and second is not None
        producer.requests.answer(first, x=X)
        work_until(consumer, lambda: consumer.stats().requests.groups == 0)
        assert not producer.requests.is_wanted(second)
        assert not producer.requests.answer(second, x=X), "it would begin another group"
        assert producer.requests.next(0) is None
        counts = consumer.stats().requests
        assert (counts.done, counts.given_up) == (1, 2)


def test_a_state_offers_again_what_was_not_trained(bus_name: str) -> None:
    with Bus.create(bus_name, "4MiB") as bus:
        with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
            for number in range(4):
                consumer.request(
                    f"q{number}", group_size=2, round=1, priority=number, meta=number, prompt=X
                )
            for _ in range(4):
                request = next_request(producer)
                producer.requests.answer(request, x=X)
            consumer.take(1, timeout=10)[0].ack()
            state = pickle.loads(pickle.dumps(consumer.state_dict()))
            assert [each["instance_id"] for each in state["open"]] == ["q0", "q1", "q2"]
            consumer.take(1, timeout=10)[0].ack()  # trained after the checkpoint
            consumer.request("later", group_size=1)
            again = consumer.load_state_dict(state)
            assert (again.offered, again.kept, again.beyond) == (1, 2, [("later", None, "train")])
            assert consumer.load_state_dict(state).offered == 0
        bus.close()
    with ends_of(Bus.create(bus_name, "4MiB")) as (producer, consumer):
        assert consumer.load_state_dict(state).offered == 3
        found = take_all(producer)
        assert [(r.instance_id, r.index) for r in found] == [
            (f"q{number}", index) for number in (2, 1, 0) for index in range(2)
        ]
        assert found[0].meta == 2 and (found[0]["prompt"] == X).all()


@pytest.mark.parametrize("state", [None, {}, {"version": 9, "open": []}, []])
def test_what_is_no_state_is_refused(bus: Bus, state: object) -> None:
    with Consumer(bus.name) as consumer, pytest.raises(ValueError, match="requests state"):
        consumer.load_state_dict(state)  # type: ignore[arg-type]


# -- deaths ----------------------------------------------------------------------------------------


def test_what_a_dead_worker_had_in_hand_is_given_to_others_without_a_consumer(
    bus: Bus, producer: Producer, feeder: Feeder, spawn: Spawner
) -> None:
    feeder.request("q", group_size=4)
    taker = spawn.script(TAKER, bus.name, 3, until="all")
    assert next_request(producer).index == 3
    assert producer.requests.next(0.05) is None
    taker.kill()
    for index in range(3):
        assert next_request(producer).index == index
    assert totals(bus) == (4, 0, 4, 0, 0, 1)


def test_a_stopped_worker_keeps_what_it_has(
    bus: Bus, producer: Producer, feeder: Feeder, spawn: Spawner
) -> None:
    feeder.request("q", group_size=1)
    taker = spawn.script(TAKER, bus.name, 1, until="all")
    taker.send_signal(signal.SIGSTOP)
    with Consumer(bus.name) as consumer:
        assert producer.requests.next(1.2) is None
        assert consumer.take(timeout=1.2) == []
    taker.send_signal(signal.SIGCONT)


def test_feeders_that_are_killed_leave_no_half_request_and_no_leaked_room(
    bus_name: str, spawn: Spawner, seed: int
) -> None:
    rng = random.Random(seed)
    with Bus.create(bus_name, "4MiB", request_capacity="256KiB") as bus:
        free = _core.request_totals(bus._segment)[7]
        workers = [spawn.script(WORKER, bus_name) for _ in range(2)]
        with Consumer(bus_name) as consumer:
            seen: list[str] = []

            def train() -> None:
                for group in consumer.take(64, timeout=0.05):
                    assert all((t["x"] == int(group.instance_id[1:])).all() for t in group)
                    seen.append(group.instance_id)
                    group.ack()

            for round_ in range(6):
                feeders = [
                    spawn.script(
                        FEEDER, bus_name, 100_000 * round_ + 10_000 * i, 5000, 3, 1 + 9 * i
                    )
                    for i in range(2)
                ]
                for child in feeders:
                    child.expect("feeds")
                until = time.monotonic() + rng.uniform(0.02, 0.3)
                while time.monotonic() < until:
                    train()
                for child in feeders:
                    child.kill()
            wait_until(lambda: train() or consumer.stats().requests.groups == 0, 60)
            assert len(seen) == len(set(seen)) > 0
            counts = consumer.stats()
            assert counts.balanced and counts.requests.balanced
            assert counts.requests.done == 3 * len(seen) and not counts.dropped
            for worker in workers:
                worker.kill()
        with Feeder(bus_name) as feeder:
            feeder.request("last", group_size=1, prompt=np.zeros(free // 8 - 64))


def test_a_collector_learns_of_every_request_that_is_offered_while_it_looks(
    bus_name: str, spawn: Spawner
) -> None:
    # A look goes through the rows in turn, and a feeder of another process does not wait: of two
    # rows opened meanwhile, the older may lie behind the look and the newer before.
    with Bus.create(bus_name, "4MiB", request_capacity="256KiB") as bus:
        requests = Requests(bus._segment)
        feeder = spawn.script(FEEDER, bus_name, 0, 20_000, 1, 10, until="feeds")
        ended, moved = 0, time.monotonic()
        while ended < 20_000 and time.monotonic() < moved + 15:
            requests._learn()
            for key in list(requests._open):
                requests.end(key)
                ended, moved = ended + 1, time.monotonic()
        assert (ended, totals(bus)[5]) == (20_000, 0)
        feeder.finish()


def test_a_consumer_that_died_after_its_acknowledgement_leaves_no_open_request(
    bus: Bus, producer: Producer, feeder: Feeder
) -> None:
    feeder.request("q", group_size=1)
    feeder.request("r", group_size=1)
    for request in take_all(producer):
        producer.requests.answer(request, x=X)
    consumer = Consumer(bus.name)
    groups = consumer.take(timeout=10)
    # State after a death between the acknowledgement and the end of the request.
    _core.end_groups(
        consumer._source.reader, consumer._source.stash.table, consumer, groups[:1], 0, "acked"
    )  # type: ignore[union-attr]
    consumer.close()
    assert totals(bus)[5] == 2
    with Consumer(bus.name) as successor:
        wait_until(lambda: len(successor.take(timeout=0.05)) >= 0 and totals(bus)[5] == 1)
        (left,) = successor.state_dict()["open"]
        assert left["instance_id"] == "r"


# -- with a bound on the producers' lead


def test_groups_are_begun_as_others_are_delivered_and_their_samples_never_wait(
    bus_name: str, spawn: Spawner
) -> None:
    with (
        Bus.create(bus_name, "4MiB", max_lead=1) as bus,
        Feeder(bus_name) as feeder,
        Consumer(bus_name) as consumer,
    ):
        for number in range(20):
            feeder.request(
                f"q{number}", group_size=8, meta={"number": number}, prompt=np.full(3, number)
            )
        workers = [spawn.script(WORKER, bus_name) for _ in range(4)]
        victim = spawn.script(TAKER, bus_name, 1)
        seen = []
        while len(seen) < 20:
            for group in consumer.take(4, timeout=0.1):
                seen.append(group.instance_id)
                group.ack()
                stats = consumer.stats()
                assert stats.groups_open + stats.groups_ready <= 1
            if victim.running and "all" in victim.output():
                victim.kill()
        assert sorted(seen) == sorted(f"q{number}" for number in range(20))
        assert _core.lead_state(bus._segment)[1] == 0
        for worker in workers:
            worker.kill()


def test_a_failed_group_lets_the_next_begin(bus_name: str) -> None:
    with (
        ends_of(Bus.create(bus_name, "4MiB", max_lead=1)) as (producer, consumer),
        Feeder(bus_name) as feeder,
    ):
        for name in "ab":
            feeder.request(name, group_size=1)
        (request,) = take_all(producer)
        producer.requests.fail(request, "no")
        assert ask(consumer, producer)[0].instance_id == "b"


# -- seen from outside


def test_a_status_says_what_the_lane_holds_and_how_far_producers_are_ahead(bus_name: str) -> None:
    with (
        Bus.create(bus_name, "4MiB", max_lead=3) as bus,
        Feeder(bus_name) as feeder,
        Producer(bus_name) as producer,
        Consumer(bus_name, group_timeout=0.1, on_timeout="drop") as consumer,
    ):
        status = read_status(bus_name)
        assert status.requests is None and status.lead is not None
        assert (status.lead.held, status.lead.limit, status.lead.max_lead) == (0, 3, 3)
        for number in range(5):
            feeder.request(f"q{number}", group_size=2)
        assert "nobody has ever taken one" in status_text(read_status(bus_name))
        requests = [producer.requests.next(5) for _ in range(5)]
        for request in requests[:3]:
            assert request is not None and producer.requests.answer(request, x=X)
        consumer.take(1, timeout=10)[0].ack()
        work_until(consumer, lambda: consumer.stats().requests.groups == 3)
        status = read_status(bus_name)
        assert status.requests is not None and status.lead is not None
        seen = status.requests
        assert (seen.offered, seen.open, seen.claimed, seen.done, seen.given_up) == totals(bus)[:5]
        assert (seen.done, seen.given_up, seen.groups) == (3, 1, 3)
        assert status.lead.held == 1
        text = status_text(status)
        assert "requests  3 groups; " in text and "\n  of 10 samples " in text
        assert "lead  1 group is begun" in text


def test_a_group_that_a_restored_bus_gave_up_is_made_when_it_is_offered_again(
    bus: Bus, bus_name: str, tmp_path: Path
) -> None:
    """The lane of a restored bus stays empty until a trainer offers its open prompts."""
    restored = f"{bus_name}-restored"
    options: dict[str, Any] = {"sample_retries": 1, "retry_backoff": (0, 0)}
    with Producer(bus.name) as producer:
        with Consumer(bus.name, **options) as consumer:
            consumer.request("q", group_size=1, round=0)
            (request,) = take_all(producer)
            assert producer.requests.fail(request, "once")
            (request,) = ask(consumer, producer)
        assert producer.requests.fail(request, "once more")
    store.take(bus.name, tmp_path / "saved")
    store.restore(tmp_path / "saved", restored)
    with Consumer(restored, **options) as consumer, Producer(restored) as producer:
        work_until(consumer, lambda: consumer.stats().groups_given_up)
        consumer.request("q", group_size=1, round=0)
        (request,) = ask(consumer, producer)
        assert producer.requests.answer(request, tokens=[1])
        (group,) = consumer.take(timeout=10)
        group.ack()
        assert consumer.stats().requests.groups == 0 and consumer.stats().balanced
    shmbus.unlink(restored)


def test_a_dropped_group_asks_the_stash_for_its_own_key_however_many_groups_are_open(
    bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    find = Stash.has

    def has(stash: Stash[Any], key: object) -> bool:
        asked.append(key)
        return find(stash, key)

    bus = Bus.create(bus_name, "8MiB")
    with ends_of(bus, skip_zero_variance=True) as (producer, consumer), Feeder(bus_name) as feeder:
        for number in range(40):
            feeder.request(f"open-{number}", group_size=2)
        for _ in range(40):
            (request, _) = producer.requests.next_many(2)
            producer.requests.answer(request, score=1.0)
        feeder.request("equal", group_size=2)
        assert consumer.take(timeout=0) == []
        for request in producer.requests.next_many(2):
            producer.requests.answer(request, score=1.0)
        # A walk over every waiting sample would be too much.
        monkeypatch.setattr(Stash, "waiting_samples", None)
        monkeypatch.setattr(Stash, "has", has)
        wait_until(
            lambda: consumer.take(timeout=0.01) or _core.request_totals(bus._segment)[5] == 40
        )
        assert asked == [("equal",)] or asked == ["equal"]
        assert consumer.stats().requests.groups == 40
