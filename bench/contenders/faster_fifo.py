"""faster-fifo: a circular buffer of bytes in shared memory, behind one mutex."""

import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.contenders.base import Contender, Received, Receiver, Sender
from bench.contenders.packed_bytes import Decoder, Encoder
from bench.workload import Source, Workload

__all__ = ["CONTENDER", "link", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="faster-fifo",
    title="faster-fifo",
    packages=("faster-fifo", "msgspec"),
    per_second=55_000.0,
    copies=4,
    copied="into a message, into the ring, out of the ring into its buffer, out of that",
    favour="msgspec in place of its pickle, get_many on the consumer's side, a ring of the same "
    "capacity",
)

#: Seconds in place of an endless wait, missing from the interface.
FOR_EVER_S: Final = 1e6
#: Messages of a call: as many as fit a cache, since the queue copies them together.
MANY: Final = 64
#: Overhead of a message in bytes.
FRAME_BYTES: Final = 64


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[Any]:
    """Make the ring."""
    from faster_fifo import Queue

    yield Queue(max_size_bytes=workload.room * (workload.bytes_each + FRAME_BYTES))


class _Sender(Sender):
    def __init__(self, address: Any, workload: Workload) -> None:
        self._queue = address
        self._encode = Encoder(workload).encode
        address.dumps = bytes

    def send(self, instance_id: str, index: int, source: Source) -> None:
        self._queue.put(self._encode(instance_id, index, source), timeout=FOR_EVER_S)


class _Receiver(Receiver):
    def __init__(self, address: Any, workload: Workload) -> None:
        self._queue = address
        self._decode = Decoder().decode
        # The queue hands out its own buffer and overwrites the content at the next call.
        address.loads = bytes

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        try:
            many = self._queue.get_many(
                block=timeout_s != 0,
                timeout=FOR_EVER_S if timeout_s is None else timeout_s,
                max_messages_to_get=MANY,
            )
        except queue.Empty:
            return ()
        return [self._decode(one) for one in many]


@contextlib.contextmanager
def sender(address: Any, workload: Workload, number: int) -> Iterator[_Sender]:
    """Send from this process."""
    yield _Sender(address, workload)


@contextlib.contextmanager
def receiver(address: Any, workload: Workload) -> Iterator[_Receiver]:
    """Receive in this process."""
    yield _Receiver(address, workload)
