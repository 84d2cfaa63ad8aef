"""A signal in a finalizer reaches the caller; the interpreter would print it and go on."""

import _thread
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from conftest import Daemon, together, wait_until

from shmbus import Bus, Consumer, Feeder, Producer
from shmbus.batch.uninterrupted import finalizer
from shmbus.channel import ChannelSender
from shmbus.segment.locked_file import LockedFile
from shmbus.tensors.device.arena import DescriptorServer
from trainer_adapter.handler.group_calls import GroupCalls


class Interrupts:
    """Sends Ctrl-C where freed, within a step of the interpreter."""

    __del__ = _thread.interrupt_main


def interrupt_at_the_end_of(things: list[Any]) -> None:
    """Free `things`; the handler of Ctrl-C runs at the first step of a `__del__` in Python."""
    things.append(Interrupts())  # a list frees its last entry first
    with pytest.raises(KeyboardInterrupt):
        things.clear()
        time.sleep(0)


class Ends:
    """Fails in its finalizer as often as told."""

    ended: ClassVar[list[int]] = []

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures

    @finalizer
    def __del__(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise ValueError("a fault of its own")
        self.ended.append(self.failures)


def test_an_interrupted_finalizer_runs_once_more_and_raises_afterwards() -> None:
    Ends.ended.clear()
    interrupt_at_the_end_of([Ends(), Ends()])
    assert Ends.ended == [-1, -1]


def test_a_file_and_a_producer_free_what_they_hold(bus: Bus, tmp_path: Path) -> None:
    file = LockedFile()
    file.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    fd = file.fd
    with Feeder(bus.name) as feeder:
        feeder.request("a", group_size=1)
        producer = Producer(bus.name)
        assert producer.requests.next(timeout=5)
        things = [producer, file]
        del producer, file
        interrupt_at_the_end_of(things)
        with Producer(bus.name) as successor:
            assert successor.requests.next(timeout=5)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


def test_a_consumer_of_a_daemon_gives_its_leases_back(
    daemon: Callable[..., Daemon], bus_name: str
) -> None:
    daemon()
    with Producer(bus_name) as producer:
        producer.put("a", group_size=1, index=0, tokens=[1])
    consumer = Consumer(bus_name, daemon=True)
    things: list[Any] = [consumer.take(1, 5), consumer]
    del consumer
    interrupt_at_the_end_of(things)
    with Consumer(bus_name, daemon=True) as successor:
        (group,) = successor.take(1, 5)
        successor.ack(group)


def test_a_handle_without_a_finalizer_has_a_weak_reference_with_a_callback(bus_name: str) -> None:
    interrupt_at_the_end_of([ChannelSender(bus_name)])
    ChannelSender(bus_name).close()


def test_a_server_of_descriptors_and_a_loop_of_calls_stop(tmp_path: Path) -> None:
    place = str(tmp_path / "socket")
    interrupt_at_the_end_of([DescriptorServer(place, lambda question: (question, None))])
    assert not os.path.exists(place)

    async def score(group: object) -> int:
        return 1

    group: Any = SimpleNamespace(state="leased")
    calls = GroupCalls("score_group", score, None, None)
    calls.run([group], lambda group, scored: None, None)
    things = [calls]
    del calls
    interrupt_at_the_end_of(things)
    names = ("shmbus-descriptors", "shmbus-groups")
    wait_until(lambda: not any(each.name in names for each in threading.enumerate()))


def test_a_fault_of_its_own_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: printed.append(found.exc_type))
    Ends(failures=2)
    together(Ends, [1])
    assert printed == [ValueError, ValueError]


class Raises:
    def __bool__(self) -> bool:
        raise KeyboardInterrupt

    def __float__(self) -> float:
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["score", "timeout"])
def test_an_interrupt_in_the_conversion_of_a_number_is_no_wrong_type(
    name: str, producer: Producer
) -> None:
    with pytest.raises(KeyboardInterrupt):
        producer.put("a", group_size=1, index=0, tokens=[1], **{name: Raises()})


def test_a_wait_for_groups_raises_what_a_finalizer_left(bus: Bus) -> None:
    raises = Raises()
    add, is_true = ctypes.pythonapi.Py_AddPendingCall, ctypes.pythonapi.PyObject_IsTrue
    with Consumer(bus.name) as consumer:
        # Its own sleep is a step of C: the interpreter looks at no pending call meanwhile.
        thread = threading.Timer(0.2, add, (is_true, ctypes.py_object(raises)))
        thread.start()
        began_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            consumer.take(1, timeout=60)
        assert time.monotonic() - began_s < 30
        thread.join()
