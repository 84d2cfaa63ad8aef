"""Batches made ahead by a thread: in the same order, with the same errors, and nothing lost."""

import gc
import itertools
import os
import random
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, keys_of, train_next, wait_until

import shmbus
from shmbus import Bus, Consumer, Producer
from trainer_adapter import Batch, OnlineDataHandler
from trainer_adapter.handler.prefetch import Prefetcher


def put(producer: Producer, key: str, size: int = 2, **more: Any) -> None:
    for index in range(size):
        given = {"tokens": np.full(5, index, np.int32), "score": index, **more}
        producer.put(key, group_size=size, index=index, timeout=10, **given)


def put_many(producer: Producer, count: int, **more: Any) -> list[str]:
    keys = [f"k{number}" for number in range(count)]
    for key in keys:
        put(producer, key, **more)
    return keys


def ready(handler: OnlineDataHandler) -> int:
    assert handler._prefetcher is not None
    return handler._prefetcher.ready


def fill(handler: OnlineDataHandler, count: int) -> None:
    wait_until(lambda: ready(handler) == count, what=f"{count} batches ready")


def prefetch_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "shmbus-prefetch"}


@pytest.fixture
def others() -> set[threading.Thread]:
    """Threads of an earlier test, which may end meanwhile."""
    return prefetch_threads()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_come_in_the_same_order_and_are_ready_while_the_step_runs(
    bus: Bus, producer: Producer, prefetch: int, others: set[threading.Thread]
) -> None:
    keys = put_many(producer, 20)
    with OnlineDataHandler(bus.name, groups_per_batch=2, prefetch=prefetch) as handler:
        assert prefetch_threads() <= others
        got = []
        for step in range(10):
            batch = handler.next_batch(10)
            assert batch.step == step
            got += keys_of(batch)
            fill(handler, min(prefetch, 9 - step))
            handler.ack(batch)
        assert got == keys
        assert (handler.stats().acknowledged, handler.stats().leased) == (40, 0)
    assert prefetch_threads() <= others


def next_key(handler: OnlineDataHandler) -> str:
    try:
        (key,) = keys_of(handler.next_batch(10))
    except MemoryError:
        return ""
    return key


@pytest.mark.parametrize("step", ["_due", "_work", "_slice_s"])
def test_memory_that_fails_in_a_step_of_the_thread_is_told_and_batches_go_on(
    bus: Bus, producer: Producer, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put_many(producer, 4)
    with OnlineDataHandler(bus.name, groups_per_batch=1, prefetch=2) as handler:
        whole = getattr(Prefetcher, step)
        calls = itertools.count()

        def fail_at_times(*given: Any) -> Any:
            if next(calls) % 3 == 1:
                raise MemoryError("of the thread")
            return whole(*given)

        monkeypatch.setattr(Prefetcher, step, fail_at_times)
        told = 0
        got = []
        while len(got) < 4:
            try:
                batch = handler.next_batch(10)
            except MemoryError:
                told += 1
                continue
            got += keys_of(batch)
            handler.ack(batch)
            if len(got) == 4 and not told:
                with pytest.raises(MemoryError):
                    handler.next_batch(10)
                told += 1
        assert got == keys
        monkeypatch.undo()
        put(producer, "last")
        wait_until(lambda: next_key(handler) == "last", what="the batch after all")
        assert handler.stats().balanced


def test_closing_returns_ready_groups_to_the_bus(bus: Bus, producer: Producer) -> None:
    keys = put_many(producer, 8)
    with OnlineDataHandler(bus.name, groups_per_batch=2, prefetch=2) as handler:
        first = handler.next_batch(10)
        fill(handler, 2)
        assert [len(pairs) for _, pairs in handler.state_dict()["trained"]] == [4]
        handler.ack(first)
        assert handler.state_dict()["trained"] == []
    with Consumer(bus.name) as consumer:
        left = consumer.take(64, 10)
        assert [group.instance_id for group in left] == keys[2:]
        assert consumer.stats().acknowledged == 4


def test_a_state_loaded_late_filters_ready_batches(bus: Bus, producer: Producer) -> None:
    keys = put_many(producer, 8)
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        assert keys_of(handler.next_batch(10)) == keys[:2]
        assert keys_of(handler.next_batch(10)) == keys[2:4]
        state = handler.state_dict()
    with OnlineDataHandler(bus.name, groups_per_batch=2, prefetch=2) as handler:
        assert keys_of(handler.next_batch(10)) == keys[:2]
        fill(handler, 2)
        handler.load_state_dict(state)
        assert keys_of(handler.next_batch(10)) == keys[4:6]


def test_errors_come_in_their_turn_and_end_nothing(bus: Bus, producer: Producer) -> None:
    logprobs = np.zeros(5, np.float32)
    put(producer, "before", logprobs=logprobs)
    put(producer, "bad", tokens=np.ones(3))
    put(producer, "worse", logprobs=np.full(5, np.nan, np.float32))
    put(producer, "after", logprobs=logprobs)
    with OnlineDataHandler(bus.name, groups_per_batch=1, prefetch=2) as handler:
        seen = []
        for _ in range(4):
            try:
                batch = handler.next_batch(10)
            except ValueError as error:
                seen.append(str(error).split("field")[1].split(":")[0])
            else:
                seen += keys_of(batch)
                handler.ack(batch)
        assert sorted(seen) == sorted(["before", "after", " 'tokens'", " 'logprobs'"])
        assert seen.index("before") < seen.index(" 'logprobs'") < seen.index("after")
        ledger = handler.stats()
        assert (ledger.dropped, ledger.acknowledged, ledger.balanced) == ({"malformed": 4}, 4, True)


def test_a_batch_is_cut_short_only_for_a_waiting_caller(bus: Bus, producer: Producer) -> None:
    put(producer, "first")
    with OnlineDataHandler(bus.name, tokens_per_batch=40, max_wait=0.05, prefetch=1) as handler:
        assert keys_of(handler.next_batch(10)) == ["first"]
        put_many(producer, 1)
        wait_until(lambda: handler.stats().leased == 4, what="the group is held")
        assert ready(handler) == 0
        put(producer, "k1")
        wait_until(lambda: handler.stats().leased == 6, what="the next one is held")
        # Twice max_wait: a batch cut for nobody would be here by now.
        time.sleep(0.1)
        assert ready(handler) == 0
        assert keys_of(handler.next_batch(10)) == ["k0", "k1"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_ready_group_can_still_become_stale(bus: Bus, producer: Producer, prefetch: int) -> None:
    put_many(producer, 6, policy_version=1)
    put(producer, "fresh", policy_version=4)
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, max_policy_lag=1, prefetch=prefetch
    ) as handler:
        handler.ack(handler.next_batch(10))
        if prefetch:
            fill(handler, 2)
        handler.set_policy_version(4)
        assert train_next(handler) == ["fresh"]
        with pytest.raises(TimeoutError):
            handler.next_batch(0.3)
        ledger = handler.stats()
        assert (ledger.dropped, ledger.acknowledged, ledger.balanced) == ({"stale": 10}, 4, True)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_closing_ends_a_wait_and_returns_groups(
    bus: Bus, producer: Producer, others: set[threading.Thread], prefetch: int
) -> None:
    keys = put_many(producer, 6)
    handler = OnlineDataHandler(bus.name, groups_per_batch=2, prefetch=prefetch)
    with ThreadPoolExecutor(1) as pool:
        seen: list[Batch] = []
        done = pool.submit(lambda: [seen.append(batch) for batch in handler])
        wait_until(lambda: len(seen) == 3, what="three batches")
        handler.close()
        done.result(30)
        assert [len(batch.groups) for batch in seen] == [2, 2, 2]
    handler.close()
    assert prefetch_threads() <= others
    with pytest.raises(shmbus.BusClosedError):
        handler.next_batch(1)
    with OnlineDataHandler(bus.name, groups_per_batch=6, prefetch=prefetch) as handler:
        for batch in handler:
            assert keys_of(batch) == keys
            break


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_closed_handler_hands_out_no_batch(bus: Bus, producer: Producer, prefetch: int) -> None:
    keys = put_many(producer, 4)
    handler = OnlineDataHandler(bus.name, groups_per_batch=1, prefetch=prefetch)
    handler.next_batch(10)
    if prefetch:
        fill(handler, prefetch)
    else:
        handler.give_back(handler.next_batch(10))
    handler.close()
    for _ in range(4):
        with pytest.raises(shmbus.BusClosedError, match="handler"):
            handler.next_batch(0.1)
    assert list(handler) == []
    with OnlineDataHandler(bus.name, groups_per_batch=4) as successor:
        assert keys_of(successor.next_batch(10)) == keys


def test_a_lost_handler_goes(bus: Bus, producer: Producer, others: set[threading.Thread]) -> None:
    put_many(producer, 4)
    handler = OnlineDataHandler(bus.name, groups_per_batch=1, prefetch=1)
    handler.next_batch(10)
    gone = weakref.ref(handler)
    del handler

    def collected() -> bool:
        gc.collect()
        return gone() is None

    wait_until(collected, what="the handler is collected")
    wait_until(lambda: prefetch_threads() <= others, what="its thread ended")
    Consumer(bus.name).close()


def test_a_forked_child_gets_an_error_and_no_hang(bus: Bus, producer: Producer) -> None:
    put_many(producer, 6)
    with OnlineDataHandler(bus.name, groups_per_batch=1, prefetch=2) as handler:
        batch = handler.next_batch(10)
        fill(handler, 2)
        assert handler._prefetcher is not None
        # As if the thread were packing in this very moment.
        with handler._prefetcher.lock:
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                try:
                    said = []
                    for use in (
                        lambda: handler.next_batch(1),
                        lambda: handler.give_back(batch),
                        handler.state_dict,
                        handler.close,
                    ):
                        try:
                            use()
                        except Exception as error:
                            said.append(type(error).__name__)
                    os.write(write, ",".join(said).encode())
                finally:
                    os._exit(0)
        os.close(write)
        said = os.read(read, 1000).decode()
        os.close(read)
        os.waitpid(pid, 0)
        assert said == "BusClosedError,BusClosedError,BusClosedError"
        handler.ack(batch)
        assert keys_of(handler.next_batch(10)) == ["k1"]


INTERRUPTED = """
import sys
from trainer_adapter import OnlineDataHandler
handler = OnlineDataHandler(sys.argv[1], groups_per_batch=2, prefetch=1)
got = []
print("waiting", flush=True)
while True:
    try:
        batch = handler.next_batch(20)
        got += [group.instance_id for group in batch.groups]
        handler.ack(batch)
        if len(got) == 2:
            print("first", flush=True)
        if len(got) == 6:
            break
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print(*got, handler.stats().acknowledged, flush=True)
handler.close()
"""


def test_ctrl_c_interrupts_a_wait(bus: Bus, producer: Producer, spawn: Spawner) -> None:
    child = spawn.script(INTERRUPTED, bus.name, until="waiting")
    put(producer, "k0")
    put(producer, "k1")
    child.expect("first")
    child.send_signal(signal.SIGINT)
    child.expect("interrupted")
    for number in range(2, 6):
        put(producer, f"k{number}")
    assert child.finish().splitlines()[-1] == "k0 k1 k2 k3 k4 k5 12"


def test_threads_keep_the_ledger_balanced(bus: Bus, producer: Producer, seed: int) -> None:
    rng = random.Random(seed)
    with (
        OnlineDataHandler(bus.name, groups_per_batch=3, max_wait=0.05, prefetch=2) as handler,
        ThreadPoolExecutor(1) as pool,
    ):
        sending = pool.submit(put_many, producer, 300)
        got: list[str] = []
        while len(got) < 300:
            batch = handler.next_batch(10)
            if rng.random() < 0.2:
                handler.give_back(batch)
                continue
            got += keys_of(batch)
            handler.ack(batch)
        sending.result()
        assert sorted(got) == sorted(f"k{number}" for number in range(300))
        assert (handler.stats().acknowledged, handler.stats().balanced) == (600, True)
