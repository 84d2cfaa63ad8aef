"""Values of the wrong kind, one by one through every public call: never an error from the inside.

What a call is given is a parameter of the public surface; what comes is TypeError, ValueError or
one of `shmbus`' own errors, with the parameter's name, or the call takes it.
"""

from __future__ import annotations

import datetime
import decimal
import enum
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shmbus
from shmbus import Bus, Consumer, Feeder, Producer

TOKENS = np.arange(4, dtype=np.int32)


class Number(enum.IntEnum):
    """An int that is no exact int."""

    ONE = 1


class Text(str):
    """A str that is no exact str."""


#: What a user may pass by mistake, or a hostile colleague on purpose.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400), 0.0, -0.0,
    1.5, float("nan"), float("inf"), -float("inf"), "", "a", "x" * 256, "é" * 128, "\ud800", "\0",
    Text("sub"), b"", b"a", bytearray(b"x"), (), (1,), (1, 2), (2, 1), ("a", "b"), [], [1],
    [[1], [2, 3]], [None], {}, {"a": 1}, {1: 2}, set(), {1}, object(), object, int, len, Number.ONE,
    np.int32(1), np.uint64(2**64 - 1), np.float32(1.5), np.bool_(True), np.str_("s"), np.array(1),
    np.array([1, 2]), np.array([]), np.array("a"), np.datetime64("2020-01-01"), np.timedelta64(1),
    np.zeros(1, [("a", "i4")]), 1 + 2j, decimal.Decimal("1.5"), datetime.datetime(2026, 1, 1),
    range(3), memoryview(b"abc"), Ellipsis, NotImplemented, Exception("x"),
]  # fmt: skip
#: The same for a name of the call that is at fault: what is found there is one of these.
OWN_ERRORS = (TypeError, ValueError, shmbus.ShmbusError)

Call = Callable[[Any], object]


@pytest.fixture
def handles(bus_name: str) -> Iterator[tuple[Bus, Producer, Feeder]]:
    with (
        Bus.create(bus_name, "4MiB", max_producers=4) as bus,
        Producer(bus_name) as producer,
        Feeder(bus_name) as feeder,
    ):
        yield bus, producer, feeder


def faults(call: Call, values: list[Any] = VALUES) -> list[str]:
    """What a call lets through that is not its own error, or says by a codec's words."""
    found = []
    for value in values:
        try:
            call(value)
        except UnicodeError as error:
            found.append(f"{value!a:.40}: {type(error).__name__}: {error}")
        except OWN_ERRORS:
            continue
        except Exception as error:
            found.append(f"{value!a:.40}: {type(error).__name__}: {error}")
    return found


def test_names_of_samples_are_checked_alike_wherever_they_are_given(
    handles: tuple[Bus, Producer, Feeder],
) -> None:
    """`put` says what an id and a round are; begin, abandon, cancelled and request agree."""
    _, producer, feeder = handles

    def refused(call: Call, value: object) -> type[Exception] | None:
        try:
            call(value)
        except (TypeError, ValueError) as error:
            return type(error)
        except shmbus.BusFullError:
            return None
        return None

    kept = {"group_size": 2, "index": 0, "timeout": 0}
    asked = {"group_size": 2, "prompt": TOKENS, "timeout": 0}
    for name, first, others in (
        (
            "instance_id",
            lambda v: producer.put(v, **kept),
            (
                lambda v: producer.begin_sample(v, 0),
                lambda v: producer.abandon_sample(v, 0),
                lambda v: producer.cancelled(v, round=1),
                lambda v: feeder.request(v, **asked),
            ),
        ),
        (
            "round",
            lambda v: producer.put("e", round=v, **kept),
            (
                lambda v: producer.begin_sample("e", 0, round=v),
                lambda v: producer.abandon_sample("e", 0, round=v),
                lambda v: producer.cancelled("e", round=v),
                lambda v: feeder.request("e", round=v, **asked),
            ),
        ),
    ):
        for value in VALUES:
            expected = refused(first, value)
            for other in others:
                assert refused(other, value) is expected, (name, value)


@pytest.mark.filterwarnings("ignore:Data type alias:DeprecationWarning")  # NumPy's, of an "a"
def test_calls_of_a_producer_have_no_error_from_the_inside(
    handles: tuple[Bus, Producer, Feeder],
) -> None:
    _, producer, feeder = handles

    def resize(value: Any) -> None:
        slot = producer.reserve("a", group_size=1, index=0, fields={"x": ("int32", 4)}, timeout=0)
        try:
            slot.resize("x", value)
        finally:
            slot.abort()

    def reserve(fields: Any) -> None:
        producer.reserve("a", group_size=1, index=0, fields=fields, timeout=0).abort()

    calls: dict[str, Call] = {
        "is_wanted": producer.requests.is_wanted,
        "release": producer.requests.release,
        "requests.answer": lambda v: producer.requests.answer(v, tokens=TOKENS),
        "requests.fail": lambda v: producer.requests.fail(v, "why"),
        "resize": resize,
        "fields": lambda v: reserve({"x": ("int32", v)}),
        "dtype": lambda v: reserve({"x": (v, 4)}),
        "field": lambda v: reserve({"x": v}),
        "prompt_need": lambda v: feeder.request("n", group_size=2, need=v, round=1, timeout=0),
        "begin": lambda v: producer.begin_sample("b", v),
    }
    assert {name: found for name, call in calls.items() if (found := faults(call))} == {}


def test_options_of_handles_have_no_error_from_the_inside(
    handles: tuple[Bus, Producer, Feeder],
) -> None:
    bus, producer, _ = handles
    name = producer.name
    used = [v for v in VALUES if v is not None]
    calls: dict[str, Call] = {
        option: lambda v, option=option: Consumer(name, daemon=False, **{option: v}).close()
        for option in (
            "group_timeout",
            "retry_timeout",
            "max_policy_lag",
            "label",
            "sample_retries",
        )
    }
    calls |= {
        "wait": lambda v: Producer(name, wait=v).close(),
        "producer's label": lambda v: Producer(name, label=v).close(),
        "max_producers": lambda v: Bus.ensure(name, max_producers=v).close(),
        "extent_bytes": lambda v: Bus.ensure(name, extent_bytes=v).close(),
        "capacity": lambda v: Bus.ensure(name, v).close(),
        "policy_version": lambda v: setattr(bus, "policy_version", v),
    }
    assert {name: found for name, call in calls.items() if (found := faults(call, used))} == {}


@pytest.mark.parametrize("value", [np.array([1, 2]), int, np.bool_(True), True, "1", 1.0])
def test_what_is_no_int_is_named_with_its_argument(
    handles: tuple[Bus, Producer, Feeder], value: object
) -> None:
    _, producer, _ = handles
    for name in ("group_size", "index", "round", "need", "policy_version"):
        sample: dict[str, Any] = {"group_size": 2, "index": 0, name: value, "tokens": TOKENS}
        with pytest.raises(TypeError, match=f"{name}: expected an int, got "):
            producer.put("a", timeout=0, **sample)
    with pytest.raises(TypeError, match="max_policy_lag: expected an int, got "):
        Consumer(producer.name, max_policy_lag=value)  # type: ignore[arg-type]


def test_a_copy_takes_finite_scores_and_names_what_it_refuses(
    handles: tuple[Bus, Producer, Feeder],
) -> None:
    _, producer, _ = handles
    producer.put("a", group_size=1, index=0, tokens=TOKENS)
    with Consumer(producer.name) as consumer:
        [group] = consumer.take(timeout=30.0)
        [copy] = group.copy()
        group.ack()
    for value, error in ((10**400, ValueError), (float("nan"), ValueError), ((), TypeError)):
        with pytest.raises(error, match="score: expected"):
            copy.score = value
    copy.score = np.float32(0.5)  # type: ignore[assignment]
    assert copy.score == 0.5


def test_a_request_is_made_by_the_bus_only() -> None:
    with pytest.raises(TypeError, match=r"requests\.next"):
        shmbus.Request()
