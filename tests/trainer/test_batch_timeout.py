"""A timeout bounds the wait for a batch, and what is held then stays for the next call."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from conftest import keys_of, wait_until

from shmbus import Bus, Producer
from trainer_adapter import OnlineDataHandler

TOKENS = np.arange(4, dtype=np.int32)


def put(producer: Producer, key: str) -> None:
    producer.put(key, group_size=1, index=0, score=1.0, tokens=TOKENS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("timeout", [0, 0.3])
def test_a_timeout_bounds_the_call_though_groups_are_held(
    bus: Bus, producer: Producer, prefetch: int, timeout: float
) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=3, prefetch=prefetch) as handler:
        put(producer, "a")
        put(producer, "b")
        with pytest.raises(TimeoutError):
            while True:  # the thread may not have taken them by then
                handler.next_batch(timeout)
        wait_until(lambda: held(handler) == 2)
        with pytest.raises(TimeoutError, match="2 of 3 groups are held for the next batch"):
            handler.next_batch(timeout)
        assert handler.state_dict()["trained"] == [] and handler.stats().leased == 2
        put(producer, "c")
        assert keys_of(handler.next_batch(30)) == ["a", "b", "c"]


def held(handler: OnlineDataHandler) -> int:
    with contextlib.suppress(TimeoutError):
        handler.next_batch(0)
    return handler.stats().leased


@pytest.mark.timeout(60)
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


@pytest.mark.timeout(60)
def test_an_iteration_with_a_timeout_ends_though_groups_are_held(
    bus: Bus, producer: Producer
) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        put(producer, "a")
        with pytest.raises(TimeoutError, match="1 of 2 groups are held"):
            next(handler.iter(0.2))
        put(producer, "b")
        assert keys_of(next(handler.iter(30))) == ["a", "b"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_wait_that_nobody_can_end_is_ended_at_once(bus: Bus, prefetch: int) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2, prefetch=prefetch) as handler:
        handler.request("q", group_size=1)
        with Producer(bus.name) as producer:
            request = producer.requests.next(timeout=30)
            assert request is not None
            producer.requests.answer(request, score=1.0, tokens=TOKENS)
        with pytest.raises(TimeoutError, match=r"1 of 2 groups are held .* no prompt is open"):
            handler.next_batch()  # without any limit
        handler.request("r", group_size=1)
        with Producer(bus.name) as producer:
            request = producer.requests.next(timeout=30)
            assert request is not None
            producer.requests.answer(request, score=1.0, tokens=TOKENS)
        assert keys_of(handler.next_batch(30)) == ["q", "r"]


@pytest.mark.timeout(60)
def test_a_wait_goes_on_while_somebody_may_put(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        with pytest.raises(TimeoutError, match=r"no batch within 0\.3 s"):
            handler.next_batch(0.3)  # it has requested nothing: whoever comes may put
        handler.request("q", group_size=1)
        request = producer.requests.next(timeout=30)
        assert request is not None
        producer.requests.fail(request, "none")
        with pytest.raises(TimeoutError, match=r"no batch within 0\.3 s.*no prompt is open"):
            handler.next_batch(0.3)  # the producer may put without a request
