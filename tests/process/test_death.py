"""What docs/reliability.md promises of deaths and stops, with real processes and real signals."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Child, Spawner, ends_of, wait_until

import shmbus

SOAK = Path(__file__).with_name("soak.py")
ON_PATH = {
    "PYTHONPATH": os.pathsep.join(
        [str(SOAK.parent), str(SOAK.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
}
# The suite runs the short form.
KILLS = int(os.environ.get("SHMBUS_TEST_KILLS", "100"))

WRITER = """
import sys, numpy as np, shmbus
name, size = sys.argv[1], int(sys.argv[2])
producer = shmbus.Producer(name)
print("ready", flush=True)
number = 0
while True:
    producer.put(f"{producer.producer_id}-{number}", group_size=1, index=0,
                 data=np.full(size, number % 251, np.uint8))
    number += 1
"""


def drain(consumer: shmbus.Consumer, records: int, seconds: float = 60.0) -> int:
    """Take and acknowledge at least so many records, each checked."""
    deadline = time.monotonic() + seconds
    got = 0
    while got < records:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {got} of {records} records came; {consumer.stats()}")
        for group in consumer.take(256, timeout=0.5):
            number = int(group.instance_id.split("-")[1])
            assert (group[0]["data"] == number % 251).all(), group
            assert group[0].sequence == number
            group.ack()
            got += 1
    return got


def audited(soak: Child, kills: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(soak.finish(timeout=110 + KILLS // 10).splitlines()[-1])
    assert report["groups"] > 100 and report[kills] > 2, report
    faults = ("lost", "unknown", "doubled", "torn or mixed", "hangs")
    assert {name: report[name] for name in faults} == dict.fromkeys(faults, 0), report
    assert report["balanced"] and set(report["dropped"]) <= {"timeout"}, report
    return report


@pytest.mark.timeout(180 + KILLS // 10)
def test_killed_writers_lose_double_and_tear_nothing(
    bus_name: str, spawn: Spawner, seed: int
) -> None:
    report = audited(spawn.file(SOAK, bus_name, 0, seed, KILLS, env=ON_PATH), "producer kills")
    assert report["producer kills"] >= KILLS
    assert report["held at the end"] < report["capacity"] / 10, "held by dead writers"


def test_a_short_soak_under_kills_and_stops_loses_doubles_and_tears_nothing(
    bus_name: str, spawn: Spawner, seed: int
) -> None:
    audited(spawn.file(SOAK, bus_name, 3, seed, env=ON_PATH), "consumer kills")


def test_a_short_soak_of_daemon_and_ranks_loses_doubles_and_tears_nothing(
    bus_name: str, spawn: Spawner, seed: int
) -> None:
    audited(spawn.module("daemon_soak", bus_name, 4, seed, env=ON_PATH), "daemon kills")


@pytest.mark.parametrize(("cycles", "kind"), [(150, []), (60, ["weights"])], ids=["bus", "weights"])
def test_cycles_of_everything_leave_nothing_behind(
    bus_name: str, spawn: Spawner, cycles: int, kind: list[str]
) -> None:
    child = spawn.file(SOAK.with_name("leaks.py"), bus_name, cycles, *kind)
    report = json.loads(child.finish(timeout=100).splitlines()[-1])
    assert report["descriptors"] == report["files"] == 0, report
    # The C library may give an arena back between two counts.
    assert report["mappings"] <= 0 and report["memory_kib"] < 4096, report
    assert report["objects"] < 50 and report["blocks"] < 300, report


def test_an_open_reservation_delays_nobody_and_can_still_commit(bus_name: str) -> None:
    capacity = 8 << 20
    with (
        ends_of(shmbus.Bus.create(bus_name, capacity)) as (slow, consumer),
        shmbus.Producer(bus_name) as fast,
    ):
        slot = slow.reserve("held", group_size=1, index=0, fields={"data": ("uint8", 50_000)})
        slot["data"][:] = 42
        payload = np.zeros(100_000, np.uint8)
        for round_ in range(10 * capacity // payload.size):
            # The slow producer's own later records pass its open one too.
            producer = slow if round_ % 2 else fast
            producer.put(f"x{round_}", group_size=1, index=0, data=payload, timeout=10)
            for group in consumer.take(8, timeout=5):
                assert group.instance_id != "held"
                group.ack()
        slot.score = 1.0
        slot.commit()
        (group,) = consumer.take(timeout=5)
        assert group.instance_id == "held" and (group[0]["data"] == 42).all()
        group.ack()
        assert consumer.stats().balanced


def test_a_pid_used_again_proves_nothing(bus_name: str, spawn: Spawner) -> None:
    """Life is told by a lock that the kernel drops, and not by a number in the segment."""
    with shmbus.Bus.create(bus_name, "1MiB") as bus, shmbus.Consumer(bus_name) as consumer:
        child = spawn.script(WRITER, bus_name, 100, until="ready")
        consumer.ack(consumer.take(timeout=5))
        path = Path("/dev/shm") / f"shmbus.{bus_name}"
        assert bus.stats().producers[0].pid == child.pid
        # As if the writer lived in another pid namespace, under the number of a living process.
        raw = path.read_bytes()
        at = raw.index(child.pid.to_bytes(4, "little") + b"child")
        with path.open("r+b") as file:
            file.seek(at)
            file.write(os.getpid().to_bytes(4, "little"))
        assert bus.stats().producers[0].pid == os.getpid()
        drain(consumer, 1000)
        child.kill()
        wait_until(
            lambda: (
                consumer.ack(consumer.take(timeout=0.05)) is None
                and consumer.stats().producers == 0
            ),
            what="the death to be noticed",
        )
        assert consumer.stats().balanced


@pytest.mark.parametrize("reads", [False, True])
def test_a_child_that_outlives_its_parent_does_not_keep_it_alive(
    bus_name: str, spawn: Spawner, reads: bool
) -> None:
    """A fork inherits descriptors and mappings; neither may pass for the dead parent's life."""
    script = """
import os, signal, sys, time, numpy as np, shmbus
reader = shmbus.Consumer(sys.argv[1]) if sys.argv[3:] else None
producer = shmbus.Producer(sys.argv[1])
producer.put("before", group_size=1, index=0, data=np.arange(10))
slot = producer.reserve("open", group_size=1, index=0, fields={"data": ("uint8", 200_000)})
child = os.fork()
if child == 0:
    try:
        producer.put("child", group_size=1, index=0, data=np.arange(10))
    except shmbus.BusClosedError as error:
        assert "fork" in str(error)
        with shmbus.Producer(sys.argv[1]) as own:
            own.put("child", group_size=1, index=0, data=np.arange(10))
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    note = Path(f"/tmp/{bus_name}.pid")
    try:
        with shmbus.Bus.create(bus_name, "2MiB"), contextlib.ExitStack() as stack:
            if not reads:
                consumer = stack.enter_context(shmbus.Consumer(bus_name))
            parent = spawn.script(script, bus_name, note, *["reads"] * reads)
            assert parent.wait() == -signal.SIGKILL
            child = int(note.read_text())
            os.kill(child, 0)
            if reads:
                # The bus stays open for a second reader, and the next.
                shmbus.Consumer(bus_name).close()
                consumer = stack.enter_context(shmbus.Consumer(bus_name))
            wait_until(
                lambda: consumer.stats().producers == 0, what="the parent's death to be noticed"
            )
            os.kill(child, 0)
            groups = consumer.take(timeout=5)
            assert sorted(g.instance_id for g in groups) == ["before", "child"]
            consumer.ack(groups)
            wait_until(
                lambda: (
                    consumer.take(timeout=0) == []
                    and consumer.stats().free > 0.9 * consumer.stats().capacity
                ),
                what="the space of the open reservation",
            )
            assert consumer.stats().balanced
    finally:
        if note.exists():
            os.kill(int(note.read_text()), signal.SIGKILL)
            note.unlink()
