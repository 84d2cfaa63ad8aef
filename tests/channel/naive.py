"""What a channel of tensors is without its protocol: bytes and counters in shared memory.

It has the ways of published transports. Tensors follow each other as plain bytes, so each side has
to know their number and sizes; a step is over when the other side says so; each side keeps its own
count. Each wait has a deadline only so that a test ends: `Hang` stands for a wait without an end.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

__all__ = ["Hang", "NaiveReceiver", "NaiveSender"]

#: Of a wait that has no end: many times what a step takes on a loaded machine.
DEADLINE_S = 0.5
#: Counters in shared memory: bytes written and taken, steps that were sent and acknowledged.
WRITTEN, TAKEN, SENT, ACKED = range(4)
ROOM = 1 << 16


class Hang(Exception):
    """A wait that nothing would have ended."""


class _Naive:
    """One side; both use the same file, and begin to count at nought."""

    def __init__(self, path: Path, deadline_s: float = DEADLINE_S) -> None:
        with path.open("a+b") as file:
            file.truncate(ROOM)
            self._memory = mmap.mmap(file.fileno(), ROOM)
        self._counters = memoryview(self._memory)[:32].cast("Q")
        self._deadline_s = deadline_s
        self.bytes = 0
        self.steps = 0

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._deadline_s
        while not ready():
            if time.monotonic() >= deadline:
                raise Hang(what)
            time.sleep(0.0005)


class NaiveSender(_Naive):
    """Hands over tensor by tensor, and waits for the end of the step."""

    def put(self, tensor: torch.Tensor) -> None:
        """Write a tensor's bytes, and wait until they are taken."""
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        self._memory[64 : 64 + len(data)] = data
        self.bytes += len(data)
        self._counters[WRITTEN] = self.bytes
        self._wait(lambda: self._counters[TAKEN] == self.bytes, "a tensor is taken")

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send a step; none where there are no tensors, and then only wait for its end."""
        for tensor in tensors:
            self.put(tensor)
        self.steps += 1
        if tensors:
            self._counters[SENT] = self.steps
        self._wait(lambda: self._counters[ACKED] == self.steps, "the step is over")


class NaiveReceiver(_Naive):
    """Takes as many bytes as it expects."""

    def take(self, size: int) -> None:
        """Wait for so many bytes."""
        self._wait(lambda: self._counters[WRITTEN] - self.bytes >= size, "a tensor comes")
        self.bytes += size
        self._counters[TAKEN] = self.bytes

    def receive(self, sizes: Sequence[int]) -> None:
        """Receive a step, and say that it is over."""
        for size in sizes:
            self.take(size)
        self._wait(lambda: self._counters[SENT] > self.steps, "the step was sent")
        self.steps += 1
        self._counters[ACKED] = self.steps
