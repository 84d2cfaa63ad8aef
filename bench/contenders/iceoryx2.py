"""iceoryx2: loan a sample in shared memory, write into it, send it, without overflow."""

import contextlib
import ctypes
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.contenders.base import Contender, Received, Sender
from bench.workload import Source, Workload

__all__ = ["CONTENDER", "link", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="iceoryx2",
    title="iceoryx2, loan and send",
    packages=("iceoryx2", "numpy"),
    per_second=140_000.0,
    copies=1,
    copied="into the sample",
    favour="a polling reader and no events where throughput is measured; a header of our own in "
    "64 bytes; as many samples as the capacity holds; up to 64 borrowed at once",
)

#: Samples in the consumer's hands at a time.
BORROWED: Final = 64
#: Publishers beyond the workload's: a dead process leaves publishers behind for a while.
SPARE_PUBLISHERS: Final = 40
#: Seconds of a sender's wait for the reader's end, or its next look, and between two looks.
LEAVE_S: Final = 1.0
LEAVE_POLL_S: Final = 0.005
#: Number of tokens, index, bytes of the instance id.
HEAD: Final = struct.Struct("<IIH")
HEAD_BYTES: Final = 64


def nbytes_of(tokens: int) -> int:
    """Return the bytes of a trajectory's arrays, each aligned to a multiple of 8."""
    return 2 * ((4 * tokens + 7) // 8 * 8) + (tokens + 7) // 8 * 8


def arrays_of(content: Any, tokens: int) -> tuple[NDArray[Any], ...]:
    """Make views of the arrays in a sample."""
    mask = HEAD_BYTES + (4 * tokens + 7) // 8 * 8
    logprobs = mask + (tokens + 7) // 8 * 8
    return (
        np.frombuffer(content, np.int32, tokens, HEAD_BYTES),
        np.frombuffer(content, np.uint8, tokens, mask),
        np.frombuffer(content, np.float32, tokens, logprobs),
    )


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[str]:
    """Make a private directory for its files, and remove the leftovers in shared memory."""
    with tempfile.TemporaryDirectory(prefix="shmbus-iox2-") as directory:
        prefix = f"bench{os.getpid()}_{time.monotonic_ns()}_"
        try:
            yield f"{directory}:{prefix}"
        finally:
            for entry in os.scandir("/dev/shm"):
                if entry.name.startswith(prefix):
                    os.unlink(entry.path)


class _Port:
    """The service behind both ends, and the event for a sleeping reader."""

    def __init__(self, address: str, workload: Workload) -> None:
        import iceoryx2

        directory, _, prefix = address.partition(":")
        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        config = iceoryx2.config.default()
        config.global_cfg.root_path = iceoryx2.Path.new(directory)
        config.global_cfg.prefix = iceoryx2.FileName.new(prefix)
        self.iceoryx2 = iceoryx2
        self.node = iceoryx2.NodeBuilder.new().config(config).create(iceoryx2.ServiceType.Ipc)
        self.service = (
            self.node.service_builder(iceoryx2.ServiceName.new("trajectories"))
            .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(workload.room)
            .subscriber_max_borrowed_samples(BORROWED + workload.group_size + 1)
            .max_publishers(workload.producers + SPARE_PUBLISHERS)
            .max_nodes(workload.producers + SPARE_PUBLISHERS + 1)
            .max_subscribers(1)
            .open_or_create()
        )
        self.event = None
        if workload.reader == "sleeping":
            self.event = (
                self.node.service_builder(iceoryx2.ServiceName.new("wake"))
                .event()
                .max_notifiers(workload.producers + SPARE_PUBLISHERS)
                .max_nodes(workload.producers + SPARE_PUBLISHERS + 1)
                .open_or_create()
            )


class _Sender(Sender):
    def __init__(self, port: _Port, workload: Workload) -> None:
        iceoryx2 = port.iceoryx2
        self._service = port.service
        size = HEAD_BYTES + nbytes_of(workload.tokens)
        self._publisher = (
            port.service.publisher_builder()
            .initial_max_slice_len(size)
            .backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._notifier = port.event.notifier_builder().create() if port.event else None

    def send(self, instance_id: str, index: int, source: Source) -> None:
        # A full buffer now and then drops a sample in spite of the strategy: 0 recipients.
        while not self._send(instance_id, index, source):
            if not self._service.dynamic_config.number_of_subscribers:
                break
            os.sched_yield()
        if self._notifier:
            self._notifier.notify()

    def _send(self, instance_id: str, index: int, source: Source) -> int:
        name = instance_id.encode()
        tokens = source[0].size
        start = HEAD_BYTES
        size = start + nbytes_of(tokens)
        loaned = self._publisher.loan_slice_uninit(size)
        # Assigning to a slice of a memoryview is the fastest of the ways to copy from Python.
        content = (ctypes.c_uint8 * size).from_address(loaned.payload_ptr)
        target = memoryview(content).cast("B")
        head = HEAD.pack(tokens, index, len(name)) + name
        target[: len(head)] = head
        arrays: tuple[NDArray[Any], ...] = source
        for array in arrays:
            nbytes = array.nbytes
            target[start : start + nbytes] = array.data.cast("B")
            start += (nbytes + 7) // 8 * 8
        recipients: int = loaned.assume_init().send()
        return recipients


class _Receiver:
    def __init__(self, port: _Port, workload: Workload) -> None:
        self._subscriber = port.service.subscriber_builder().create()
        self._listener = port.event.listener_builder().create() if port.event else None
        self._duration = port.iceoryx2.Duration
        self._samples: list[Any] = []

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        received: list[Received] = []
        receive, keep = self._subscriber.receive, self._samples.append
        while len(received) < BORROWED and (sample := receive()) is not None:
            # Its own memoryview takes four times as long to make.
            pointer = sample.payload_ptr
            tokens, index, length = HEAD.unpack(ctypes.string_at(pointer, HEAD.size))
            name = ctypes.string_at(pointer + HEAD.size, length).decode()
            content = (ctypes.c_uint8 * (HEAD_BYTES + nbytes_of(tokens))).from_address(pointer)
            received.append((name, index, arrays_of(content, tokens)))
            keep(sample)
        if received or timeout_s == 0:
            return received
        self._wait(timeout_s)
        return self.receive(0.0)

    def _wait(self, timeout_s: float | None) -> None:
        if self._listener is None:
            # The sender polls; with fewer cores than producers, a sibling can have this core now.
            os.sched_yield()
        elif timeout_s is None:
            self._listener.blocking_wait()
        else:
            self._listener.timed_wait(self._duration.from_secs_f64(timeout_s))

    def done(self) -> None:
        for sample in self._samples:
            sample.delete()
        self._samples.clear()


@contextlib.contextmanager
def sender(address: str, workload: Workload, number: int) -> Iterator[_Sender]:
    """Send from this process."""
    port = _Port(address, workload)
    yield _Sender(port, workload)
    # A subscriber sees a dead publisher's leftovers only after an earlier look at the publisher.
    deadline = time.monotonic() + LEAVE_S
    while port.service.dynamic_config.number_of_subscribers and time.monotonic() < deadline:
        time.sleep(LEAVE_POLL_S)


@contextlib.contextmanager
def receiver(address: str, workload: Workload) -> Iterator[_Receiver]:
    """Receive in this process."""
    yield _Receiver(_Port(address, workload), workload)
