"""Any start order: waits for a bus, its makers, and remains of a dead creator.

Processes are real, as are their deaths. Tests with a small /dev/shm use a separate mount namespace.
"""

import asyncio
import inspect
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Child, Daemon, Spawner, beside
from fork_server import TEMPLATE

import shmbus
from shmbus import Bus, Consumer, Producer
from shmbus.handles.producer import ProducerOptions
from shmbus.segment import creation
from shmbus.segment.names import shm_path

PROCESSES = 8
#: Seconds beyond the end of any ending wait.
LONG_S = 60.0


def path_of(name: str) -> Path:
    return Path(shm_path(name))


def put(producer: Producer, key: str) -> None:
    producer.put(key, group_size=1, index=0, x=np.arange(3), timeout=LONG_S)


# --- waiting


@pytest.mark.parametrize("kind", [Producer, Consumer])
def test_who_starts_first_waits_for_the_bus(bus_name: str, kind: Callable[..., Any]) -> None:
    maker = threading.Timer(0.1, lambda: Bus.create(bus_name, "1MiB").close())
    maker.start()
    with kind(bus_name, wait=LONG_S) as handle:
        assert handle.stats().committed == 0
    maker.join()


@pytest.mark.parametrize("kind", [Producer, Consumer])
def test_a_wait_in_vain_says_how_long_and_what_it_looked_for(
    bus_name: str, kind: Callable[..., object]
) -> None:
    near = f"{bus_name}.2"
    with Bus.create(near, "64KiB"), pytest.raises(shmbus.BusNotFoundError) as caught:
        kind(bus_name, wait=0.05)
    said = str(caught.value)
    assert f"no bus {bus_name!r} after 0.05 s of waiting for it" in said
    assert f"did you mean {near!r}? there are: {near!r}" in said
    assert str(path_of(bus_name)) in said


def test_a_rank_that_starts_first_waits_for_bus_and_daemon(
    bus_name: str, daemon: Callable[..., Daemon]
) -> None:
    def attach() -> int:
        with Consumer(bus_name, rank=0, world_size=1, daemon=True, wait=LONG_S) as consumer:
            return consumer.stats().committed

    with beside(attach) as attached:
        daemon("--capacity", "1MiB", "--unlink-on-exit")
    assert attached.result() == 0


def test_a_wait_goes_on_past_what_a_dead_creator_left(bus_name: str, spawn: Spawner) -> None:
    path_of(bus_name).touch(0o600)
    child = spawn.script(
        "import sys, shmbus\nprint('waits', flush=True)\n"
        "shmbus.Producer(sys.argv[1], wait=60).close()\n",
        bus_name,
        until="waits",
    )
    Bus.ensure(bus_name, "1MiB").close()
    child.finish()
    path_of(bus_name).unlink()
    path_of(bus_name).touch(0o600)
    with pytest.raises(shmbus.LayoutMismatchError, match="never finished"):
        Producer(bus_name, wait=0.05)


async def test_an_awaited_producer_does_not_block_its_loop(bus_name: str) -> None:
    task = asyncio.create_task(Producer.awaited(bus_name, wait=None, label="worker"))
    for _ in range(5):
        await asyncio.sleep(0.001)  # runs: the loop is free
    assert not task.done()
    with Bus.create(bus_name, "1MiB") as bus, await task as producer:
        put(producer, "a")
        assert [each.label for each in bus.stats().producers] == ["worker"]


def test_an_awaited_producer_takes_each_option_of_a_producer() -> None:
    taken = inspect.signature(Producer).parameters.keys()
    assert ProducerOptions.__annotations__.keys() == taken - {"name", "wait"}


async def test_an_awaited_producer_ends_by_time_and_by_cancellation(bus_name: str) -> None:
    with pytest.raises(shmbus.BusNotFoundError, match=r"after 0\.01 s"):
        await Producer.awaited(bus_name, wait=0.01)
    task = asyncio.create_task(Producer.awaited(bus_name, wait=None))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- ensure


#: Waits for the gate, ensures the bus, and prints its identity; or dies of SIGKILL within.
ENSURE = """
import os, random, sys, threading, time
from shmbus import Bus
name, gate, capacity, doom_s = sys.argv[1:]
print("at the gate", flush=True)
while not os.path.exists(gate):
    time.sleep(0)
if doom_s:
    threading.Timer(float(doom_s), lambda: os.kill(os.getpid(), 9)).start()
with Bus.ensure(name, capacity) as bus:
    print(bus.created_unix_ns, bus.capacity, flush=True)
"""
HERE = Path(__file__).parent


def said_by(children: list[Child]) -> set[str]:
    """Return their buses; a finder of a dead creator's remains logs them before."""
    return {child.finish(LONG_S).splitlines()[-1] for child in children}


def test_of_eight_processes_that_ensure_a_bus_one_creates_it_and_all_have_it(
    bus_name: str, spawn: Spawner, tmp_path: Path
) -> None:
    for number in range(2):
        name, gate = f"{bus_name}.{number}", tmp_path / str(number)
        children = [spawn.script(ENSURE, name, gate, "1MiB", "") for _ in range(PROCESSES)]
        for child in children:
            child.expect("at the gate")
        gate.touch()
        assert len(said_by(children)) == 1
        shmbus.unlink(name)


def test_a_creator_that_is_killed_at_any_time_keeps_no_other_from_the_bus(
    bus_name: str, spawn: Spawner, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for number in range(2):
        name, gate = f"{bus_name}.{number}", tmp_path / str(number)
        # 256 MiB take tens of milliseconds: deaths hit the allocation.
        doomed = [
            spawn.script(ENSURE, name, gate, "256MiB", rng.uniform(0, 0.02)) for _ in range(2)
        ]
        others = [spawn.script(ENSURE, name, gate, "256MiB", "") for _ in range(2)]
        for child in [*doomed, *others]:
            child.expect("at the gate")
        gate.touch()
        assert len(said_by(others)) == 1
        for child in doomed:
            child.wait(LONG_S)
        shmbus.unlink(name)


@pytest.mark.parametrize("content", [b"", bytes(4096), bytes(200_000)])
def test_what_a_creator_left_unfinished_is_made_again(bus_name: str, content: bytes) -> None:
    path_of(bus_name).write_bytes(content)
    path_of(bus_name).chmod(0o600)
    with Bus.ensure(bus_name, "1MiB") as bus:
        assert bus.capacity == 1 << 20


def test_what_a_slow_creator_still_makes_is_waited_for(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB") as bus, path_of(bus_name).open("r+b") as file:
        magic = file.read(8)
        file.seek(0)
        file.write(bytes(8))
        file.flush()

        def finish() -> None:
            file.seek(0)
            file.write(magic)
            file.flush()

        later = threading.Timer(0.5, finish)
        later.start()
        with Bus.ensure(bus_name, "1MiB") as found:
            assert found.created_unix_ns == bus.created_unix_ns
        later.join()


def test_a_bus_that_does_not_fit_is_named_with_what_differs_and_stays_as_it_is(
    bus_name: str,
) -> None:
    with Bus.create(bus_name, "1MiB", max_producers=4) as bus:
        for fitting in ({}, {"capacity": "1MiB"}, {"capacity": "64KiB", "max_producers": 2}):
            Bus.ensure(bus_name, **fitting).close()  # type: ignore[arg-type]
        with pytest.raises(shmbus.BusExistsError) as caught:
            Bus.ensure(bus_name, "2MiB", max_producers=9, extent_bytes=8192)
        said = str(caught.value)
        assert "capacity: expected 2.0 MiB, got 1.0 MiB" in said
        assert "max_producers: expected 9, got 4" in said
        assert "extent_bytes: expected 8192, got 4096" in said
        assert Bus.open(bus_name).created_unix_ns == bus.created_unix_ns


def test_ensure_takes_no_file_for_a_bus_that_is_none(bus_name: str) -> None:
    path_of(bus_name).write_bytes(b"somebody else's notes" * 1000)
    with pytest.raises(shmbus.LayoutMismatchError, match="not a shmbus segment"):
        Bus.ensure(bus_name)
    assert path_of(bus_name).exists()
    assert not creation.remove_unfinished(bus_name)


# --- sizes


def test_a_bus_too_small_for_its_producers_is_refused_with_the_numbers(bus_name: str) -> None:
    with pytest.raises(ValueError, match="too small for max_producers=64") as caught:
        Bus.create(bus_name, "64KiB", max_producers=64)
    said = str(caught.value)
    assert "of 16 extents 15 are for producers" in said
    assert "expected a capacity of 260.0 KiB or more, or at most max_producers=15" in said
    assert not path_of(bus_name).exists()
    for capacity, most in (("64KiB", 15), ("260KiB", 64)):
        with Bus.create(bus_name, capacity, max_producers=most):
            pass
        with pytest.raises(ValueError, match="too small"):
            Bus.create(bus_name, capacity, max_producers=most + 1)


def test_as_many_producers_as_a_bus_is_for_can_put_at_the_same_time(bus_name: str) -> None:
    with Bus.create(bus_name, "64KiB") as bus:
        producers = [Producer(bus_name) for _ in range(bus.max_producers)]
        for number, producer in enumerate(producers):
            producer.put(f"k{number}", group_size=1, index=0, x=np.arange(3), timeout=0)
            producer.put(f"l{number}", group_size=1, index=0, x=np.arange(3), timeout=0)
        for producer in producers:
            producer.close()
        assert (bus.max_producers, bus.stats().committed) == (15, 30)


SMALL = """
import logging, os, subprocess, sys
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=" + sys.argv[1], "tmpfs", "/dev/shm"]).returncode:
    sys.exit(77)
import shmbus
logging.basicConfig(stream=sys.stdout)
try:
    with shmbus.Bus.create("b") as bus:
        print(bus.capacity >> 20, bus.max_producers)
except shmbus.CapacityError as error:
    print(error)
"""  # noqa: E501


def in_small_shm(script: str, *args: str) -> str:
    result = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", script, *args],
        capture_output=True, text=True, timeout=LONG_S,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )  # fmt: skip
    if result.returncode in (1, 77) and ("mount" in result.stderr or "unshare" in result.stderr):
        pytest.skip(f"no mount namespace here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_default_capacity_fits_a_container_and_says_so() -> None:
    said = in_small_shm(SMALL, "64m")
    assert said.endswith("32 64\n")
    assert "gets 32.0 MiB and not 256.0 MiB, since /dev/shm has 64.0 MiB free" in said
    assert "docker run --shm-size" in said


def test_a_shared_memory_too_small_for_any_default_is_refused_with_what_to_do() -> None:
    said = in_small_shm(SMALL, "8m")
    assert "/dev/shm has 8.0 MiB free of 8.0 MiB" in said
    assert "8.0 MiB at least" in said and "--shm-size" in said


RACE = """
import subprocess, sys
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"]).returncode:
    sys.exit(77)
code = "import shmbus; print(shmbus.Bus.ensure('b', '40MiB').created_unix_ns)"
children = [subprocess.Popen([sys.executable, "-c", code], stdout=-1) for _ in range(8)]
print(len({child.communicate()[0] for child in children}), {child.returncode for child in children})
"""


def test_a_bus_that_fits_once_is_no_capacity_error_for_those_who_come_second() -> None:
    assert in_small_shm(RACE) == "1 {0}\n"


def test_where_there_is_room_the_default_is_what_it_was_and_nothing_is_logged(
    bus_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    free = os.statvfs("/dev/shm")
    if free.f_bavail * free.f_frsize < 1 << 30:
        pytest.skip("/dev/shm has less than 1 GiB free")
    with caplog.at_level(logging.WARNING), Bus.create(bus_name) as bus:
        assert (bus.capacity, bus.max_producers) == (256 << 20, 64)
    assert not caplog.records


# --- a second reader


def test_a_second_reader_is_told_of_the_daemon_and_of_itself(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Consumer(bus_name):
        with pytest.raises(shmbus.BusBusyError) as caught:
            Consumer(bus_name)
        said = str(caught.value)
        assert f"`shmbus serve {bus_name}`" in said
        assert "this same process" in said and "close the earlier handle" in said
        with TEMPLATE.Pool(1) as pool:
            said = pool.apply(busy, (bus_name,))
        assert f"pid {os.getpid()}" in said and "same process" not in said


def busy(name: str) -> str:
    try:
        Consumer(name)
    except shmbus.BusBusyError as error:
        return str(error)
    return ""
