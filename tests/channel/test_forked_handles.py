"""A forked child and its parent's handles: errors name the fork, after any earlier use."""

import threading
from collections.abc import Callable

import pytest
import torch
from conftest import beside, wait_until
from supervisor import forked

from shmbus import BusClosedError
from shmbus.tensors import TensorChannel

SPECS = {"a": ("float32", (None,))}
STEP = {"a": torch.ones(4)}


def refused(call: Callable[[], object]) -> Callable[[], None]:
    def program() -> None:
        with pytest.raises(BusClosedError):
            call()

    return program


@pytest.mark.parametrize("carrier", ["host", "memfd"])
def test_a_fork_beside_a_waiting_thread_takes_no_lock(bus_name: str, carrier: str) -> None:
    with (
        TensorChannel.create(bus_name, slots=1, carrier=carrier) as sender,
        TensorChannel.open(bus_name, specs=SPECS, timeout=20) as receiver,
    ):
        with beside(receiver.recv) as received:
            wait_until(lambda: not _is_free(receiver._channel._lock))
            assert forked(refused(receiver.recv)) == 0
            assert forked(refused(lambda: sender.send(STEP))) == 0
            sender.send(STEP)
        assert received.result().step == 0
        with beside(sender.skip, reason="none", timeout=20):
            wait_until(lambda: not _is_free(sender._channel._lock))
            assert forked(refused(lambda: sender.skip(reason="none"))) == 0
            assert forked(refused(lambda: sender.fail(reason="none"))) == 0
            receiver._item.ack()  # type: ignore[union-attr]
        assert sender.next_step == 2


def _is_free(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    free = lock.acquire(blocking=False)  # type: ignore[attr-defined]
    if free:
        lock.release()  # type: ignore[attr-defined]
    return bool(free)
