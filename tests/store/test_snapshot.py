"""Snapshots: whole or absent; restored samples equal the saved ones, once."""

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tracemalloc
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, wait_until
from operators import WORKER, cli, data_offset, put_group, put_until_moved, segment_path, write_at

import shmbus
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.status import read_status
from shmbus.inspect.undelivered import stream_undelivered, undelivered_records
from shmbus.store import parts, snapshot


def fill(producer: shmbus.Producer, rng: np.random.Generator, groups: int) -> dict[Any, Any]:
    """Put groups of 3 with every kind of array; return the puts, by (id, index)."""
    put = {}
    structured = np.dtype([("a", "<i2"), ("b", "<f8", (2,))])
    for number in range(groups):
        for index in range(3):
            arrays: dict[str, Any] = {
                "tokens": rng.integers(0, 50_000, rng.integers(0, 40), dtype=np.int32),
                "mask": rng.random((2, int(rng.integers(0, 9)))) > 0.5,
                "scalar": np.asarray(rng.random()),
            }
            if number % 3 == 1:
                arrays = {"half": rng.random(7).astype(np.float16), "s": np.zeros(3, structured)}
                arrays["s"]["a"] = number
            if number % 3 == 2:
                arrays = {"words": np.array(["ab", "cde"]), "big": np.full(9000, number, ">i4")}
            meta = {"number": number, "index": index} if index else None
            producer.put(
                f"prompt-ü-{number}", group_size=3, index=index, score=float(rng.random()),
                policy_version=number, round=number if number % 2 else None, meta=meta, **arrays,
            )  # fmt: skip
            put[f"prompt-ü-{number}", index] = (arrays, meta, number)
    return put


def check(trajectory: shmbus.Trajectory, put: dict[Any, Any]) -> None:
    arrays, meta, number = put.pop((trajectory.instance_id, trajectory.index))
    assert trajectory.meta == meta
    assert trajectory.policy_version == number
    assert trajectory.round == (number if number % 2 else None)
    assert set(trajectory.keys()) == set(arrays)
    for name, array in arrays.items():
        assert trajectory[name].dtype == array.dtype
        assert trajectory[name].shape == array.shape
        np.testing.assert_array_equal(trajectory[name], array)


def test_restored_groups_have_their_ledger(bus_name: str, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = {}
    with shmbus.Bus.create(bus_name, "8MiB") as bus:
        bus.policy_version = 31
        with shmbus.Producer(bus_name, checksum=True, label="w1") as producer:
            put = fill(producer, rng, 30)
            put_group(producer, "open", skip=2)
        with shmbus.Consumer(bus_name) as consumer:
            groups = consumer.take(5, timeout=10)
            for group in groups[:3]:
                for trajectory in group:
                    check(trajectory, put)
                group.ack()
            for trajectory in groups[3]:
                put.pop((trajectory.instance_id, trajectory.index))
            groups[3].drop()
            for group in groups[4:]:
                numbers = {(t.instance_id, t.index): (t.producer_id, t.sequence) for t in group}
        before = read_status(bus_name)
        manifest = snapshot.take(bus_name, tmp_path / "snap")
        assert manifest.records == 30 * 3 - 12 + 3
        assert read_status(bus_name).ledger == before.ledger
    assert snapshot.restore(tmp_path / "snap") == manifest
    after = read_status(bus_name)
    assert after.ledger == before.ledger
    assert after.policy_version == 31
    assert (after.capacity, after.extent_bytes) == (before.capacity, before.extent_bytes)
    assert [p.committed for p in after.producers] == [p.committed for p in before.producers]
    assert [p.label for p in after.producers] == ["w1"]
    with shmbus.Producer(bus_name) as producer, shmbus.Consumer(bus_name) as consumer:
        assert producer.producer_id >= manifest.next_producer_id
        producer.put("open", group_size=4, index=2, score=2)
        while len(put) > 0:
            for group in consumer.take(64, timeout=10):
                for trajectory in group:
                    key = (trajectory.instance_id, trajectory.index)
                    if key in numbers:
                        assert numbers[key] == (trajectory.producer_id, trajectory.sequence)
                    if trajectory.instance_id != "open":
                        check(trajectory, put)
                group.ack()
        consumer.take(64, timeout=0)
        ledger = consumer.stats()
        assert ledger.balanced
        assert ledger.dropped == {"malformed": 3}
        assert ledger.committed == 30 * 3 + 3 + 1
        assert ledger.leased + ledger.stashed + ledger.in_ring in (0, 4)


@pytest.mark.parametrize("bound", [{"max_lead": 2}, {"max_lead_versions": 3}, {}])
def test_a_restored_bus_keeps_its_bounds(
    bus_name: str, tmp_path: Path, bound: dict[str, int]
) -> None:
    ensure = functools.partial(
        shmbus.Bus.ensure, bus_name, "8MiB", request_capacity="1MiB", **bound
    )
    ensure().close()
    with shmbus.Producer(bus_name) as producer:
        put_group(producer, "open", skip=2)
        producer.fail("failed", 0, "why", group_size=1)
    snapshot.take(bus_name, tmp_path / "taken")
    shmbus.unlink(bus_name)
    snapshot.restore(tmp_path / "taken")
    ensure().close()
    with shmbus.Producer(bus_name) as producer:
        for number in range(bound.get("max_lead", 1) - 1):
            producer.put(f"other-{number}", group_size=2, index=0)
        if bound:  # the restored group counts, and its sample passes
            with pytest.raises(shmbus.BusFullError, match="ahead"):
                producer.put("new", group_size=2, index=0, timeout=0)
        producer.put("open", group_size=4, index=2, timeout=0)
    with shmbus.Consumer(bus_name) as consumer, consumer.take(1, timeout=10)[0] as group:
        assert (group.instance_id, len(group)) == ("open", 4)


def test_a_dead_buss_records_survive(bus_name: str, spawn: Spawner, tmp_path: Path) -> None:
    shmbus.Bus.create(bus_name, "4MiB").close()
    for label in ("a", "b"):
        worker = spawn.script(WORKER, bus_name, 20, label, until="ready")
        worker.kill()
    assert cli("snapshot", bus_name, str(tmp_path / "snap")).status == 0
    shmbus.unlink(bus_name)
    result = cli("restore", str(tmp_path / "snap"), "--json")
    assert result.status == 0
    assert result.json()["records"] == 162
    with shmbus.Consumer(bus_name) as consumer:
        assert len(consumer.take(100, timeout=10)) == 40
        assert consumer.stats().balanced


def test_snapshots_of_snapshots_change_nothing_through_ten_restores(
    bus_name: str, tmp_path: Path
) -> None:
    with shmbus.Bus.create(bus_name, "2MiB"), shmbus.Producer(bus_name) as producer:
        fill(producer, np.random.default_rng(0), 20)
        before = snapshot.take(bus_name, tmp_path / "0")
    lasting: dict[str, set[bytes]] = {}
    for number in range(10):
        snapshot.restore(tmp_path / f"{number}", capacity="3MiB" if number % 2 else None)
        again = snapshot.take(bus_name, tmp_path / f"again {number}")
        assert (again.slots, again.released) == (before.slots, before.released)
        assert again.records == before.records
        assert again.next_producer_id >= before.next_producer_id
        with shmbus.Producer(bus_name) as producer, shmbus.Consumer(bus_name) as consumer:
            producer.put(number, group_size=1, index=0, tokens=[number])
            groups = consumer.take(100, timeout=10)
            assert len(groups) == 21 + number and consumer.stats().balanced
            for group in groups:
                names = consumer.lasting_names([group])
                assert lasting.setdefault(group.instance_id, names) == names
        before = snapshot.take(bus_name, tmp_path / f"{number + 1}")
        shmbus.unlink(bus_name)
    assert len(set().union(*lasting.values())) == 3 * 20 + 10


def test_moved_stragglers_are_in_it_once(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        with shmbus.Consumer(bus_name) as consumer:
            put_until_moved(producer, consumer)
        ledger = read_status(bus_name).ledger
        assert snapshot.take(bus_name, tmp_path / "snap").records == ledger.in_ring
    snapshot.restore(tmp_path / "snap")
    assert read_status(bus_name).ledger == ledger


def test_what_is_unreadable_stays_accounted_for(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name, checksum=True) as producer:
        for name in ("a", "b", "c"):
            put_group(producer, name, size=1)
        size = producer.stats().bytes // 3
        write_at(bus_name, data_offset(bus_name) + size - 64, b"\xff" * 64)
        manifest = snapshot.take(bus_name, tmp_path / "snap")
        assert (manifest.records, manifest.unreadable) == (2, 1)
    snapshot.restore(tmp_path / "snap")
    with shmbus.Consumer(bus_name) as consumer:
        assert [g.instance_id for g in consumer.take(9, timeout=10)] == ["b", "c"]
        consumer.take(9, timeout=0)
        ledger = consumer.stats()
        assert ledger.balanced
        assert ledger.dropped == {"corrupt": 1}


def test_other_programs_can_read_the_parts(bus_name: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        put_group(producer, "p")
        snapshot.take(bus_name, tmp_path / "snap")
    (part,) = (tmp_path / "snap").glob("*.safetensors")
    tensors = load_file(part)
    assert tensors["field.tokens.values"].dtype == np.int32
    assert tensors["field.tokens.shapes"].tolist() == [[64]] * 4
    assert tensors["score"].tolist() == [0, 1, 2, 3]
    digest = subprocess.run(["sha256sum", part], capture_output=True, text=True).stdout.split()[0]
    manifest = json.loads((tmp_path / "snap" / "manifest.json").read_text())
    assert manifest["parts"][0]["sha256"] == digest


def test_a_bus_that_is_read_is_refused_and_nothing_is_left(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Consumer(bus_name, label="trainer"):
        result = cli("snapshot", bus_name, str(tmp_path / "snap"))
        assert result.status == 1
        assert "trainer" in result.err
        assert list(tmp_path.iterdir()) == []


STOPPED = """
import os, signal, sys
from shmbus.store import directory, snapshot
write = directory.write_file
def stopped(path, data):
    write(path, data)
    print("written", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
directory.write_file = stopped
snapshot.take(sys.argv[1], sys.argv[2])
"""


def test_the_next_snapshot_removes_what_a_killed_one_left_and_nothing_else(
    bus_name: str, spawn: Spawner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / ".s.partial-notours"
    kept.mkdir()
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        put_group(producer, "g")
        other = bus_name + ".other"
        with shmbus.Bus.create(other, "1MiB"):
            child = spawn.script(STOPPED, bus_name, tmp_path / "s", until="written")
            (partial,) = tmp_path.glob(".s.partial-????????")
            # Its writer is stopped, not dead.
            assert snapshot.take(other, tmp_path / "first").records == 0
            assert partial.is_dir() and not caplog.messages
            child.kill()
            assert snapshot.take(other, tmp_path / "second").records == 0
    assert not partial.exists() and kept.is_dir()
    assert f"removed {partial}" in caplog.text and "its writer was killed" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept.name, "first", "second"]


@pytest.fixture
def taken(bus_name: str, tmp_path: Path) -> Path:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        for number in range(10):
            put_group(producer, f"g{number}")
        snapshot.take(bus_name, tmp_path / "snap")
    return tmp_path / "snap"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_part(directory: Path, **changes: Any) -> None:
    (part,) = json.loads((directory / "manifest.json").read_text())["parts"]
    edit(directory, parts=[{**part, **changes}])


def edit_slots(directory: Path, *edits: dict[str, Any]) -> None:
    """The first slot so often, with different changes each time."""
    slot = json.loads((directory / "manifest.json").read_text())["slots"][0]
    nothing = {"committed": 0, "aborted": 0}
    edit(
        directory,
        slots=[{**slot, **({} if at == 0 else nothing), **e} for at, e in enumerate(edits)],
    )


DAMAGES = {
    "a flipped bit": lambda d: flip(next(d.glob("part*"))),
    "a short part": lambda d: os.truncate(next(d.glob("part*")), 1000),
    "an empty part": lambda d: os.truncate(next(d.glob("part*")), 0),
    "a missing part": lambda d: next(d.glob("part*")).unlink(),
    "no manifest": lambda d: (d / "manifest.json").unlink(),
    "a short manifest": lambda d: os.truncate(d / "manifest.json", 300),
    "no JSON": lambda d: (d / "manifest.json").write_bytes(b"\xff\xfe{"),
    "another version": lambda d: edit(d, version=99),
    "another format": lambda d: edit(d, format="tar"),
    "negative counts": lambda d: edit(d, records=-1),
    "a name of no bus": lambda d: edit(d, bus="a/b"),
    "missing reasons": lambda d: edit(d, released={"acknowledged": 3}),
    "a number that cannot be": lambda d: edit(d, next_producer_id=1),
    "counts that do not add up": lambda d: edit(d, unreadable=5),
    "sizes of no bus": lambda d: edit(d, extent_bytes=496),
    "fewer records": lambda d: edit_part(d, records=3),
    "a part outside": lambda d: edit_part(d, file="../../etc/passwd"),
    "more slots than the bus": lambda d: edit(d, max_producers=0),
    "a slot outside the bus": lambda d: edit_slots(d, {}, {"slot": 100}),
    "a slot beyond a word": lambda d: edit_slots(d, {}, {"slot": 2**32 + 1}),
    "a slot twice": lambda d: edit_slots(d, {}, {}),
    "a label that is none": lambda d: edit_slots(d, {"label": "a\0b"}),
    "a pid beyond a word": lambda d: edit_slots(d, {"pid": 2**32}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_snapshot_makes_no_bus(bus_name: str, taken: Path, damage: str) -> None:
    DAMAGES[damage](taken)
    result = cli("restore", str(taken))
    assert result.status == 1, result.out
    page = [] if damage == "no manifest" else ["see docs/errors.md#layoutmismatcherror"]
    assert result.err.splitlines()[1:] == page
    assert not segment_path(bus_name).exists()
    assert not result.left_behind()


def as_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_another_users(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, 65_534, 65_534)


@pytest.mark.parametrize("make", [as_link, as_fifo, as_another_users])
@pytest.mark.parametrize("file", ["manifest.json", "part-00000.safetensors"])
def test_a_foreign_snapshot_is_refused(bus_name: str, taken: Path, make: Any, file: str) -> None:
    make(taken / file)
    kind = PermissionError if make is as_another_users else shmbus.LayoutMismatchError
    with pytest.raises(kind, match=file):
        snapshot.restore(taken, bus_name)
    with pytest.raises(shmbus.BusNotFoundError):
        shmbus.Bus.open(bus_name)


def test_restoring_never_touches_a_bus_that_is_there(bus_name: str, taken: Path) -> None:
    with shmbus.Bus.create(bus_name, "1MiB") as bus:
        created = bus.created_unix_ns
        result = cli("restore", str(taken))
        assert result.status == 1
        assert "exists already" in result.err
        assert bus.created_unix_ns == created
        assert cli("restore", str(taken), bus_name + ".other").status == 0
        assert read_status(bus_name + ".other").identity != bus.identity
        assert snapshot.restored_as(taken) == bus_name + ".other"
        assert read_status(bus_name + ".other").ledger.in_ring == 40


def test_a_snapshot_is_restored_once_unless_told_otherwise(bus_name: str, taken: Path) -> None:
    assert snapshot.restored_as(taken) is None
    assert cli("restore", str(taken)).status == 0
    shmbus.unlink(bus_name)
    result = cli("restore", str(taken))
    assert result.status == 1
    assert "twice" in result.err
    assert not segment_path(bus_name).exists()
    assert cli("restore", str(taken), "--again").status == 0
    assert read_status(bus_name).ledger.in_ring == 40


def test_the_daemon_restores_once_and_goes_on(bus_name: str, taken: Path, spawn: Spawner) -> None:
    arguments = ("serve", bus_name, "--restore", taken, "--metrics-port", 0)
    for expected in (40, 36):
        child = spawn.module("shmbus.cli", *arguments)
        wait_until(lambda child=child: "metrics at http" in child.output(), what="the metrics")
        address = re.findall(r"http://[0-9.:]+/metrics", child.output())[0]
        # Earlier, a consumer would read the bus itself, and the daemon would find it busy.
        wait_until(lambda child=child: " INFO serving" in child.output(), what="the daemon")
        with shmbus.Consumer(bus_name) as consumer:
            group = consumer.take(1, timeout=10)[0]
            ledger = consumer.stats()
            assert ledger.committed == 40
            assert ledger.leased + ledger.stashed + ledger.in_ring == expected
            group.ack()
        with urllib.request.urlopen(address, timeout=20) as reply:
            assert f'shmbus_committed_total{{bus="{bus_name}"}} 40.0' in reply.read().decode()
        child.send_signal(signal.SIGKILL if expected == 40 else signal.SIGTERM)
        child.wait()


def test_a_bus_too_small_for_its_records_is_an_error_and_no_bus(bus_name: str, taken: Path) -> None:
    result = cli("restore", str(taken), "--capacity", "8KiB")
    assert result.status == 1
    assert "larger capacity" in result.err
    assert not segment_path(bus_name).exists()
    assert cli("restore", str(taken), "--capacity", "nonsense").status == 2


def test_where_something_is_no_snapshot_is_written(bus_name: str, taken: Path) -> None:
    snapshot.restore(taken)
    before = sorted(taken.iterdir())
    result = cli("snapshot", bus_name, str(taken))
    assert (result.status, sorted(taken.iterdir())) == (1, before)
    assert f"{taken}: expected an empty or missing directory" in result.err
    assert "choose a different directory" in result.err and "Errno" not in result.err
    (taken.parent / "file").touch()
    assert cli("snapshot", bus_name, str(taken.parent / "file")).status == 1
    (taken.parent / "empty").mkdir()
    assert cli("snapshot", bus_name, str(taken.parent / "empty")).status == 0
    assert cli("snapshot", bus_name, "/proc/snap").status == 1


def test_without_safetensors_the_extra_is_named(bus_name: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['safetensors'] = None;"
        f"from shmbus.cli import main; sys.exit(main(['snapshot', {bus_name!r}, '{tmp_path}/s']))"
    )
    with shmbus.Bus.create(bus_name, "1MiB"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 1
        assert "pip install 'shmbus[snapshot]'" in done.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mixed", [False, True])
def test_a_full_bus_is_restored(bus_name: str, tmp_path: Path, seed: int, mixed: bool) -> None:
    rng = random.Random(seed)
    sizes = {"small": 700, "two extents": 7500, **({"any": 0} if mixed else {})}
    put = {}
    with shmbus.Bus.create(bus_name, "256KiB", max_producers=4) as bus:
        producers = {kind: shmbus.Producer(bus_name, label=kind) for kind in sizes}
        number = 0
        full = set()
        while len(full) < len(sizes):
            # By turns: neighbours in the order of commits.
            for kind, producer in producers.items():
                data = np.full(sizes[kind] or rng.randrange(1, 30_000), number % 251, np.uint8)
                try:
                    producer.put(f"g{number}", group_size=1, index=0, x=data, timeout=0)
                except shmbus.BusFullError:
                    full.add(kind)
                else:
                    put[f"g{number}"] = data
                number += 1
        assert bus.stats().free < bus.capacity / 8
        for producer in producers.values():
            producer.close()
        snapshot.take(bus_name, tmp_path / "s")
    snapshot.restore(tmp_path / "s")
    with shmbus.Consumer(bus_name) as consumer:
        assert consumer.stats().in_ring == len(put)
        assert consumer.stats().capacity == bus.capacity
        last: dict[int, int] = {}
        while put:
            for group in consumer.take(64, timeout=10):
                sample = group[0]
                assert (sample["x"] == put.pop(group.instance_id)).all()
                assert sample.sequence > last.get(sample.producer_id, -1)
                last[sample.producer_id] = sample.sequence
                group.ack()
        assert consumer.stats().balanced
        with shmbus.Producer(bus_name) as producer:
            for i in range(200):
                producer.put(f"n{i}", group_size=1, index=0, x=np.full(5000, 1, np.uint8))
                (group,) = consumer.take(timeout=10)
                group.ack()
    shmbus.unlink(bus_name)


def peak_of(call: Any) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("schemas", [1, 3])
def test_a_snapshot_holds_a_part_and_a_few_words_a_record(
    bus_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schemas: int
) -> None:
    monkeypatch.setattr(parts, "_PART_BYTES", 1 << 18)
    peaks, done = [], 0
    with shmbus.Bus.create(bus_name, "32MiB"), shmbus.Producer(bus_name) as producer:
        for count in (1000, 5000):
            for number in range(done, count):
                values = {f"tokens{number % schemas}": np.full(4, number, np.int32)}
                producer.put(f"q{number}", group_size=2, index=0, **values)
            done = count
            peaks.append(peak_of(functools.partial(snapshot.take, bus_name, tmp_path / f"{done}")))
    assert (peaks[1] - peaks[0]) / 4000 < 250, peaks


def test_large_records_are_written_a_part_at_a_time(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, "256MiB"), shmbus.Producer(bus_name) as producer:
        for number in range(48):
            producer.put(f"q{number}", group_size=2, index=0, big=np.zeros(2 << 20, np.uint8))
        peak = peak_of(lambda: snapshot.take(bus_name, tmp_path / "taken"))
    assert peak < 80 << 20


def test_records_are_streamed_in_the_order_of_commits(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"):
        producers = [shmbus.Producer(bus_name) for _ in range(3)]
        late = producers[0].reserve(
            "late", group_size=2, index=0, fields={"tokens": ("int32", (4,))}
        )
        for number in range(30):
            producers[number % 3].put(f"q{number}", group_size=2, index=0, tokens=[number])
        late.commit()
        with shmbus.Consumer(bus_name) as consumer:
            put_until_moved(producers[1], consumer)
        with SegmentFile(bus_name) as file:
            streamed, listed = list(stream_undelivered(file)), undelivered_records(file)
        assert len(streamed) > 31
        assert [row.committed_ns for row in streamed] == sorted(r.committed_ns for r in listed)
        assert {(r.producer_id, r.sequence, r.extent, r.offset) for r in streamed} == {
            (r.producer_id, r.sequence, r.extent, r.offset) for r in listed
        }
        for producer in producers:
            producer.close()
