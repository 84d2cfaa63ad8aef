"""prime-rl on shared memory: its batch sender and receiver over a channel for each data rank.

::

    from trainer_adapter.adapters import prime_rl
    prime_rl.install("run1")          # in the orchestrator and in each trainer, before they start

prime-rl chooses its transport by name in a factory, without a hook: `install` puts another factory
in its place. Both sets of names are served: ``transports.rollouts`` with MicroBatchSender, and
``transports.batch`` with BatchSender, as it is called since August 2026.

Invariants:

- What is received equals what was sent, value for value and type for type; what is as long as the
  tokens comes as a read-only array in place of a list, routed experts as bytes in place.
- A step is acknowledged when the trainer asks for the next: one that died gets its step again.
- Importing this loads neither torch nor prime-rl.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from shmbus import BusNotFoundError
from shmbus.channel import ChannelReceiver, ChannelSender, ChannelTimeoutError
from trainer_adapter.adapters.micro_batches import decode, encode

__all__ = ["TESTED", "ShmbusBatchReceiver", "ShmbusBatchSender", "install"]

#: What it was written against: nothing of prime-rl can be installed without CUDA.
TESTED: Final = "prime-rl 559b447 (MicroBatchSender) and 0f59b24 (BatchSender), by their interfaces"
#: Steps that the orchestrator may be ahead.
_SLOTS: Final = 2
#: Seconds that a sender waits for a trainer: longer than a step and a checkpoint.
STEP_TIMEOUT_S: Final = 3600.0
#: Seconds of one look; between two of them Ctrl-C is seen to.
_LOOK_S: Final = 1.0
#: Where its interface may be, newest first: package, and the ends of the names there.
_NAMES: Final = (
    ("prime_rl.transports.batch", "batch"),
    ("prime_rl.transports.rollouts", "micro_batch"),
)


def _channel(name: str, rank: int, reader: int) -> str:
    return f"{name}.rank{rank}.{reader}"


class ShmbusBatchSender:
    """Sends each step's micro batches: prime-rl's BatchSender, or MicroBatchSender.

    Parameters
    ----------
    name : str
        Of the run; each data rank's channels are named after it.
    data_world_size : int
        Data ranks.
    current_step : int
        The first step to be sent: the channel goes on there.
    readers_per_rank : int
        Trainer processes that share a data rank, as with context parallelism. Each gets all.
    timeout : float
        Seconds to wait for a trainer that is two steps behind.

    Raises
    ------
    ChannelBusyError, CapacityError
        As for `shmbus.channel.ChannelSender`.
    """

    def __init__(
        self,
        name: str,
        data_world_size: int,
        current_step: int = 0,
        *,
        readers_per_rank: int = 1,
        timeout: float = STEP_TIMEOUT_S,
    ) -> None:
        self.data_world_size = data_world_size
        self.current_step = current_step
        self._channels = [
            [
                ChannelSender(_channel(name, rank, reader), slots=_SLOTS, timeout=timeout)
                for reader in range(readers_per_rank)
            ]
            for rank in range(data_world_size)
        ]
        for channel in self._all():
            channel.resume_after(current_step - 1)

    def _all(self) -> Iterator[ChannelSender]:
        return (channel for of_rank in self._channels for channel in of_rank)

    async def send(self, micro_batch_grid: list[list[Any]]) -> None:
        """Send a step.

        Parameters
        ----------
        micro_batch_grid : list of list of MicroBatch
            For each data rank as many as for the others.

        Raises
        ------
        ValueError
            The grid has another shape; nothing was sent.
        ChannelTimeoutError, PeerGoneError
            A trainer does not take steps, and why. What other ranks got stays sent.
        """
        lengths = [len(row) for row in micro_batch_grid]
        if len(lengths) != self.data_world_size or len(set(lengths)) > 1:
            raise ValueError(
                f"send: expected {self.data_world_size} ranks with equally many micro batches, got "
                f"{lengths}; nothing was sent"
            )
        await asyncio.to_thread(self._send, micro_batch_grid)
        self.current_step += 1

    def _send(self, grid: list[list[Any]]) -> None:
        for channels, batches in zip(self._channels, grid, strict=True):
            meta, out = encode(batches)
            size = out.nbytes
            for channel in channels:
                if channel.next_step > self.current_step:
                    continue  # a send that another rank made fail is made again
                memory = channel.begin(size, len(meta))
                view = np.frombuffer(memoryview(memory), np.uint8)
                for piece, array in zip(out.pieces, out.arrays, strict=True):
                    view[piece.begin : piece.begin + piece.nbytes] = array.view(np.uint8)
                del view
                channel.commit(meta)

    def close(self) -> None:
        """End: trainers get what was sent, and then an error that says so."""
        for channel in self._all():
            channel.close()


class ShmbusBatchReceiver:
    """Receives a data rank's micro batches: prime-rl's BatchReceiver, or MicroBatchReceiver.

    Parameters
    ----------
    name : str
        As for the sender.
    data_rank : int
    current_step : int
        The first step to be received.
    micro_batch : type
        prime-rl's MicroBatch.
    reader : int
        Which of the rank's processes this is.
    """

    def __init__(
        self,
        name: str,
        data_rank: int,
        current_step: int = 0,
        *,
        micro_batch: type[Any],
        reader: int = 0,
    ) -> None:
        self.data_rank = data_rank
        self.current_step = current_step
        self._name = _channel(name, data_rank, reader)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(micro_batch)
        self._channel: ChannelReceiver | None = None
        self._held: Any = None
        self._used = False

    def _look(self, seconds: float) -> bool:
        if self._held is not None:
            return True
        try:
            if self._channel is None:
                self._channel = ChannelReceiver(self._name, wait=seconds)
                self._channel.resume_after(self.current_step - 1)
            if self._used:
                self._channel.ack()
                self._used = False
            self._held = self._channel.receive(timeout=seconds)
        except (BusNotFoundError, ChannelTimeoutError):
            return False
        return True

    def wait(self) -> None:
        """Wait for the next step, for ever; PeerGoneError where the orchestrator has died."""
        while not self._look(_LOOK_S):
            pass

    def can_receive(self) -> bool:
        """Whether the next step is here; raises as `wait` does."""
        return self._look(0.0)

    def receive(self) -> list[Any]:
        """Return the next step's micro batches; acknowledges the step before.

        Returns
        -------
        list of MicroBatch
            What is as long as ``input_ids`` is an array: bool, int64 or float64, read-only.

        Raises
        ------
        StepOrderError
            The sender goes on with another step than this trainer: resume both from one checkpoint.
        PeerGoneError, ChannelClosedError
            The orchestrator died or ended.
        """
        self.wait()
        message, self._held = self._held, None
        found = decode(
            message.meta, np.frombuffer(memoryview(message.memory), np.uint8), self._decoder
        )
        self._used = True
        self.current_step += 1
        return found

    def close(self) -> None:
        """Leave. A step that was received and not followed by another is delivered again."""
        if self._channel is not None:
            self._channel.close()


def install(name: str, *, readers_per_rank: int = 1) -> str:
    """Have prime-rl's factories return these senders and receivers, in this process.

    Parameters
    ----------
    name : str
        Of the run, the same in all processes.
    readers_per_rank : int
        Trainer processes that share a data rank: context times pipeline parallelism.

    Returns
    -------
    str
        The package whose factories were replaced.

    Raises
    ------
    ImportError
        prime-rl is not installed, or has other names; says which are missing.
    """
    tried = []
    for package, middle in _NAMES:
        wanted = (f"setup_{middle}_sender", f"setup_{middle}_receiver", "MicroBatch")
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name is None or not package.startswith(error.name):
                raise
            tried.append(f"{package} is not there")
            continue
        missing = [each for each in wanted if not hasattr(module, each)]
        if missing:
            tried.append(f"{package} has no {', '.join(missing)}")
            continue
        sender, receiver = _factories(name, readers_per_rank, module.MicroBatch)
        for attribute, ours in ((wanted[0], sender), (wanted[1], receiver)):
            _replace(getattr(module, attribute), attribute, ours)
        return package
    raise ImportError(
        f"the prime-rl adapter needs its batch transport: {'; '.join(tried)}; written for {TESTED}"
    )


def _factories(name: str, readers: int, micro_batch: type[Any]) -> tuple[Any, Any]:
    """Make the factories, with the arguments of prime-rl's."""

    def sender(output_dir: Path, data_world_size: int, current_step: int, transport: Any) -> Any:
        return ShmbusBatchSender(name, data_world_size, current_step, readers_per_rank=readers)

    def receiver(output_dir: Path, data_rank: int, current_step: int, transport: Any) -> Any:
        reader = int(os.environ.get("RANK", "0")) % readers
        return ShmbusBatchReceiver(
            name, data_rank, current_step, micro_batch=micro_batch, reader=reader
        )

    return sender, receiver


def _replace(theirs: Any, attribute: str, ours: Any) -> None:
    """Put a factory in place of prime-rl's wherever a module has it by that name."""
    for loaded, module in list(sys.modules.items()):
        if loaded.startswith("prime_rl.") and getattr(module, attribute, None) is theirs:
            setattr(module, attribute, ours)
