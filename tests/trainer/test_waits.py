"""A waiting trainer: a timeout bounds the call, nothing held is lost, the error tells the cause."""

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Daemon, keys_of, next_request, wait_until

from shmbus import Bus, Consumer, Producer
from shmbus.base import limits
from trainer_adapter import OnlineDataHandler

TOKENS = np.arange(4, dtype=np.int32)


def put(producer: Producer, key: str) -> None:
    producer.put(key, group_size=1, index=0, score=1.0, tokens=TOKENS)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("timeout", [0, 0.3])
def test_held_groups_keep_it(bus: Bus, producer: Producer, prefetch: int, timeout: float) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=3, prefetch=prefetch) as handler:
        put(producer, "a")
        put(producer, "b")
        with pytest.raises(TimeoutError):
            while True:  # the thread may be late to take them
                handler.next_batch(timeout)
        # A prefetching thread with both in hand may count them late.
        wait_until(lambda: "2 of 3 groups are held for the next batch" in said(handler))
        with pytest.raises(TimeoutError, match="2 of 3 groups are held for the next batch"):
            handler.next_batch(timeout)
        assert handler.state_dict()["trained"] == [] and handler.stats().leased == 2
        put(producer, "c")
        assert keys_of(handler.next_batch(30)) == ["a", "b", "c"]


def said(handler: OnlineDataHandler) -> str:
    try:
        handler.next_batch(0)
    except TimeoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("prefetch", [0, 1])
def test_short_waits_add_up_to_max_wait(bus: Bus, producer: Producer, prefetch: int) -> None:
    with OnlineDataHandler(
        bus.name, tokens_per_batch=1000, max_wait=0.4, prefetch=prefetch
    ) as handler:
        put(producer, "a")
        timeouts = 0
        while True:
            try:
                batch = handler.next_batch(0.05)
                break
            except TimeoutError:
                timeouts += 1
        assert keys_of(batch) == ["a"] and timeouts


def test_held_groups_do_not_extend_an_iteration(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        put(producer, "a")
        with pytest.raises(TimeoutError, match="1 of 2 groups are held"):
            next(handler.iter(0.2))
        put(producer, "b")
        assert keys_of(next(handler.iter(30))) == ["a", "b"]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_wait_that_nobody_can_end_is_ended_at_once(bus: Bus, prefetch: int) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2, prefetch=prefetch) as handler:
        handler.request("q", group_size=1)
        with Producer(bus.name) as producer:
            request = next_request(producer)
            producer.requests.answer(request, score=1.0, tokens=TOKENS)
        with pytest.raises(TimeoutError, match=r"1 of 2 groups are held .* no prompt is open"):
            handler.next_batch()  # unlimited
        handler.request("r", group_size=1)
        with Producer(bus.name) as producer:
            request = next_request(producer)
            producer.requests.answer(request, score=1.0, tokens=TOKENS)
        assert keys_of(handler.next_batch(30)) == ["q", "r"]


def test_a_wait_goes_on_while_somebody_may_put(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        with pytest.raises(TimeoutError, match=r"no batch within 0\.3 s"):
            handler.next_batch(0.3)  # without requests: any producer may put
        handler.request("q", group_size=1)
        request = next_request(producer)
        producer.requests.fail(request, "none")
        with pytest.raises(TimeoutError, match=r"no batch within 0\.3 s.*no prompt is open"):
            handler.next_batch(0.3)  # the producer may put without a request


@pytest.mark.parametrize(("prefetch", "ranks"), [(0, 1), (1, 1), (0, 2)])
def test_a_stopped_daemon_lengthens_no_wait(
    daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, prefetch: int, ranks: int
) -> None:
    monkeypatch.setattr(limits, "CLIENT_WAIT_S", 600.0)
    served = daemon("--capacity", "16MiB")
    with OnlineDataHandler(
        served.name, groups_per_batch=1, prefetch=prefetch, rank=0, world_size=ranks
    ) as handler:
        handler.offer([{"prompt": [1]}], group_size=1)
        with pytest.raises(TimeoutError, match="1 prompt is open"):
            handler.next_batch(0.2)
        served.child.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=rf"its daemon \(last pid {served.child.pid}\)"):
            handler.next_batch(0.2)
        served.child.send_signal(signal.SIGCONT)


SIX = np.arange(6, dtype=np.int32)


def put_pair(producer: Producer, key: str, size: int = 2, **more: Any) -> None:
    for index in range(size):
        producer.put(key, group_size=size, index=index, score=index, tokens=SIX, **more)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_timeout_names_drops_once(bus: Bus, producer: Producer, prefetch: int) -> None:
    put_pair(producer, "before")
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, max_policy_lag=4, prefetch=prefetch
    ) as handler:
        handler.ack(handler.next_batch(timeout=10))
        handler.set_policy_version(100)
        for number in range(6):
            put_pair(producer, f"old{number}")
        with pytest.raises(TimeoutError) as caught:
            handler.next_batch(timeout=0.2)
        text = str(caught.value)
        assert "12 samples were dropped since this handler was made: 12 stale" in text
        assert "the trainer is at version 100, they are below 96" in text
        assert "policy_version=?" in text
        with pytest.raises(TimeoutError) as caught:
            handler.next_batch(timeout=0)
        assert "dropped" not in str(caught.value)


def test_a_timeout_says_how_many_batches_are_out(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        batches = []
        for number, words in enumerate(("1 batch is out", "2 batches are out")):
            put_pair(producer, f"g{number}")
            batches.append(handler.next_batch(timeout=10))
            with pytest.raises(TimeoutError, match=f"{words} and not acknowledged"):
                handler.next_batch(timeout=0)
        for batch in batches:
            handler.ack(batch)
        with pytest.raises(TimeoutError) as caught:
            handler.next_batch(timeout=0)
        assert "out and not" not in str(caught.value)


def test_a_prompt_under_way_twice_is_told_with_the_remedy(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        for index in (0, 0):
            producer.put("q", group_size=2, index=index, tokens=SIX)
        with pytest.raises(TimeoutError, match=r"1 duplicate \(.*round=producer.next_round"):
            handler.next_batch(timeout=0.1)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_returned_batch_is_listed_to_its_end(bus: Bus, producer: Producer, prefetch: int) -> None:
    for number in range(3):
        put_pair(producer, f"g{number}")
    with OnlineDataHandler(bus.name, groups_per_batch=1, prefetch=prefetch) as handler:
        handler.next_batch(timeout=10)
        handler.next_batch(timeout=10)
        assert [batch.step for batch in handler.out] == [0, 1]
        handler.ack(handler.out[0])
        [lost] = handler.out
        handler.give_back(lost)
        assert handler.out == []
        batch = handler.next_batch(timeout=10)
        assert (batch.step, batch.groups[0].instance_id) == (2, "g1")
        assert handler.out == [batch] and handler.state_dict()["step"] == 3


def test_a_policy_version_never_goes_back_but_to_a_checkpoint(bus: Bus) -> None:
    with OnlineDataHandler(bus.name) as handler:
        handler.set_policy_version(3)
        state = handler.state_dict()
        handler.set_policy_version(5)
        handler.set_policy_version(5)
        with pytest.raises(ValueError, match=r"policy_version: expected 5 or more.*got 3"):
            handler.set_policy_version(3)
        assert bus.policy_version == 5
        handler.load_state_dict(state)
        assert bus.policy_version == 3
    with Consumer(bus.name) as consumer:
        with pytest.raises(ValueError, match="expected 3 or more"):
            consumer.policy_version = 2
        consumer.reset_policy_version(2)
        assert consumer.policy_version == 2
