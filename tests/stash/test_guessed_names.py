"""Names that a newcomer guesses of Consumer: what exists has them, and an error names the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shmbus import Bus, Consumer, Producer


def put(producer: Producer, instance_id: str) -> None:
    producer.put(instance_id, group_size=1, index=0, tokens=np.arange(4, dtype=np.int32))


def test_an_unknown_keyword_of_take_names_take(bus: Bus) -> None:
    with Consumer(bus.name) as consumer:
        with pytest.raises(TypeError, match=r"Consumer\.take\(\).*'n'") as caught:
            consumer.take(n=4)  # type: ignore[call-arg]
        assert "_take" not in str(caught.value)


def test_iteration_with_a_timeout_ends_with_its_error_and_goes_on_behind_it(
    bus: Bus, producer: Producer
) -> None:
    with Consumer(bus.name) as consumer:
        for instance_id in ("a", "b"):
            put(producer, instance_id)
        groups = consumer.iter(timeout=0.01)
        assert [next(groups).instance_id, next(groups).instance_id] == ["a", "b"]
        with pytest.raises(TimeoutError, match=rf"bus '{bus.name}': no group was complete after"):
            next(groups)
        put(producer, "c")
        assert next(consumer.iter(timeout=10)).instance_id == "c"
    assert list(consumer.iter(timeout=0.01)) == []


@pytest.mark.parametrize("timeout", [-1, "soon"])
def test_a_timeout_that_is_no_time_is_refused_before_the_first_group(
    bus: Bus, timeout: Any
) -> None:
    with Consumer(bus.name) as consumer:
        iterate: Callable[..., Iterator[Any]] = consumer.iter
        with pytest.raises((TypeError, ValueError), match="timeout"):
            iterate(timeout=timeout)
