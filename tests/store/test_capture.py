"""Recording and replaying: what is kept is what was put, what is missed is counted."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from conftest import Spawner, wait_until
from operators import cli, put_group, segment_path

import shmbus
from shmbus.inspect.status import read_status
from shmbus.store import capture, snapshot


def recording(spawn: Spawner, name: str, target: Path, *options: str):  # type: ignore[no-untyped-def]
    child = spawn.module("shmbus.cli", "record", name, target, "--json", *options)
    wait_until(lambda: "recording bus" in child.output(), what="the recording")
    # Its first look has opened the file by the time that the hidden directory is there.
    wait_until(lambda: list(target.parent.glob(".*partial*")), what="its directory")
    return child


def test_what_is_recorded_is_replayed_as_it_was(
    bus_name: str, spawn: Spawner, tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    target = tmp_path / "traffic"
    sent = {}
    with shmbus.Bus.create(bus_name, "4MiB"), shmbus.Producer(bus_name) as producer:
        put_group(producer, "before")
        child = recording(spawn, bus_name, target, "--records", "61")
        put_group(producer, "marker", size=1)
        with producer.reserve("slow", group_size=2, index=0, fields={"x": ("int16", 3)}) as slot:
            slot["x"][:] = 5
            for number in range(58):
                tokens = rng.integers(0, 9, rng.integers(0, 50), dtype=np.int32)
                meta = {"n": number}
                producer.put(
                    f"g{number // 2}", group_size=2, index=number % 2, round=number // 2,
                    score=number, policy_version=3, tokens=tokens, meta=meta,
                )  # fmt: skip
                sent[f"g{number // 2}", number % 2] = (tokens, meta)
        producer.put("slow", group_size=2, index=1, x=np.full(3, 6, np.int16))
        assert child.wait() == 0
    found = json.loads(child.output().split("\n", 1)[1])
    assert (found["records"], found["missed"]) == (61, 0)
    with shmbus.Bus.create(bus_name, "4MiB"):
        result = cli("replay", str(target), bus_name, "--speed", "max", "--json")
        assert result.status == 0, result.err
        assert result.json()["records"] == 61
        with shmbus.Consumer(bus_name) as consumer:
            groups = {group.instance_id: group for group in consumer.take(100, timeout=10)}
            assert len(groups) == 31
            assert [t["x"].tolist() for t in groups["slow"]] == [[5] * 3, [6] * 3]
            for (name, index), (tokens, meta) in sent.items():
                trajectory = groups[name][index]
                np.testing.assert_array_equal(trajectory["tokens"], tokens)
                assert trajectory.meta == meta
                assert trajectory.policy_version == 3
                assert trajectory.round == int(name[1:])


def test_what_a_fast_consumer_takes_away_is_missed_and_counted(
    bus_name: str, spawn: Spawner, tmp_path: Path
) -> None:
    target = tmp_path / "traffic"
    with shmbus.Bus.create(bus_name, "64KiB"), shmbus.Producer(bus_name) as producer:
        child = recording(spawn, bus_name, target)
        child.send_signal(signal.SIGSTOP)  # so that it surely misses
        with shmbus.Consumer(bus_name) as consumer:
            for number in range(300):
                put_group(producer, f"g{number}")
                for group in consumer.take(8, timeout=10):
                    group.ack()
        child.send_signal(signal.SIGCONT)
        child.send_signal(signal.SIGINT)
        assert child.wait() == 0
    found = json.loads(child.output().split("\n", 1)[1])
    assert found["records"] + found["missed"] == 1200
    assert found["missed"] > 0


def test_recording_holds_nothing_and_changes_nothing(
    bus_name: str, spawn: Spawner, tmp_path: Path
) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        before = segment_path(bus_name).read_bytes()
        child = recording(spawn, bus_name, tmp_path / "t", "--seconds", "0.5")
        assert child.wait() == 0
        assert segment_path(bus_name).read_bytes() == before
        put_group(producer, "a")
        assert read_status(bus_name).ledger.in_ring == 4


def test_a_replay_keeps_the_pauses_at_the_speed_asked_for(bus_name: str, tmp_path: Path) -> None:
    import time

    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        for number in range(3):
            put_group(producer, f"g{number}", size=1)
            time.sleep(0.3)
        snapshot.take(bus_name, tmp_path / "snap")
    with shmbus.Bus.create(bus_name, "1MiB"):
        assert capture.replay(tmp_path / "snap", bus_name, speed=1).seconds >= 0.6
        assert capture.replay(tmp_path / "snap", bus_name, speed=3).seconds >= 0.2
        fast = capture.replay(tmp_path / "snap", bus_name, speed=None)
        assert (fast.records, fast.late_s) == (3, 0)


def test_a_full_bus_ends_a_replay_with_its_message(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        for number in range(100):
            put_group(producer, f"g{number}")
        snapshot.take(bus_name, tmp_path / "snap")
    with shmbus.Bus.create(bus_name, "16KiB"):
        result = cli("replay", str(tmp_path / "snap"), bus_name, "--timeout", "0.2")
        assert result.status == 1
        assert "is full" in result.err


@pytest.mark.parametrize("damage", ["flipped", "missing", "version", "nothing"])
def test_a_damaged_capture_is_a_message(
    bus_name: str, spawn: Spawner, tmp_path: Path, damage: str
) -> None:
    target = tmp_path / "traffic"
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        child = recording(spawn, bus_name, target, "--records", "4")
        put_group(producer, "a")
        assert child.wait() == 0
        (part,) = target.glob("part*")
        manifest = target / "manifest.json"
        if damage == "flipped":
            data = bytearray(part.read_bytes())
            data[-1] ^= 1
            part.write_bytes(data)
        elif damage == "missing":
            part.unlink()
        elif damage == "version":
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 5}))
        else:
            manifest.unlink()
        result = cli("replay", str(target), bus_name, "--speed", "max")
        assert result.status == 1
        assert len(result.err.splitlines()) == 1


def test_wrong_arguments_are_usage_errors(bus_name: str) -> None:
    for arguments in (
        ("record", bus_name),
        ("record", bus_name, "d", "--seconds", "0"),
        ("record", bus_name, "d", "--records", "0"),
        ("replay", "d", bus_name, "--speed", "-1"),
        ("replay", "d", bus_name, "--speed", "nan"),
    ):
        assert cli(*arguments).status == 2, arguments
    assert cli("record", bus_name, "/tmp/never-made").status == 1
    assert cli("replay", "/nonexistent", bus_name).status == 1
