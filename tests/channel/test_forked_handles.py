"""A forked child and its parent's handles: errors name the fork, after any earlier use."""

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from conftest import wait_until

from shmbus import BusClosedError
from shmbus.tensors import TensorChannel

SPECS = {"a": ("float32", (None,))}
STEP = {"a": torch.ones(4)}


def in_child(call: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            call()
        except BusClosedError:
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("carrier", ["host", "memfd"])
def test_a_fork_beside_a_waiting_thread_takes_no_lock(bus_name: str, carrier: str) -> None:
    with (
        TensorChannel.create(bus_name, slots=1, carrier=carrier) as sender,
        TensorChannel.open(bus_name, specs=SPECS, timeout=20) as receiver,
    ):
        got: list[int] = []
        thread = threading.Thread(target=lambda: got.append(receiver.recv().step))
        thread.start()
        lock = receiver._channel._lock
        wait_until(lambda: not _is_free(lock))
        assert in_child(receiver.recv) == 0
        assert in_child(lambda: sender.send(STEP)) == 0
        sender.send(STEP)
        thread.join()
        assert got == [0]
        waits = threading.Thread(target=lambda: sender.skip(reason="none", timeout=20))
        waits.start()
        wait_until(lambda: not _is_free(sender._channel._lock))
        assert in_child(lambda: sender.skip(reason="none")) == 0
        assert in_child(lambda: sender.fail(reason="none")) == 0
        receiver._item.ack()  # type: ignore[union-attr]
        waits.join()
        assert sender.next_step == 2


def _is_free(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    free = lock.acquire(blocking=False)  # type: ignore[attr-defined]
    if free:
        lock.release()  # type: ignore[attr-defined]
    return bool(free)
