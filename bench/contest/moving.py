"""Throughput of a contender: what its consumer times, and what all its processes spend.

The loop of producer and consumer is the same for all. The consumer

- makes an array of each field, and looks no further (``read=False``);
- or copies each into memory of its own, as what follows has to (``read=True``);
- or sorts them into groups by a dict, where the contender has not done so, and packs whole groups
  into batches of 65,536 tokens (`pack`): 25 bytes a token, in memory that is used again.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.contenders.base import Received
from bench.contest import usage
from bench.failures import MeasurementError
from bench.processes import Role, run_together
from bench.workload import Timed, Workload

__all__ = ["Packing", "measure"]

_Sink: TypeAlias = Callable[[Sequence[Received]], Sequence[NDArray[Any]]]

TOKENS_PER_BATCH: Final = 65_536
#: Added to a group's standard deviation, so that equal scores divide nothing by zero.
EPSILON: Final = 1e-6


def measure(module: str, workload: Workload, *, pack: bool = False, watch: bool = False) -> Timed:
    """Move a workload over a link of its own.

    Parameters
    ----------
    module : str
        Name of the contender's module.
    pack : bool
        Whether the consumer packs groups into batches.
    watch : bool
        Whether memory is looked at while that goes on, which costs time: ``memory_bytes`` and
        ``memory_before_bytes`` in the figures.
    """
    contender = importlib.import_module(module)
    me = os.getpid()
    levels: list[int] = []

    def look(_: Sequence[int]) -> None:
        levels.append(usage.proportional_bytes(usage.descendants(me)))

    with contender.link(workload) as address:
        servers = usage.descendants(me)
        before = usage.spent(servers)
        consumer = Role(_consume, (module, address, workload, pack))
        producers = [
            Role(_produce, (module, address, workload, i)) for i in range(workload.producers)
        ]
        (counted, seconds, consumed), *sent = run_together(
            [consumer, *producers], watch=look if watch else None
        )
        others = usage.spent(servers) - before
    figures: dict[str, Any] = {
        "others_faults": others.faults,
        "producer_kernel_s": sum(one.kernel_s for one in sent),
        "consumer_kernel_s": consumed.kernel_s,
        "switches": consumed.switches + sum(one.switches for one in sent),
    }
    if levels:
        figures |= {"memory_before_bytes": levels[0], "memory_bytes": max(levels)}
    return Timed(
        trajectories=workload.trajectories,
        seconds=seconds,
        counted=counted,
        consumer_cpu_s=consumed.cpu_s,
        producer_cpu_s=sum(one.cpu_s for one in sent),
        others_cpu_s=others.cpu_s,
        faults=consumed.faults + sum(one.faults for one in sent),
        figures=figures,
    )


def _produce(
    start: Callable[[], None], module: str, address: Any, workload: Workload, number: int
) -> usage.Spent:
    """Send one producer's share, as fast as the link takes it."""
    items = workload.items(number)
    with importlib.import_module(module).sender(address, workload, number) as sender:
        send = sender.send
        start()
        before = usage.own()
        for (instance_id, index), source in items:
            if workload.pause_s:
                time.sleep(workload.pause_s)
            send(instance_id, index, source)
        sender.flush()
    return usage.own() - before


def _consume(
    start: Callable[[], None], module: str, address: Any, workload: Workload, pack: bool
) -> tuple[int, float, usage.Spent]:
    """Receive everything; count what follows the warm-up, its time and its cost."""
    wanted, done, first = workload.trajectories, 0, 0
    contender = importlib.import_module(module)
    look: _Sink = _Reading(workload) if workload.read else _look
    if workload.arrival != "in order" or not contender.CONTENDER.ordered:
        look = _Counting(look)
    sink = Packing(workload, lasting=contender.CONTENDER.lasting) if pack else look
    began = before = None
    # A polling reader asks again immediately; the deadline of the processes ends a stall.
    timeout_s = 0.0 if workload.reader == "busy" else None
    with contender.receiver(address, workload) as receiver:
        start()
        while done < wanted:
            received = receiver.receive(timeout_s)
            if not received:
                continue
            if began is None and done + len(received) >= workload.warm_up:
                began, before = time.perf_counter(), usage.own()
                first = done + len(received)
            arrays = sink(received)
            done += len(received)
            # An array keeps its bytes: what was received ends here for those too who free nothing
            # under one.
            received = ()
            if done < wanted:
                arrays = ()
                receiver.done()
        if isinstance(sink, _Counting):
            sink.check(workload.producers)
        elif sink is look:
            _check(workload, arrays)
        receiver.done()
        assert began is not None and before is not None
        if first == wanted:
            raise MeasurementError(f"all {wanted} came at once: there is nothing to time")
        return wanted - first, time.perf_counter() - began, usage.own() - before


def _check(workload: Workload, arrays: Sequence[NDArray[Any]]) -> None:
    """Refuse a last trajectory, which differs from all before it, that is not what was sent."""
    expected: list[NDArray[Any]] = [*workload.source(last=True)]
    for array, sent in zip(arrays, expected, strict=False):
        if not np.array_equal(array, sent):
            raise MeasurementError(f"expected {sent} at the end, got {array}")


def _look(received: Sequence[Received]) -> Sequence[NDArray[Any]]:
    for _, _, arrays in received:
        tokens, loss_mask, logprobs, *_ = arrays
    return tokens, loss_mask, logprobs


class _Reading:
    """Copies every array into memory that is used again and again."""

    def __init__(self, workload: Workload) -> None:
        like: list[NDArray[Any]] = [
            *workload.source(tokens=workload.longest),
            *workload.side_arrays().values(),
        ]
        self._memory = [np.ones(array.size, array.dtype) for array in like]

    def __call__(self, received: Sequence[Received]) -> Sequence[NDArray[Any]]:
        memory = self._memory
        for _, _, arrays in received:
            for target, array in zip(memory, arrays, strict=True):
                target[: array.size] = array.reshape(-1)
        return [target[: array.size] for target, array in zip(memory, arrays, strict=True)]


class _Counting:
    """Counts the trajectories that differ, where the last to arrive is not the last sent."""

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self._different = 0

    def __call__(self, received: Sequence[Received]) -> Sequence[NDArray[Any]]:
        self._different += sum(int(arrays[0][0]) for _, _, arrays in received)
        return self._sink(received)

    def check(self, expected: int) -> None:
        if self._different != expected:
            raise MeasurementError(
                f"expected {expected} trajectories that differ from the others, got "
                f"{self._different}"
            )


class Packing:
    """Sorts trajectories into groups, and packs whole groups into batches.

    Advantages are those of GRPO: a score less the mean of its group, by the group's standard
    deviation. A batch that is full is overwritten by the next one, as after a training step.
    """

    def __init__(self, workload: Workload, *, lasting: bool) -> None:
        self._lasting = lasting
        room = max(TOKENS_PER_BATCH, workload.longest * workload.group_size)
        self._group_size = workload.group_size
        self._open: dict[str, dict[int, tuple[NDArray[Any], ...]]] = {}
        self._memory_tokens = np.ones(room, np.int64)
        self._memory_positions = np.ones(room, np.int64)
        self._memory_mask = np.ones(room, np.bool_)
        self._memory_logprobs = np.ones(room, np.float32)
        self._memory_advantages = np.ones(room, np.float32)
        self._count = np.arange(workload.longest, dtype=np.int64)
        self._end = 0
        self.batches = 0

    def __call__(self, received: Sequence[Received]) -> Sequence[NDArray[Any]]:
        """Add what was received; the arrays may be freed afterwards."""
        for instance_id, index, arrays in received:
            group = self._open.setdefault(instance_id, {})
            group[index] = arrays
            if len(group) == self._group_size:
                del self._open[instance_id]
                self._pack([group[i] for i in range(self._group_size)])
        if not self._lasting:
            # What waits for the rest of its group cannot stay where it is.
            for instance_id, index, arrays in received:
                if instance_id in self._open:
                    self._open[instance_id][index] = tuple(array.copy() for array in arrays)
        return ()

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of the batch so far."""
        return self._memory_tokens[: self._end]

    @property
    def advantages(self) -> NDArray[np.float32]:
        """Advantages of the batch so far, one a token."""
        return self._memory_advantages[: self._end]

    def _pack(self, group: Sequence[tuple[NDArray[Any], ...]]) -> None:
        if self._end + sum(arrays[0].size for arrays in group) > self._memory_tokens.size:
            self.batches += 1
            self._end = 0
        scores = np.arange(len(group), dtype=np.float32) % 2
        advantages = (scores - scores.mean()) / (scores.std() + EPSILON)
        for (tokens, mask, logprobs, *_), advantage in zip(group, advantages, strict=True):
            part = slice(self._end, self._end + tokens.size)
            self._memory_tokens[part] = tokens
            self._memory_positions[part] = self._count[: tokens.size]
            self._memory_mask[part] = mask
            self._memory_logprobs[part] = logprobs
            self._memory_advantages[part] = advantage
            self._end = part.stop
