"""A Producer allowed to follow its bus's successor does so, and reports its puts."""

import asyncio
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import DEFAULT_DEADLINE_S, beside, take_groups, wait_until

import shmbus
from shmbus import Bus, Consumer, Producer

DATA = np.arange(10, dtype=np.int32)
LARGE = np.zeros(400_000, np.uint8)


def put(producer: Producer, key: str, timeout: float | None = 30, **more: Any) -> None:
    producer.put(key, group_size=1, index=0, timeout=timeout, x=more.pop("x", DATA), **more)


def keys(consumer: Consumer, count: int) -> list[str]:
    groups = take_groups(consumer, count)
    consumer.ack(groups)
    return [group.instance_id for group in groups]


@pytest.fixture
def orphan(bus_name: str) -> Any:
    with Bus.create(bus_name, "1MiB", max_producers=4):
        producer = Producer(bus_name, attach="successor", label="worker")
        put(producer, "old")
    yield producer
    producer.close()


CALLS: dict[str, Callable[[Producer, float], Any]] = {
    "put": lambda p, s: put(p, "a", s),
    "put_many": lambda p, s: p.put_many(
        [{"instance_id": "a", "group_size": 1, "index": 0, "x": DATA}], timeout=s
    ),
    "reserve": lambda p, s: p.reserve(
        "a", group_size=1, index=0, timeout=s, fields={"x": ("int32", 4)}
    ).commit(),
    "fail": lambda p, s: p.fail("a", 0, "down", group_size=1, timeout=s),
    "aput": lambda p, s: asyncio.run(p.aput("a", group_size=1, index=0, timeout=s, x=DATA)),
}


@pytest.mark.parametrize("call", CALLS)
def test_each_way_to_put_waits_for_a_successor_and_says_where_none_came(
    bus_name: str, orphan: Producer, call: str
) -> None:
    with pytest.raises(shmbus.BusRemovedError, match="there is no bus of that name"):
        CALLS[call](orphan, 0.1)
    assert not orphan.closed
    with beside(CALLS[call], orphan, 60) as put, Bus.create(bus_name, "1MiB") as bus:
        put.result(DEFAULT_DEADLINE_S)
        assert bus.stats().committed == 1
    assert orphan.stats().committed == 2


def test_what_is_read_of_the_bus_follows_before_any_put(bus_name: str, orphan: Producer) -> None:
    assert orphan.policy_version == 0
    assert orphan.paused is None
    before = orphan.stats()
    with Bus.create(bus_name, "4MiB") as bus:
        bus.policy_version = 7
        bus.pause("loading")
        assert orphan.policy_version == 7
        assert orphan.paused == "loading" and orphan.pressure() == 1.0
        assert orphan.record_limit == 1 << 20
        assert orphan.requests.retries() == []
        bus.resume()
        put(orphan, "a")
        after = orphan.stats()
        assert after.committed == before.committed + 1 and after.bytes > before.bytes
        assert [row.label for row in bus.stats().producers] == ["worker"]


def test_reservations_of_the_old_bus_are_aborted_and_their_views_are_kept(
    bus_name: str, orphan: Producer
) -> None:
    with Bus.create(bus_name, "1MiB"), Consumer(bus_name, daemon=False) as consumer:
        put(orphan, "first")
        slot = orphan.reserve("gone", group_size=1, index=0, fields={"x": ("int32", 4)})
        slot["x"][:] = 9
        part = slot["x"][:2]
        assert keys(consumer, 1) == ["first"]
        shmbus.unlink(bus_name)
        with Bus.create(bus_name, "1MiB"), Consumer(bus_name, daemon=False) as second:
            put(orphan, "second")
            assert slot.ended and part.tolist() == [9, 9]
            with pytest.raises(shmbus.BusClosedError):
                slot.commit()
            assert keys(second, 1) == ["second"]
            assert second.stats().committed == 1
            assert orphan.stats().aborted == 1
            # The name belongs to the second bus; the first ends with its handles.


def test_put_many_puts_all_of_a_list_into_the_successor(bus_name: str, orphan: Producer) -> None:
    items = [{"instance_id": f"g{i}", "group_size": 1, "index": 0, "x": LARGE} for i in range(20)]
    with Bus.create(bus_name, "4MiB"):
        put(orphan, "first")
        done: list[int] = []
        thread = threading.Thread(target=lambda: done.append(orphan.put_many(items, timeout=60)))
        # No reader: it fills the bus, and waits.
        thread.start()
        wait_until(lambda: orphan.stats().full_waits > 0, what="a full bus")
        committed = orphan.stats().committed - 2
    with Bus.create(bus_name, "4MiB"), Consumer(bus_name, daemon=False) as consumer:
        got = keys(consumer, len(items) - committed)
        thread.join(DEFAULT_DEADLINE_S)
        assert done == [20]
        assert got == [f"g{i}" for i in range(committed, 20)]


@pytest.mark.timeout(120)
def test_threads_go_on_together_through_many_successors(bus_name: str) -> None:
    over = threading.Event()
    said: dict[int, list[str]] = {}
    errors: list[BaseException] = []

    def work(number: int, producer: Producer) -> None:
        count = 0
        while not over.is_set():
            key = f"{number}-{count}"
            try:
                if count % 3 == 0:
                    put(producer, key, x=LARGE)
                elif count % 3 == 1:
                    producer.put_many(
                        [{"instance_id": key, "group_size": 1, "index": 0, "x": LARGE}], timeout=30
                    )
                else:
                    with producer.reserve(
                        key, group_size=1, index=0, timeout=30, fields={"x": ("u1", 300_000)}
                    ) as slot:
                        slot["x"][:] = 1
            except shmbus.BusClosedError:
                pass  # the reservation's bus was removed
            except BaseException as error:
                errors.append(error)
                return
            said.setdefault(number, []).append(key)
            count += 1

    bus = Bus.create(bus_name, "8MiB", max_producers=2)
    producer = Producer(bus_name, attach="successor")
    threads = [threading.Thread(target=work, args=(i, producer)) for i in range(4)]
    for thread in threads:
        thread.start()
    taken = 0
    try:
        for _ in range(15):
            with Consumer(bus_name, daemon=False) as consumer:
                taken += len(keys(consumer, 8))
                shmbus.unlink(bus_name)
            bus.close()
            bus = Bus.create(bus_name, "8MiB", max_producers=2)
        with Consumer(bus_name, daemon=False) as consumer:
            over.set()
            while any(thread.is_alive() for thread in threads):
                consumer.ack(consumer.take(64, timeout=0.05))
            assert consumer.stats().balanced
            assert not consumer.stats().dropped
    finally:
        over.set()
        for thread in threads:
            thread.join()
        producer.close()
        bus.unlink()
        bus.close()
    assert errors == []
    assert taken == 15 * 8


def test_a_pickle_keeps_the_option_and_a_wrong_one_is_refused(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name, attach="successor") as producer:
        copy = pickle.loads(pickle.dumps(producer))
    with Bus.create(bus_name, "1MiB") as bus:
        put(copy, "a")
        assert bus.stats().committed == 1
        copy.close()
        with pytest.raises(ValueError, match="attach: expected 'same' or 'successor'"):
            Producer(bus_name, attach="next")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="attach"):
            Producer(bus_name, attach=True)  # type: ignore[arg-type]


def test_it_ends_with_its_last_reference_and_leaves_the_successor(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"):
        producer = Producer(bus_name, attach="successor")
    with Bus.create(bus_name, "1MiB") as bus:
        put(producer, "a")
        assert [row.state for row in bus.stats().producers] == ["active"]
        gone = weakref.ref(producer) if hasattr(producer, "__weakref__") else None
        del producer
        gc.collect()
        assert gone is None or gone() is None
        assert [row.state for row in bus.stats().producers] == ["closed"]


def test_a_wait_for_a_successor_ends_with_a_close_a_signal_and_its_timeout(
    orphan: Producer,
) -> None:
    began = time.monotonic()
    closer = threading.Timer(0.1, orphan.close)
    closer.start()
    with pytest.raises(shmbus.BusClosedError):
        put(orphan, "a", None)
    closer.join()
    assert time.monotonic() - began < DEFAULT_DEADLINE_S


def test_what_another_user_planted_in_its_place_is_refused(bus_name: str, orphan: Producer) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    path = f"/dev/shm/shmbus.{bus_name}"
    os.mkfifo(path)
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to uid 65534"):
        put(orphan, "a")
    os.unlink(path)
    with Bus.create(bus_name, "1MiB"):
        put(orphan, "a")
