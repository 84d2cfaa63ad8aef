"""Payload into the ring: by non-temporal stores for a consumer that packs, and whole either way."""

from collections.abc import Callable

import numpy as np
import pytest
from conftest import Daemon

from shmbus import Bus, Consumer, Producer
from shmbus.inspect.segment_file import SegmentFile
from trainer_adapter import OnlineDataHandler


def consumer_packs(name: str) -> bool:
    """Whether the segment tells producers about packed payloads."""
    segment = SegmentFile(name)
    segment.refresh()
    return bool(segment.header["consumer_packs"])


def put_one(producer: Producer, key: str) -> None:
    producer.put(key, group_size=1, index=0, tokens=np.arange(3000, dtype=np.int32), timeout=9)


def pack(name: str, producer: Producer, batches: int) -> None:
    with OnlineDataHandler(name, tokens_per_batch=3000, layout="packed") as handler:
        for number in range(batches):
            put_one(producer, f"packed{number}")
            batch = handler.next_batch(timeout=9)
            np.testing.assert_array_equal(batch.tokens, np.arange(3000))
            handler.ack(batch)


# The larger group's records of more than 4 KiB exceed a cache.
@pytest.mark.parametrize("group_size", [1, 16_384])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("checksum", [False, True])
def test_every_byte_arrives_whatever_the_size_and_alignment(
    bus_name: str, checksum: bool, packs: bool, group_size: int
) -> None:
    # Large arrays enter the ring differently from small arrays, by whole cache lines.
    noise = np.random.default_rng(1).integers(0, 256, 20_000, np.uint8)
    sizes = [1, 63, 64, 2047, 2048, 2049, 2111, 2112, 4095, 4097, 18_432]
    with (
        Bus.create(bus_name, "1MiB"),
        Producer(bus_name, checksum=checksum) as producer,
        Consumer(bus_name) as consumer,
    ):
        if packs:
            consumer._require_source().reader.note_packing()
        assert consumer_packs(bus_name) == packs
        for size in sizes:
            for skip in (0, 1, 8, 17):
                sent = noise[skip : skip + size]
                producer.put(
                    "x", group_size=group_size, need=1, round=size * 100 + skip, index=0, a=sent,
                    b=sent[::-1].copy(), timeout=9,
                )  # fmt: skip
                (group,) = consumer.take(timeout=9)
                with group:
                    np.testing.assert_array_equal(group[0]["a"], sent)
                    np.testing.assert_array_equal(group[0]["b"], sent[::-1])


def test_producers_hear_that_batches_are_packed_and_each_consumer_says_so_anew(
    bus_name: str,
) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        with Consumer(bus_name) as consumer:
            put_one(producer, "viewed")
            for group in consumer.take(timeout=9):
                with group:
                    assert group[0]["tokens"][-1] == 2999
            assert not consumer_packs(bus_name)
        pack(bus_name, producer, 1)
        assert consumer_packs(bus_name)
        with Consumer(bus_name):
            assert not consumer_packs(bus_name)


def test_producers_hear_it_through_a_daemon_too(
    daemon: Callable[..., Daemon], bus_name: str
) -> None:
    daemon("--capacity", "1MiB")
    with Producer(bus_name) as producer:
        # A client reports its work with its next request.
        pack(bus_name, producer, 2)
        assert consumer_packs(bus_name)
