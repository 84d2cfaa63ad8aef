"""The table of wanted samples: whole rows only, and each request to one producer at a time."""

import random
from pathlib import Path

import pytest
from conftest import Spawner, wait_until

from shmbus import Bus, Consumer, Producer
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.tables import read_wanted
from shmbus.segment.lifecycle import open_segment
from shmbus.segment.names import shm_path
from shmbus_ext import _core

CLAIMER = """
import sys
from shmbus.segment.lifecycle import open_segment
from shmbus_ext import _core
segment, me = open_segment(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
mine, over = [], False
while not over:
    requests = _core.retry_requests(segment)
    for row, number, claimant, id_, *group, index, attempt, reason, _ in requests:
        assert (id_, *group) == (f"p{number}", number, number % 3, 8, 4), (number, id_, group)
        assert reason == "x" * (number % 190) and index == number % 8 and attempt == number % 5
        over = over or number == 20_000
        if not claimant and number < 20_000:
            if _core.retry_claim(segment, row, number, me):
                mine.append(number)
print(*mine, flush=True)
"""


def want(segment: _core.Segment, row: int, number: int) -> None:
    reason = b"x" * (number % 190)
    _core.retry_publish(
        segment, row, number, f"p{number}", number, number % 3, 8, 4, number % 8, number % 5, reason
    )  # fmt: skip


def test_changing_rows_tear_no_request(bus_name: str, spawn: Spawner, seed: int) -> None:
    rng = random.Random(seed)
    with Bus.create(bus_name, "1MiB"):
        segment = open_segment(bus_name)
        claimers = [spawn.script(CLAIMER, bus_name, me) for me in (1, 2, 3)]
        for claimer in claimers:
            claimer.expect("ready")
        for number in range(1, 20_000):
            row = rng.randrange(4)
            want(segment, row, number)
            if rng.random() < 0.2:
                _core.retry_withdraw(segment, row)
        want(segment, 5, 20_000)
        got = [int(n) for c in claimers for n in c.finish().split("\n", 1)[1].split()]
        assert got and len(set(got)) == len(got)
        segment.close()


def test_a_claim_is_of_the_request_that_was_seen(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"):
        segment = open_segment(bus_name)
        want(segment, 0, 7)
        assert not _core.retry_claim(segment, 0, 6, 1)
        assert _core.retry_requests(segment)[0][2] == 0  # put back
        assert _core.retry_claim(segment, 0, 7, 1)
        assert not _core.retry_claim(segment, 0, 7, 2)
        assert not _core.retry_unclaim(segment, 0, 7, 2)
        assert _core.retry_unclaim(segment, 0, 7, 1)
        assert _core.retry_claim(segment, 0, 7, 2)
        assert not _core.retry_unclaim(segment, 0, 6, 2)
        want(segment, 0, 8)
        assert not _core.retry_unclaim(segment, 0, 7, 2)
        _core.retry_withdraw(segment, 0)
        assert _core.retry_requests(segment) == [] and not _core.retry_claim(segment, 0, 8, 1)
        with pytest.raises(SystemError):
            _core.retry_withdraw(segment, _core.RETRY_ENTRIES)
        segment.close()


def test_a_scribbled_table_is_not_believed(bus_name: str, seed: int) -> None:
    rng = random.Random(seed)
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        with SegmentFile(bus_name) as file:
            table = file.table("retries")
            path = Path(shm_path(bus_name))
            start, _ = file.tables["retries"]
        assert not any(table)
        for _ in range(30):
            with path.open("r+b") as raw:
                raw.seek(start)
                raw.write(rng.randbytes(len(table)))
            segment = open_segment(bus_name)
            _core.retry_note(segment, 5, 0)
            segment.close()
            assert producer.requests.retries() == []
            with SegmentFile(bus_name) as file:
                assert read_wanted(file) == []
        producer.fail("a", 0, "x", group_size=2)
        with Consumer(bus_name, sample_retries=1) as consumer:
            wait_until(lambda: consumer.take(timeout=0.01) or producer.requests.retries())
