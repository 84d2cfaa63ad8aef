"""Setting meta runs foreign code; the reservation sees its effects before any write."""

import datetime
import threading
from collections.abc import Callable

import numpy as np
import pytest
from conftest import beside, ends_of

import shmbus
from shmbus import Bus, Consumer, Producer
from shmbus_ext import _core


class Zone(datetime.tzinfo):
    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def utcoffset(self, when: datetime.datetime | None) -> datetime.timedelta:
        self._act()
        return datetime.timedelta(hours=1)

    def dst(self, when: datetime.datetime | None) -> None:
        return None

    def tzname(self, when: datetime.datetime | None) -> str:
        return "here"


def when(act: Callable[[], object]) -> datetime.datetime:
    return datetime.datetime(2026, 1, 1, tzinfo=Zone(act))


def reserve(producer: Producer, key: str) -> _core.Reservation:
    return producer.reserve(
        key, group_size=1, index=0, fields={"x": ("int32", 4)}, meta={"first": key}, timeout=10
    )


@pytest.mark.parametrize("end", ["commit", "abort", "close"])
def test_a_value_whose_encoding_ends_the_reservation_changes_no_record(
    bus_name: str, end: str
) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as other:
        producer = Producer(bus_name)
        slot = reserve(producer, "a")
        slot["x"][:] = 1
        ends = {"commit": slot.commit, "abort": slot.abort, "close": producer.close}
        with pytest.raises(shmbus.BusClosedError):
            slot.meta = {"corrupt": when(ends[end])}
        with Consumer(bus_name, daemon=False) as consumer:
            other.put("b", group_size=1, index=0, meta={"first": "b"}, x=np.arange(4))
            metas = {}
            while "b" not in metas:
                for group in consumer.take(timeout=10):
                    metas[group.instance_id] = group[0].meta
                    group.ack()
            expected = ("a", "b") if end == "commit" else ("b",)
            assert metas == {key: {"first": key} for key in expected}
            assert consumer.stats().dropped == {}
        producer.close()


def test_another_thread_that_ends_the_reservation_meanwhile_changes_no_record(
    bus_name: str,
) -> None:
    with ends_of(Bus.create(bus_name, "256KiB"), daemon=False) as (producer, consumer):
        for number in range(20):
            slot = reserve(producer, f"g{number}")
            in_encoder, ended = threading.Event(), threading.Event()

            def commit(
                slot: _core.Reservation = slot,
                in_encoder: threading.Event = in_encoder,
                ended: threading.Event = ended,
            ) -> None:
                in_encoder.wait()
                slot.commit()
                ended.set()

            def linger(
                in_encoder: threading.Event = in_encoder, ended: threading.Event = ended
            ) -> None:
                in_encoder.set()
                ended.wait()

            with beside(commit), pytest.raises(shmbus.BusClosedError):
                slot.meta = {"corrupt": when(linger)}
            (group,) = consumer.take(timeout=10)
            assert group[0].meta == {"first": f"g{number}"}
            group.ack()
        assert consumer.stats().dropped == {}


def test_the_bound_on_shapes_is_what_the_message_says(producer: Producer) -> None:
    fits = {f"f{i}": np.zeros((1,) * 15, np.uint8) for i in range(64)}
    producer.put("a", group_size=1, index=0, **fits)
    wide = {f"f{i}": np.zeros((1,) * 16, np.uint8) for i in range(64)}
    for attempt in (
        lambda: producer.put("a", group_size=1, index=0, **wide),
        lambda: producer.reserve(
            "a", group_size=1, index=0, fields={n: ("u1", a.shape) for n, a in wide.items()}
        ),
    ):
        with pytest.raises(ValueError, match=r"f60: expected at most 1024 words of shapes"):
            attempt()
