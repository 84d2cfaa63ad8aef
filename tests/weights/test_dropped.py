"""What a dropped publisher, a script's end or an interrupt leaves: nothing in the way."""

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Spawner, wait_until

from shmbus.pool.pool_file import pool_path
from shmbus.segment.names import memory_socket
from shmbus.tensors import copy_table
from shmbus.tensors.copy_table import prepare_copies
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from shmbus.weights.carriers import exported


def test_a_publisher_that_is_dropped_unclosed_makes_place_for_the_next(bus_name: str) -> None:
    others = set(threading.enumerate())
    started: set[threading.Thread] = set()
    for version in range(3):
        publisher = WeightPublisher(
            bus_name, ModuleSource(torch.nn.Linear(3, 3)), carrier="memfd", slots=2
        )
        publisher.publish(version)
        gone = weakref.ref(publisher._writer.memory.buffers._arena)  # type: ignore[attr-defined]
        assert os.path.exists(memory_socket("weights", bus_name))
        started |= set(threading.enumerate()) - others
        del publisher
        gc.collect()
        assert gone() is None
        assert not os.path.exists(memory_socket("weights", bus_name))
    assert len(started) >= 3
    wait_until(lambda: not any(thread.is_alive() for thread in started))
    Path(pool_path(bus_name, "weights")).unlink()


ENDS = """
import sys, time, torch
from shmbus.weights import LocalPiece, ModuleSource, WeightPublisher

class Slow(ModuleSource):
    def iter_local(self, rank, world_size):
        for piece in super().iter_local(rank, world_size):
            print("copies", flush=True)
            time.sleep(0.5)
            yield piece

publisher = WeightPublisher(sys.argv[1], Slow(torch.nn.Linear(3, 3)), keep=True)
publisher.publish_async(7)
"""


def test_a_script_that_ends_publishes_what_it_has_begun(bus_name: str, spawn: Spawner) -> None:
    spawn.script(ENDS, bus_name).finish(60)
    with WeightSubscriber(bus_name) as subscriber, subscriber.latest(timeout=0) as weights:
        assert weights.version == 7
    Path(pool_path(bus_name, "weights")).unlink()


def test_kernels_load_beyond_interrupts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slow_kernels.py").write_text(
        "import signal, threading, time\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "time.sleep(0.2)\n"
        "whole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(copy_table.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(KeyboardInterrupt):
        copy_table.import_kernels("slow_kernels")
        signal.raise_signal(0)
    import slow_kernels  # type: ignore[import-not-found]

    assert slow_kernels.whole


def test_who_may_use_a_device_imports_its_kernels_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr("shmbus.tensors.copy_table.import_kernels", imported.append)
    prepare_copies(torch.device("cpu"))
    assert not imported
    prepare_copies(torch.device("cuda"))
    assert imported == ["shmbus.tensors.copy_kernel"]


def test_an_interrupted_release_raises_and_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        """One whose device is not done when Ctrl-C comes."""

        waited = 0

        def synchronize(self) -> None:
            Stream.waited += 1
            if Stream.waited == 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    lock: Any = type("Lock", (), {})()
    gone = weakref.ref(lock)
    held = exported._Held(lock, torch.device("cuda", 0))
    del lock
    with pytest.raises(KeyboardInterrupt):
        del held
        time.sleep(0)
    assert Stream.waited == 2 and gone() is None
