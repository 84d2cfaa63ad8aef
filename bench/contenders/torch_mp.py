"""torch.multiprocessing: a queue of handles, and each tensor in shared memory of its own."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.contenders import mp_queue
from bench.contenders.base import Contender, Layout, Received, Sender
from bench.workload import Source, Workload

__all__ = ["CONTENDER", "link", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="torch.multiprocessing",
    title="torch.multiprocessing, shared tensors",
    packages=("torch",),
    per_second=3_000.0,
    copies=1,
    copied="into a new shared tensor",
    favour="one shared tensor a trajectory instead of three, filled in place, so copied once; "
    "the file_system strategy, which is the faster one, and needs no living sender",
)


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[Any]:
    """Make the queue; remove what killed processes have left in shared memory."""
    import torch.multiprocessing as mp

    began = time.time()
    try:
        yield mp.get_context("spawn").Queue(min(workload.room, mp_queue.MOST))
    finally:
        for path in Path("/dev/shm").glob("torch_*"):
            pid = path.name.split("_")[1]
            with contextlib.suppress(FileNotFoundError):
                if not Path("/proc", pid).exists() and path.stat().st_mtime > began:
                    path.unlink()


def _torch() -> Any:
    # Its shared storage is not typed.
    return importlib.import_module("torch")


class _Sender(Sender):
    def __init__(self, address: Any, workload: Workload) -> None:
        self._torch = _torch()
        self._put = address.put
        self._layout = Layout()

    def send(self, instance_id: str, index: int, source: Source) -> None:
        tokens = source[0].size
        size = self._layout.nbytes(tokens)
        # A storage that is shared from the beginning: share_memory_() would copy what it finds.
        storage = self._torch.UntypedStorage._new_shared(size)
        tensor = self._torch.tensor([], dtype=self._torch.uint8).set_(storage, 0, (size,))
        self._layout.write(source, tensor.numpy())
        self._put((instance_id, index, 1.0, 3, tokens, tensor))


class _Receiver(mp_queue.QueueReceiver):
    def __init__(self, address: Any, workload: Workload) -> None:
        super().__init__(address)
        self._layout = Layout()

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        for one in self.get(timeout_s):
            instance_id, index, _, _, tokens, tensor = one
            return ((instance_id, index, self._layout.arrays(tensor.numpy(), tokens)),)
        return ()


@contextlib.contextmanager
def sender(address: Any, workload: Workload, number: int) -> Iterator[_Sender]:
    """Send from this process."""
    _torch().multiprocessing.set_sharing_strategy("file_system")
    yield _Sender(address, workload)
    address.close()
    address.join_thread()


@contextlib.contextmanager
def receiver(address: Any, workload: Workload) -> Iterator[_Receiver]:
    """Receive in this process."""
    _torch().multiprocessing.set_sharing_strategy("file_system")
    yield _Receiver(address, workload)
