"""Snapshots of a bus that a daemon serves: of one instant, and nobody notices but by waiting."""

import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Daemon, Spawner, wait_until
from operators import cli, put_group

import shmbus
from shmbus.inspect.status import read_status
from shmbus.store import snapshot

Served = Callable[..., Daemon]


def put_large(name: str, groups: int) -> None:
    with shmbus.Producer(name) as producer:
        for number in range(groups):
            producer.put(f"g{number}", group_size=1, index=0, tokens=np.zeros(250_000, np.int32))


def test_a_snapshot_under_load_loses_nothing(daemon: Served, bus_name: str, tmp_path: Path) -> None:
    served = daemon("--capacity", "2MiB")
    stop = threading.Event()
    ended: list[tuple[int, int]] = []

    def work() -> None:
        with shmbus.Consumer(bus_name) as consumer:
            while not stop.is_set() or threads[1].is_alive():  # a full ring stops its producer
                for group in consumer.take(4, timeout=0.1):
                    ended.extend((t.producer_id, t.sequence) for t in group)
                    group.ack()

    def put() -> None:
        with shmbus.Producer(bus_name) as producer:
            number = 0
            while not stop.is_set():
                put_group(producer, f"g{number}")
                number += 1

    threads = [threading.Thread(target=work), threading.Thread(target=put)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(ended) > 40)
        for number in range(3):
            result = cli("snapshot", bus_name, str(tmp_path / str(number)))
            assert result.status == 0, result.err
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    with shmbus.Consumer(bus_name) as consumer:

        def rest_is_acknowledged() -> shmbus.Ledger | None:
            for group in consumer.take(64, timeout=0.1):
                ended.extend((t.producer_id, t.sequence) for t in group)
                group.ack()
            ledger = consumer.stats()
            return ledger if ledger.acknowledged == ledger.committed else None

        ledger = wait_until(rest_is_acknowledged)
    assert ledger.balanced and len(set(ended)) == len(ended) == ledger.committed
    served.stop()
    for number in range(3):
        snapshot.restore(tmp_path / str(number), f"{bus_name}.{number}")
        with shmbus.Consumer(f"{bus_name}.{number}") as consumer:
            left = [
                (t.producer_id, t.sequence)
                for g in consumer.take(10_000, timeout=0)
                for t in g
            ]  # fmt: skip
            ledger = consumer.stats()
        shmbus.unlink(f"{bus_name}.{number}")
        assert ledger.balanced and not ledger.dropped
        assert len(set(left)) == len(left) == ledger.leased
        assert not set(left) & set(ended[: ledger.acknowledged])


HOLD = """
import os, sys, time
from shmbus import Consumer
consumer = Consumer(sys.argv[1])
(group,) = consumer.take(1, timeout=20)
print(group.instance_id)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.001)
group.ack()
print("acknowledged")
time.sleep(600)
"""


def test_an_acknowledgement_during_a_snapshot_counts_whatever_becomes_of_its_trainer(
    daemon: Served, bus_name: str, spawn: Spawner, tmp_path: Path
) -> None:
    served = daemon("--capacity", "160MiB")
    put_large(bus_name, 120)
    child = spawn.script(HOLD, bus_name, tmp_path / "go", until="g0")
    taking = spawn.module("shmbus", "snapshot", bus_name, tmp_path / "snap")
    wait_until(lambda: "taking a snapshot" in served.child.output())
    # Retries and taking go on; the clock is theirs.
    assert read_status(bus_name).ledger.committed == 120
    with shmbus.Consumer(bus_name) as consumer:
        (tmp_path / "go").touch()
        child.expect("acknowledged")
        child.kill()
        taking.finish()
        taken = []
        while len(taken) < 119:
            groups = consumer.take(200, timeout=10)
            taken += [g.instance_id for g in groups]
            consumer.ack(groups)
        assert "g0" not in taken and consumer.take(timeout=0.2) == []
        wait_until(lambda: consumer.stats().acknowledged == 120)
    assert snapshot.read_manifest(tmp_path / "snap").records == 120


def test_an_unwritable_snapshot_is_told(daemon: Served, bus_name: str, tmp_path: Path) -> None:
    served = daemon("--capacity", "32MiB")
    put_large(bus_name, 4)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    result = cli("snapshot", bus_name, str(tmp_path / "full"))
    assert result.status == 1 and "choose a different directory" in result.err
    # A limit on the size of files fails in the middle of a write, as a full disk does.
    before = resource.prlimit(served.child.pid, resource.RLIMIT_FSIZE, (1_000_000, -1))
    result = cli("snapshot", bus_name, str(tmp_path / "snap"))
    assert result.status == 1 and "File too large (nothing is left" in result.err
    assert str(tmp_path / "snap") in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    resource.prlimit(served.child.pid, resource.RLIMIT_FSIZE, before)
    assert cli("snapshot", bus_name, str(tmp_path / "snap")).status == 0
    assert snapshot.read_manifest(tmp_path / "snap").records == 4
    with shmbus.Consumer(bus_name) as consumer:
        assert len(consumer.take(timeout=10)) == 4
    served.child.send_signal(signal.SIGSTOP)
    result = cli("snapshot", bus_name, str(tmp_path / "stopped"))
    assert result.status == 1 and f"pid {served.child.pid}" in result.err


def test_a_full_disk_is_told_with_what_it_needs(
    bus_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For root no limit fills a disk: /dev/full does, in the place of a part.
    real = snapshot.PartWriter.finish

    def finish(writer: snapshot.PartWriter) -> object:
        real(writer)
        with open("/dev/full", "wb", buffering=0) as disk:
            return disk.write(b"x")

    monkeypatch.setattr(snapshot.PartWriter, "finish", finish)
    with shmbus.Bus.create(bus_name, "4MiB"), shmbus.Producer(bus_name) as producer:
        put_group(producer, "g")
        with pytest.raises(OSError, match=r"needs more than [0-9,]+ bytes, and [0-9,]+ are free"):
            snapshot.take(bus_name, tmp_path / "snap")
    assert not list(tmp_path.iterdir())
