"""``shmbus status``: the ledger balances, liveness is proved, any file is a safe thing to ask."""

import os
import random
import socket
from pathlib import Path

import pytest
from conftest import Spawner
from operators import WORKER, cli, data_offset, header_offset, put_group, segment_path, write_at

import shmbus
from shmbus.data.status_types import BusStatus
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.status import read_status
from shmbus_ext import _core


def check_balance(status: BusStatus) -> None:
    ledger = status.ledger
    assert ledger.balanced
    assert ledger.committed == (
        ledger.acknowledged
        + ledger.leased
        + ledger.stashed
        + ledger.in_ring
        + ledger.unreadable
        + sum(ledger.dropped.values())
    )


def test_status_says_where_every_trajectory_is(bus_name: str, spawn: Spawner) -> None:
    with shmbus.Bus.create(bus_name, "8MiB"):
        worker = spawn.script(WORKER, bus_name, 10, "w", until="ready")
        with shmbus.Consumer(bus_name, label="the trainer") as consumer:
            groups = consumer.take(6, timeout=10)
            consumer.ack(groups[:2])
            consumer.policy_version = 7
            result = cli("status", bus_name, "--json")
            assert result.status == 0
            status = result.json()
            assert status["name"] == bus_name
            assert status["identity"] == shmbus.Bus.open(bus_name).identity
            assert status["policy_version"] == 7
            ledger = status["ledger"]
            assert ledger["committed"] == 41
            assert ledger["acknowledged"] == 8
            assert ledger["leased"] == 16
            assert ledger["stashed"] == 17
            assert (ledger["in_ring"], ledger["unreadable"]) == (0, 0)
            assert ledger["exact"] and ledger["balanced"]
            assert status["collector"]["alive"]
            assert status["collector"]["label"] == "the trainer"
            assert status["collector"]["leased_groups"] == 4
            (producer,) = status["producers"]
            assert (producer["label"], producer["state"]) == ("w", "alive")
            assert producer["pid"] == worker.pid
            assert producer["committed"] == 41
            assert status["groups_incomplete"] == 1
            assert status["groups_complete"] == 8
            (oldest,) = status["oldest_incomplete"]
            assert oldest["instance_id"] == "w-open"
            assert (oldest["present"], oldest["size"]) == (1, 4)
            assert [(each["index"], each["producer"]) for each in oldest["cells"]] == [(1, 1)]
            text = cli("status", bus_name)
            assert text.status == 0
            for expected in ("balances, counted record by record", "w-open", "1 of 4", "alive"):
                assert expected in text.out


def test_without_a_consumer_the_undelivered_are_counted_in_the_ring(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "4MiB"), shmbus.Producer(bus_name) as producer:
        for number in range(5):
            put_group(producer, f"g{number}")
        with shmbus.Consumer(bus_name, label="the trainer") as consumer:
            consumer.take(1, timeout=10)[0].ack()
            leased = consumer.take(1, timeout=10)
            assert leased
        status = read_status(bus_name)
        assert not status.collector.alive
        assert (status.ledger.acknowledged, status.ledger.in_ring) == (4, 16)
        assert status.ledger.leased == status.ledger.stashed == 0
        assert status.ledger.exact
        check_balance(status)
        last = "collector  none; the last was the trainer, which closed\n"
        assert last in cli("status", bus_name).out


def test_a_killed_producer_is_dead_by_its_lock(bus_name: str, spawn: Spawner) -> None:
    with shmbus.Bus.create(bus_name, "4MiB"):
        worker = spawn.script(WORKER, bus_name, 1, "w", until="ready")
        assert [p.state for p in read_status(bus_name).producers] == ["alive"]
        worker.kill()
        assert [p.state for p in read_status(bus_name).producers] == ["dead"]
        with shmbus.Consumer(bus_name) as consumer:
            consumer.stats()
        assert [p.state for p in read_status(bus_name).producers] == ["gone"]
        with shmbus.Producer(bus_name):
            pass
        assert [p.state for p in read_status(bus_name).producers] == ["closed"]


def test_a_pause_is_shown_with_its_reason(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB") as bus:
        assert read_status(bus_name).paused is None
        bus.policy_version = 4
        bus._segment.pause("weights are being\x1b[31m updated", 4)
        paused = read_status(bus_name).paused
        assert paused is not None
        assert paused.policy_version == 4
        text = cli("status", bus_name).out
        assert "producers are paused" in text
        assert "weights are being\\x1b[31m updated" in text


def test_status_balances_while_producers_and_a_consumer_work(bus_name: str, spawn: Spawner) -> None:
    busy = """
import sys, numpy as np, shmbus
with shmbus.Producer(sys.argv[1]) as producer:
    number = 0
    print("ready", flush=True)
    while True:
        for index in range(4):
            producer.put(f"{producer.producer_id}-{number}", group_size=4, index=index,
                         tokens=np.zeros(256, np.int32))
        number += 1
"""
    with shmbus.Bus.create(bus_name, "4MiB"):
        for _ in range(2):
            spawn.script(busy, bus_name).expect("ready")
        with shmbus.Consumer(bus_name) as consumer:
            for _ in range(50):
                consumer.ack(consumer.take(16, timeout=10)[:8])
                check_balance(read_status(bus_name))


def test_an_acknowledgement_that_a_death_cut_short_counts_as_done(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "4MiB"), shmbus.Producer(bus_name) as producer:
        put_group(producer, "a")
        put_group(producer, "b")
        # The intent of releasing the first two records, as a collector leaves it that dies there.
        with SegmentFile(bus_name) as file:
            log_at, _ = file.tables["intents"]
        record_bytes = producer.stats().bytes // 8
        log = b"".join(
            (n * record_bytes // _core.RECORD_ALIGN).to_bytes(8, "little") for n in range(2)
        )
        about = ((2 << 32) | _core.ACKED).to_bytes(8, "little") + bytes(24)
        crc = _core.crc32c(about + log)
        write_at(bus_name, log_at, log)
        write_at(bus_name, header_offset("intent_reason"), _core.ACKED.to_bytes(4, "little"))
        write_at(bus_name, header_offset("intent_crc"), crc.to_bytes(4, "little"))
        write_at(bus_name, header_offset("intent_count"), (2).to_bytes(4, "little"))
        status = read_status(bus_name)
        check_balance(status)
        assert (status.ledger.acknowledged, status.ledger.in_ring) == (2, 6)
        with shmbus.Consumer(bus_name) as consumer:
            ledger = consumer.stats()
            assert (ledger.acknowledged, ledger.in_ring) == (2, 6)


def test_a_damaged_record_makes_the_ledger_say_so_and_the_status_1(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "4MiB"), shmbus.Producer(bus_name) as producer:
        put_group(producer, "a")
        put_group(producer, "b")
        write_at(bus_name, data_offset(bus_name) + 8, b"\xff" * 24)
        result = cli("status", bus_name, "--json")
        assert result.status == 1
        ledger = result.json()["ledger"]
        assert (ledger["in_ring"], ledger["unreadable"]) == (0, 8)
        assert ledger["exact"] and not ledger["balanced"]
        assert "does not balance" in result.err
        assert "does not balance" in cli("status", bus_name).out


@pytest.mark.parametrize("command", ["status", "pause"])
def test_an_unknown_bus_is_a_message_with_the_next_step(command: str, bus_name: str) -> None:
    result = cli(command, bus_name)
    assert result.status == 1
    assert bus_name in result.err and "create it with" in result.err
    with shmbus.Bus.create(bus_name + ".other", "1MiB"):
        assert repr(bus_name + ".other") in cli(command, bus_name).err


def test_a_name_that_can_name_no_bus_is_a_usage_error() -> None:
    for name in ("a/b", "", "x" * 201, "\udcff"):
        result = cli("status", name)
        assert result.status == 2
        assert "error: argument NAME: bus name: expected" in result.err
    assert cli("status").status == 2
    assert cli("status", "a", "--wrong").status == 2


@pytest.mark.parametrize(
    ("expected", "field", "data"),
    [
        ("was never finished", "magic", bytes(8)),
        ("is not a shmbus segment", "magic", b"notabus!"),
        ("layout version 77", "layout_version", b"\x4d\0\0\0"),
        ("layout hash 0x0000004d", "layout_hash", b"\x4d\0\0\0"),
        ("damaged", "extent_count", b"\0\0\0\x80"),
        ("300000 bytes", "size", 300_000),
        ("never finished", "size", 0),
    ],
)
def test_a_damaged_or_foreign_segment_is_one_clear_message(
    bus_name: str, expected: str, field: str, data: bytes | int
) -> None:
    shmbus.Bus.create(bus_name, "1MiB").close()
    if isinstance(data, int):
        os.truncate(segment_path(bus_name), data)
    else:
        write_at(bus_name, header_offset(field), data)
    result = cli("status", bus_name)
    assert result.status == 1
    assert expected in result.err
    assert result.err.splitlines()[1:] == ["see docs/errors.md#layoutmismatcherror"]


def test_what_is_no_file_is_no_segment(bus_name: str, tmp_path: Path) -> None:
    path = segment_path(bus_name)
    target = tmp_path / "target"
    target.write_bytes(b"secret")
    path.symlink_to(target)
    assert cli("status", bus_name).status == 1
    path.unlink()
    os.mkfifo(path)
    assert "is no regular file" in cli("status", bus_name).err
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert "is no segment" in cli("status", bus_name).err
    path.unlink()
    path.mkdir()
    for command in ("status", "pause", "inspect", "snapshot", "gc", "list"):
        arguments = {"gc": [], "list": [], "snapshot": [bus_name, str(tmp_path / "s")]}
        result = cli(command, *arguments.get(command, [bus_name]))
        assert "Traceback" not in result.err
        assert result.status == (0 if command in ("gc", "list") else 1), command
    path.rmdir()


def test_scribbled_tables_never_crash_a_look(bus_name: str, seed: int) -> None:
    rng = random.Random(seed)
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        for number in range(20):
            put_group(producer, f"g{number}")
        original = segment_path(bus_name).read_bytes()
        end = data_offset(bus_name) + 40_000
        for _ in range(150):
            for _ in range(rng.randint(1, 30)):
                at = rng.randrange(64, end - 16)
                write_at(bus_name, at, rng.randbytes(rng.choice([1, 4, 8, 16])))
            assert read_status(bus_name).ledger.committed >= 0
            write_at(bus_name, 64, original[64:end])
        check_balance(read_status(bus_name))


@pytest.mark.parametrize("suffix", ["with space", "ünïcode", "new\nline", "\x1b[31mred", "[red]"])
def test_odd_names_are_shown_and_steer_no_terminal(bus_name: str, suffix: str) -> None:
    name = f"{bus_name}.{suffix}"
    with shmbus.Bus.create(name, "1MiB"), shmbus.Producer(name, label="\x1b[2Jx") as producer:
        put_group(producer, "\x1b[31m[bold]id", skip=0)
        text = cli("status", name)
        assert text.status == 0, text.err
        assert "\x1b" not in text.out
        assert "\\x1b[31m[bold]id" in text.out
        assert len(cli("status", name, "--json").json()["producers"]) == 1


def test_a_look_changes_nothing_in_the_segment(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        put_group(producer, "a")
        before = segment_path(bus_name).read_bytes()
        os.chmod(segment_path(bus_name), 0o400)
        assert cli("status", bus_name).status == 0
        assert cli("status", bus_name).status == 0
        assert segment_path(bus_name).read_bytes() == before


def test_a_reader_that_goes_early_ends_the_command_quietly(bus_name: str) -> None:
    import subprocess
    import sys

    with shmbus.Bus.create(bus_name, "1MiB"):
        command = f"{sys.executable} -m shmbus.cli status {bus_name} | true"
        assert subprocess.run(command, shell=True, capture_output=True, text=True).stderr == ""


def test_an_ascii_terminal_gets_escapes_and_no_traceback(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"):
        result = cli("status", bus_name, env={"PYTHONIOENCODING": "ascii"})
        assert result.status == 0
        assert "\\u2591" in result.out
