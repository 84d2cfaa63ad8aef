"""Words of the segment that another process has overwritten: whoever meets them ends its call, and
nothing leads out of the segment."""

import pytest
from conftest import Spawner

PRELUDE = """
import mmap, struct, sys
import numpy as np
from shmbus import Bus, Consumer, Feeder, Producer
from shmbus.inspect.segment_file import SegmentFile

name = sys.argv[1]
X = np.arange(300, dtype=np.int32)

def words_of(name):
    with open(f"/dev/shm/shmbus.{name}", "r+b") as file:
        return mmap.mmap(file.fileno(), 0)
"""

#: Lengths in the head of an open record, with their widths: small lengths, and lengths far beyond.
RESERVED = (
    PRELUDE
    + """
LENGTHS = {"record_bytes": (8, 8), "flags": (28, 4), "meta_bytes": (88, 4), "meta_offset": (92, 4),
           "id_bytes": (96, 2), "field_count": (98, 2), "shape_words": (100, 4),
           "schema_bytes": (104, 4)}

def head_of(words, key):
    text = words.rfind(key)
    for at in range(text // 64 * 64, 0, -64):
        (shape_words,) = struct.unpack_from("<I", words, at + 100)
        if at + 128 + 8 * shape_words == text:
            return at
    raise AssertionError(key)

with Bus.create(name, "4MiB", max_producers=2) as bus:
    words = words_of(name)
    number = 0
    for checksum in (False, True):
        with Producer(name, checksum=checksum) as producer:
            for at, width in LENGTHS.values():
                for value in (0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**64 - 1):
                    key = f"needle-{number:04}"
                    number += 1
                    fields = {"x": (X.dtype, X.shape)}
                    r = producer.reserve(key, group_size=1, index=0, meta_room=64, fields=fields)
                    r["x"][:] = X
                    head = head_of(words, key.encode())
                    mask = (1 << 8 * width) - 1
                    words[head + at : head + at + width] = (value & mask).to_bytes(width, "little")
                    r.meta = {"a": 1}
                    r.commit()
    del r, words
    with Consumer(name, daemon=False) as consumer:
        while groups := consumer.take(64, 0):
            consumer.ack(groups)
        ledger = consumer.stats()
        assert ledger.balanced and not ledger.undelivered, ledger
print("ended")
"""
)

LANE = (
    PRELUDE
    + """
with Bus.create(name, "4MiB", max_producers=2) as bus:
    words = words_of(name)
    with SegmentFile(name) as file:
        lane, _ = file.tables["lane"]
    with Producer(name) as producer, Feeder(name) as feeder:
        number = 0
        def offer(count):
            global number
            for _ in range(count):
                feeder.request(f"q{number}", group_size=2, prompt=X[:4])
                number += 1
        def take_all():
            found = []
            while (request := producer.requests.next(0)) is not None:
                found.append((request.instance_id, request.index))
                assert producer.requests.answer(request, x=X[:4])
            return found
        with Consumer(name, daemon=False) as consumer:
            for at in (256, 384):  # heads, tails
                for value in (0, 1, 5, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1):
                    offer(3)
                    (before,) = struct.unpack_from("<Q", words, lane + at)
                    struct.pack_into("<Q", words, lane + at, value)
                    first = take_all()
                    offer(3)
                    first += take_all()
                    assert len(first) == len(set(first)) == 12, (at, value, before, first)
                    for _ in range(20):
                        consumer.ack(consumer.take(64, 0))
print("ended")
"""
)


@pytest.mark.timeout(60)
def test_lengths_of_an_open_reservation_lead_no_writer_astray(
    bus_name: str, spawn: Spawner
) -> None:
    assert "ended" in spawn.script(RESERVED, bus_name).finish()


@pytest.mark.timeout(60)
def test_the_ends_of_the_request_lane_may_say_anything(bus_name: str, spawn: Spawner) -> None:
    assert "ended" in spawn.script(LANE, bus_name).finish()
