"""``shmbus inspect``: every record and what holds it, of any segment, in any state."""

import os
import random

from conftest import Spawner
from operators import (
    WORKER,
    cli,
    data_offset,
    header_offset,
    put_group,
    put_until_moved,
    segment_path,
    write_at,
)

import shmbus
from shmbus.inspect.dump import inspect


def test_inspect_shows_every_record_with_its_state_and_checks(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name, checksum=True) as producer:
        put_group(producer, "done")
        with shmbus.Consumer(bus_name) as consumer:
            consumer.take(1, timeout=10)[0].ack()
        put_group(producer, "waits", skip=2)
        with producer.reserve("open", group_size=2, index=0, fields={"x": ("int8", 8)}):
            result = cli("inspect", bus_name, "--json", "--payload")
            assert result.status == 0, result.err
            found = result.json()
    assert found["problem"] is None and found["in_use"]
    assert [r["state"] for r in found["records"][-4:]] == ["committed"] * 3 + ["reserved"]
    waits = [r for r in found["records"] if r["instance_id"] == "waits"]
    assert [r["index"] for r in waits] == [0, 1, 3]
    assert {r["verdict"] for r in found["records"]} == {"ok"}
    assert waits[0]["fields"] == ["tokens <i4 (64,)"]
    assert waits[0]["producer_id"] == 1 and waits[0]["sequence"] == 4
    pins = [pin for run in found["runs"] for pin in run["pinned_by"]]
    assert "its owner still writes there" in pins
    assert "1 open reservation" in pins
    assert "3 undelivered or unacknowledged" in pins


def test_inspect_limits_its_rows(bus_name: str, spawn: Spawner) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        put_group(producer, "mine")
        spawn.script(WORKER, bus_name, 5, "w").expect("ready")
        all_of_it = inspect(bus_name, limit=1000)
        assert len(all_of_it.records) == 25 and all_of_it.records_omitted == 0
        text = cli("inspect", bus_name, "--limit", "3")
        assert text.status == 0
        assert "and 22 more" in text.out
        assert cli("inspect", bus_name, "--limit", "-1").status == 2


def test_damage_is_found_named_and_gives_status_1(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name, checksum=True) as producer:
        for name in ("a", "b", "c"):
            put_group(producer, name, size=1)
        size = producer.stats().bytes // 3
        at = data_offset(bus_name)
        write_at(bus_name, at + size - 64, b"\xff" * 64)  # the first one's payload
        write_at(bus_name, at + size + 56, b"\xff" * 8)  # the second one's score
        found = inspect(bus_name, payload=True)
        assert [r.verdict for r in found.records] == ["payload", "header", "ok"]
        assert [r.verdict for r in inspect(bus_name).records] == ["ok", "header", "ok"]
        assert cli("inspect", bus_name).status == 1
        write_at(bus_name, at + 2 * size + 8, b"\xff" * 8)  # the third one's length
        result = cli("inspect", bus_name, "--json")
        assert result.status == 1
        assert result.json()["records"][-1]["state"] == "unreadable"
        assert result.json()["runs"][0]["unreadable"] == size
        assert "damaged" in result.err


def test_a_foreign_segment_shows_its_header_and_its_users(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"):
        write_at(bus_name, header_offset("layout_version"), (42).to_bytes(4, "little"))
        result = cli("inspect", bus_name, "--json")
        assert result.status == 1
        found = result.json()
        assert found["header"]["layout_version"] == 42
        assert "layout version 42" in found["problem"]
        assert found["in_use"]
        assert found["slots"] == found["runs"] == found["records"] == []
        assert "open in a living process" in cli("inspect", bus_name).out


def test_a_truncated_segment_is_walked_as_far_as_it_goes(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB") as bus, shmbus.Producer(bus_name) as producer:
        for number in range(200):
            put_group(producer, f"g{number}")
        extent = bus.extent_bytes
    shmbus.Bus.create(bus_name, "1MiB").close()
    with shmbus.Producer(bus_name) as producer:
        for number in range(100):
            put_group(producer, f"g{number}")
    os.truncate(segment_path(bus_name), data_offset(bus_name) + 2 * extent)
    result = cli("inspect", bus_name, "--json", "--limit", "1000")
    assert result.status == 1
    found = result.json()
    assert "bytes" in found["problem"]
    assert sum(r["state"] == "committed" for r in found["records"]) > 0
    assert found["records"][-1]["state"] == "unreadable"


def test_a_dead_owners_open_reservation_is_shown(bus_name: str, spawn: Spawner) -> None:
    shmbus.Bus.create(bus_name, "1MiB").close()
    child = spawn.script(
        "import sys, time, shmbus\n"
        "producer = shmbus.Producer(sys.argv[1])\n"
        "slot = producer.reserve('x', group_size=1, index=0, fields={'a': ('int8', 64)})\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)",
        bus_name,
    )
    child.expect("ready")
    child.kill()
    found = inspect(bus_name)
    assert [r.state for r in found.records] == ["reserved"]
    assert not found.slots[0].locked
    assert found.runs[0].pinned_by[:2] == [
        "its dead owner, until the next sweep",
        "1 open reservation",
    ]


def test_moved_stragglers_lie_in_the_collectors_lane(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        with shmbus.Consumer(bus_name) as consumer:
            put_until_moved(producer, consumer)
        found = inspect(bus_name, limit=10_000)
        moved = [r for r in found.records if r.moved]
        assert moved and all(r.instance_id.startswith("straggler") for r in moved)
        assert any(run.collector for run in found.runs)


def test_random_bytes_anywhere_never_crash_a_walk(bus_name: str, seed: int) -> None:
    rng = random.Random(seed)
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name, checksum=True) as producer:
        for number in range(40):
            put_group(producer, f"g{number}")
    shmbus.Bus.create(bus_name, "1MiB").close()
    with shmbus.Producer(bus_name, checksum=True) as producer:
        for number in range(40):
            put_group(producer, f"g{number}")
    original = segment_path(bus_name).read_bytes()
    end = data_offset(bus_name) + 100_000
    for _ in range(100):
        for _ in range(rng.randint(1, 40)):
            write_at(bus_name, rng.randrange(end - 16), rng.randbytes(rng.choice([1, 4, 8, 16])))
        found = inspect(bus_name, limit=10_000, payload=True)
        assert found.file_bytes == len(original)
        write_at(bus_name, 0, original[:end])
    assert {r.verdict for r in inspect(bus_name, limit=10_000, payload=True).records} == {"ok"}
