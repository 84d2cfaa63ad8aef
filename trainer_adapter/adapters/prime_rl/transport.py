"""The two ends of a data rank's channels, as prime-rl's BatchSender and BatchReceiver are called.

Invariants:

- A step that one rank could not take is sent again to that rank alone.
- A send that is cancelled leaves no thread behind that goes on sending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np

from shmbus import BusNotFoundError, WaitTimeoutError
from shmbus._arguments import check_int, check_text
from shmbus.channel import ChannelReceiver, ChannelSender
from trainer_adapter.adapters.prime_rl.micro_batches import decode, encode
from trainer_adapter.adapters.prime_rl.slices import (
    channel_name,
    check_slice,
    fields_of,
    sent_of,
)

__all__ = ["ShmbusBatchReceiver", "ShmbusBatchSender"]

_LOG: Final = logging.getLogger("shmbus.prime_rl")
#: Steps that the orchestrator may be ahead.
_SLOTS: Final = 2
#: Seconds that a sender waits for a trainer: longer than a step and a checkpoint.
STEP_TIMEOUT_S: Final = 3600.0
#: Seconds of one look; between two of them Ctrl-C is seen to.
_LOOK_S: Final = 1.0
#: Seconds between two lines of the log about a step that does not come.
_NOTE_S: Final = 60.0
#: Ranks, readers and steps are small numbers; what is larger is something else.
_LARGEST: Final = 2**31 - 1


class _CancelledError(Exception):
    """Nobody waits for this send any more."""


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
    micro_batch : type, optional
        prime-rl's MicroBatch: a trainer with another one is then refused.
    timeout : float
        Seconds to wait for a trainer that is two steps behind.

    Raises
    ------
    TypeError, ValueError
        An argument is of another kind, or out of range.
    BusBusyError, CapacityError
        As for `shmbus.channel.ChannelSender`; no channel of this run is held then.
    """

    def __init__(
        self,
        name: str,
        data_world_size: int,
        current_step: int = 0,
        *,
        readers_per_rank: int = 1,
        micro_batch: type[Any] | None = None,
        timeout: float = STEP_TIMEOUT_S,
    ) -> None:
        check_text("name", name)
        self.data_world_size = check_int("data_world_size", data_world_size, 1, _LARGEST)
        self.current_step = check_int("current_step", current_step, 0, _LARGEST)
        readers = check_int("readers_per_rank", readers_per_rank, 1, _LARGEST)
        sent = sent_of(self.data_world_size, readers, micro_batch)
        self._channels: list[list[ChannelSender]] = []
        try:
            for rank in range(self.data_world_size):
                self._channels.append([])
                for reader in range(readers):
                    self._channels[-1].append(
                        ChannelSender(
                            channel_name(name, rank, reader), slots=_SLOTS, timeout=timeout
                        )
                    )
            for channel in self._all():
                channel.resume_after(self.current_step - 1)
                channel.state(sent)
        except BaseException:
            self.close()
            raise

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
        TypeError, ValueError
            The grid has another shape, or no micro batches; nothing was sent.
        WaitTimeoutError, PeerGoneError
            A trainer does not take steps, and why. What other ranks got stays sent.

        Notes
        -----
        Where it is cancelled, as by Ctrl-C, some ranks may have the step: send the same one again.
        """
        lengths = [len(row) for row in micro_batch_grid]
        if len(lengths) != self.data_world_size or len(set(lengths)) > 1:
            raise ValueError(
                f"send: expected {self.data_world_size} ranks with equally many micro batches, got "
                f"{lengths}; nothing was sent"
            )
        cancelled = threading.Event()
        sending = asyncio.ensure_future(asyncio.to_thread(self._send, micro_batch_grid, cancelled))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # A thread that waits for a trainer would hold up the end of the process, for an hour.
            cancelled.set()
            await asyncio.wait({sending})
            sending.exception()  # whatever it was, the cancellation is what the caller is told
            raise
        self.current_step += 1

    def _send(self, grid: list[list[Any]], cancelled: threading.Event) -> None:
        def check() -> None:
            if cancelled.is_set():
                raise _CancelledError

        for channels, batches in zip(self._channels, grid, strict=True):
            meta, out = encode(batches)
            size = out.nbytes
            for channel in channels:
                if channel.next_step > self.current_step:
                    continue  # a send that another rank made fail is made again
                channel.on_wake = check
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
        From 0.
    current_step : int
        The first step to be received.
    micro_batch : type
        prime-rl's MicroBatch.
    reader : int
        Which of the rank's processes this is, from 0.

    Raises
    ------
    TypeError, ValueError
        A rank or reader is none, or negative; or `micro_batch` is no msgspec.Struct.
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
        check_text("name", name)
        self.data_rank = check_int("data_rank", data_rank)
        reader = check_int("reader", reader)
        if self.data_rank < 0 or reader < 0:
            raise ValueError(
                f"data_rank, reader: expected 0 or more, got {data_rank} and {reader}; give the "
                "position of this process among those that train on other data"
            )
        self.current_step = check_int("current_step", current_step, 0, _LARGEST)
        fields_of(micro_batch)
        self._place = name, self.data_rank, reader, micro_batch
        self._name = channel_name(name, data_rank, reader)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(micro_batch)
        self._channel: ChannelReceiver | None = None
        self._held: Any = None
        self._used = False
        self._check_at_s = self._note_at_s = 0.0

    def _look(self, seconds: float) -> bool:
        if self._held is not None:
            return True
        if time.monotonic() >= self._check_at_s:
            check_slice(*self._place)
            self._check_at_s = time.monotonic() + _LOOK_S
        try:
            if self._channel is None:
                self._channel = ChannelReceiver(self._name, wait=seconds)
                self._channel.resume_after(self.current_step - 1)
            if self._used:
                self._channel.ack()
                self._used = False
            self._held = self._channel.receive(timeout=seconds)
        except (BusNotFoundError, WaitTimeoutError):
            return False
        return True

    def wait(self) -> None:
        """Wait for the next step, for ever; each minute the log says what for.

        Raises
        ------
        ValueError
            The orchestrator does not send to this rank or reader, or sends other micro batches.
        BusBusyError
            Another living process receives for this rank and reader.
        PeerGoneError
            The orchestrator has died.
        """
        self._note_at_s = time.monotonic() + _NOTE_S
        while not self._look(_LOOK_S):
            if time.monotonic() >= self._note_at_s:
                self._note_at_s += _NOTE_S
                where = "is there" if self._channel is not None else "is not there yet"
                _LOG.warning(
                    "step %d of data rank %d has not come: its channel %r %s; look whether the "
                    "orchestrator of this run works, on this machine",
                    self.current_step, self.data_rank, self._name, where,
                )  # fmt: skip

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
