"""Workers that wait on an empty request lane cost the machine next to nothing, however many."""

import math
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner, next_request, wait_until
from counted_calls import count

from shmbus import Bus, BusRemovedError, Consumer, Feeder, Producer
from shmbus.base import limits
from shmbus_ext import _core

WORKERS = 24

WAITS = """
import threading, time
workers, with_collector = int(sys.argv[2]), sys.argv[3] == "collector"
with ExitStack() as stack:
    if with_collector:
        stack.enter_context(shmbus.Consumer(sys.argv[1]))
    producers = [stack.enter_context(shmbus.Producer(sys.argv[1])) for _ in range(workers)]
    threads = [threading.Thread(target=p.requests.next, args=(1.2,)) for p in producers]
    locks()
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps([locks(), time.monotonic() - began]))
"""


@pytest.mark.parametrize("kind", ["alone", "collector"])
def test_one_waiting_worker_looks_for_dead_ones_for_all(
    bus_name: str, spawn: Spawner, tmp_path: Path, kind: str
) -> None:
    with Bus.create(bus_name, "2MiB", max_producers=WORKERS):
        asked, waited_s = count(spawn, tmp_path, WAITS, bus_name, WORKERS, kind)
    looks = 0 if kind == "collector" and waited_s < 2 else waited_s / 0.5 + 1
    assert asked <= looks * WORKERS


def test_each_look_asks_about_a_share_of_the_workers_and_the_next_goes_on_there(
    bus_name: str, spawn: Spawner, tmp_path: Path
) -> None:
    text = """
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with ExitStack() as stack:
    stack.enter_context(shmbus.Bus.create(sys.argv[1], "16MiB", max_producers=700))
    for _ in range(600):
        worker = stack.enter_context(shmbus.Producer(sys.argv[1]))
    locks()
    asked = []
    for _ in range(5):
        time.sleep(0.6)
        assert worker._recover_dead()
        assert not worker._recover_dead()
        asked.append(locks())
    print(json.dumps(asked))
"""
    asked = count(spawn, tmp_path, "import time\n" + text, bus_name)
    assert max(asked) <= 256 and sum(asked) >= 2 * 599


def test_a_look_on_a_bus_without_weights_starts_no_thread(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def in_a_thread(call: Callable[..., Any], *arguments: Any) -> Any:
        started.append(call)
        return call(*arguments)

    with Producer(bus.name) as worker:
        assert worker.requests.next(0) is None
        monkeypatch.setattr(_core, "uninterrupted", in_a_thread)
        worker._servers._read_s = -math.inf
        assert worker.requests.next(0) is None
        assert worker._servers._read_s > 0
    assert started == []


HOLDS = """
import sys, time, shmbus
producer = shmbus.Producer(sys.argv[1])
assert producer.requests.next(30) is not None
print("holds", flush=True)
time.sleep(1000)
"""


def test_what_a_dead_worker_had_comes_to_a_waiting_one_although_a_look_was_just_made(
    bus: Bus, feeder: Feeder, spawn: Spawner
) -> None:
    feeder.request("q", group_size=1)
    worker = spawn.script(HOLDS, bus.name, until="holds")
    with Producer(bus.name) as other:
        assert other.requests.next(0.6) is None  # has looked
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        assert other.requests.next(30) is not None


def test_a_word_of_the_next_look_that_is_overwritten_ends_no_look(bus: Bus) -> None:
    with Producer(bus.name) as producer:
        assert producer._recover_dead() and not producer._recover_dead()
        header = _core.layout()["bus_header"]
        offset = header["offsets"][header["names"].index("next_look_ns")]
        with open(f"/dev/shm/shmbus.{bus.name}", "r+b") as file:
            file.seek(offset)
            file.write(b"\xff" * 8)
        assert producer._recover_dead()


@pytest.fixture
def deep_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a bell wakes a waiting worker."""
    monkeypatch.setattr(limits, "REQUEST_WAIT_S", 1000.0)
    monkeypatch.setattr(limits, "REQUEST_REST_S", 1000.0)


@pytest.mark.usefixtures("deep_sleep")
def test_a_failed_sample_that_is_asked_for_again_wakes_a_waiting_worker(
    bus: Bus, feeder: Feeder
) -> None:
    feeder.request("q", group_size=1)
    with (
        Producer(bus.name) as failing,
        Producer(bus.name, on_stall=None) as waiting,
        Consumer(bus.name, sample_retries=1, retry_backoff=(0.01, 0.01)) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        request = next_request(failing)
        found = pool.submit(waiting.requests.next, 40)
        wait_until(lambda: _core.request_wanted(bus._segment))
        failing.requests.fail(request, "no answer")
        wait_until(lambda: consumer.take(timeout=0.01) or found.done(), 20)
        again = found.result(20)
        assert again is not None and again.attempt == 1


@pytest.mark.usefixtures("deep_sleep")
def test_a_removed_bus_wakes_a_waiting_worker_once_any_process_has_noticed(bus_name: str) -> None:
    with (
        Bus.create(bus_name, "2MiB") as bus,
        Producer(bus.name, on_stall=None) as waiting,
        Producer(bus_name) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        found = pool.submit(waiting.requests.next, 40)
        wait_until(lambda: _core.request_wanted(bus._segment))
        Path(f"/dev/shm/shmbus.{bus_name}").unlink()
        assert other._segment.note_removal()
        with pytest.raises(BusRemovedError):
            found.result(20)
