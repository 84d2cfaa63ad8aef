"""The carriers ``cuda_vmm``, ``cuda_ipc`` and ``memfd``: whole versions in exported memory.

Versions, leases, rows and the manifest are those of a slot pool, as with ``shm``; a slot holds only
the name of a buffer, which the publisher has allocated on its device and exports once.

Invariants: a version is published when the device has all of its bytes; a slot's buffer is written
only under the slot's lock, which its readers keep until their device has read it.
"""

from __future__ import annotations

import _thread
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec
import torch

from shmbus.errors import DamagedError, WeightsError
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, VersionLease, VersionWrite, WhenHeld
from shmbus.segment.names import memory_socket
from shmbus.tensors.device.arena import BufferName, Memory, MemoryKind
from shmbus.tensors.device.streams import wake
from shmbus.weights.block_sums import BLOCK_BYTES, block_sum, block_sums, blocks_of
from shmbus.weights.carriers.base import Promises
from shmbus.weights.carriers.exported_buffers import Buffers, LeadersBuffers, OwnBuffers
from shmbus.weights.carriers.pool_version import PoolVersion
from shmbus.weights.copies import Batch, Pair, settle_devices, target_of_piece
from shmbus.weights.loading import LoadCache
from shmbus.weights.manifest import Manifest
from shmbus.weights.memory import tensor_at
from shmbus.weights.seen import are_same
from shmbus.weights.source import LocalPiece

__all__ = ["KIND_OF", "PROMISES", "Borrowed", "ExportedVersion", "ExportedWriter", "Placed", "Said"]

KIND: Final = "weights"

#: What each of these carriers is made of.
KIND_OF: Final[dict[str, MemoryKind]] = {"cuda_vmm": "vmm", "cuda_ipc": "ipc", "memfd": "memfd"}

PROMISES: Final = Promises(
    whole_version=True,
    late_readers=True,
    survives_publisher=False,
    survives_reboot=False,
    views=True,
    ranks=True,
    memory="`slots` times the model, on the device of rank 0",
)

#: Bytes of a slot before its digests, and of each: MessagePack's longest numbers.
_PLACED_BYTES: Final = 64
_DIGEST_BYTES: Final = 9
_LENGTH_BYTES: Final = 4
#: Of what a version says of itself, beside its manifest.
_SAID_BYTES: Final = 64

#: Blocks that a sample compares, as with "shm".
SAMPLED_BLOCKS: Final = 4

#: Seconds until an interrupt comes again that came where it can stop nothing.
AGAIN_S: Final = 0.01

#: Bytes of tensors, made for this version only, that are kept until they are copied together.
PENDING_BYTES: Final = 64 << 20


class _Known:
    """Pieces that a source gives again, and how they are copied into one slot."""

    def __init__(self, pieces: Sequence[LocalPiece], batch: Batch) -> None:
        self.pieces = pieces  # kept, so that no other ones are the same objects
        self.batch = batch
        #: The same, as the source has foreseen them.
        self.foreseen: Sequence[LocalPiece] | None = None


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="exported/1"):
    """What a version says of itself: by its tag a reader knows that the slot has no payload."""

    manifest: bytes
    #: Whose memory it lies in, for the ranks that write it.
    owner: int


class Placed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a slot holds: where the version's bytes are, and their digests."""

    buffer: BufferName
    total: int
    digests: list[int]

    def encode(self) -> bytes:
        """Return it with its length before it: a slot may be longer."""
        data = msgspec.msgpack.encode(self)
        return len(data).to_bytes(_LENGTH_BYTES, "little") + data

    @classmethod
    def decode(cls, data: bytes) -> Placed:
        """Read it back.

        Raises
        ------
        DamagedError
            It is none.
        """
        size = int.from_bytes(data[:_LENGTH_BYTES], "little")
        try:
            return msgspec.msgpack.decode(data[_LENGTH_BYTES : _LENGTH_BYTES + size], type=cls)
        except msgspec.MsgspecError as error:
            raise DamagedError(
                f"the newest version's slot does not say where its bytes are ({error}); publish "
                "again, and look for a process that writes where it should not"
            ) from error

    @staticmethod
    def room(total: int) -> int:
        """Return the bytes of a slot for versions of so many bytes, with or without digests."""
        return _PLACED_BYTES + blocks_of(total) * _DIGEST_BYTES


class ExportedWriter:
    """A rank of the publisher.

    Parameters
    ----------
    bus : str
        The bus that the weights belong to.
    manifest : Manifest
        The same on every rank.
    name : "cuda_vmm" | "cuda_ipc" | "memfd"
        Which carrier.
    device : torch.device
        Where the versions lie, in rank 0; from where it writes, in another rank.
    slots, max_slots, rank, world_size, when_held, timeout, digests, label
        As for `ShmWriter`.
    """

    promises = PROMISES

    def __init__(
        self,
        bus: str,
        manifest: Manifest,
        *,
        name: str,
        device: torch.device,
        slots: int = 2,
        max_slots: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        when_held: WhenHeld = "wait",
        timeout: float = 60.0,
        digests: bool = False,
        label: str = "",
    ) -> None:
        self.name = name
        self.device = device
        self.manifest = manifest
        self.rank = rank
        self.digests = digests
        self.places = manifest.by_name()
        self._said = Said(manifest.encode(), 0)
        # What rank 0 says is taken by the others: none of them knows whose memory it is before.
        self._meta: bytes | None = None
        self._slot_bytes = Placed.room(manifest.total)
        self._views: dict[int, tuple[BufferName, dict[str, torch.Tensor]]] = {}
        #: By slot, what was found out of the pieces that a source gives again.
        self.known: dict[int, _Known] = {}
        spec = PoolSpec(
            slot_bytes=self._slot_bytes,
            slots=slots,
            max_slots=max_slots,
            meta_bytes=(len(self._said.manifest) + _SAID_BYTES) * 5 // 4,
        )
        self._publisher = PoolPublisher(
            bus,
            KIND,
            rank=rank,
            world_size=world_size,
            spec=spec if rank == 0 else None,
            label=label,
            when_held=when_held,
            timeout=timeout,
        )
        path = memory_socket(KIND, bus)
        self._buffers: Buffers
        if rank:
            self._buffers = LeadersBuffers(path, device, timeout)
            return
        try:
            self._buffers = own = OwnBuffers(path, KIND_OF[name], device)
        except BaseException:
            self._publisher.close(remove=True)
            raise
        self._said = Said(self._said.manifest, own.owner)
        self._meta = msgspec.msgpack.encode(self._said)
        try:
            for slot in range(slots):  # memory is found now, not in a step
                self._buffers.buffer(own.owner, slot, manifest.total)
        except BaseException:
            self.close(remove=True)
            raise

    def views(self, slot: int, name: BufferName, payload: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each tensor's place in a slot's buffer, made once for each buffer."""
        known = self._views.get(slot)
        if known is not None and known[0] == name:
            return known[1]
        found = {place.name: tensor_at(payload, place) for place in self.manifest.tensors}
        self._views[slot] = name, found
        self.known.pop(slot, None)
        return found

    def begin(self, version: int, text: str) -> _ExportedSink | None:
        """Take a slot, or join the version that rank 0 writes; None where it was skipped."""
        wake(self.device)
        write = self._publisher.begin(version, self._slot_bytes, meta=self._meta, text=text)
        if write is None:
            return None
        try:
            said = self._said if self.rank == 0 else self._checked(write)
            name, payload = self._buffers.buffer(said.owner, write.slot, self.manifest.total)
        except BaseException as error:
            write.give_up(str(error))
            raise
        return _ExportedSink(self, write, name, payload)

    def _checked(self, write: VersionWrite) -> Said:
        """Return what rank 0 says, which has the same manifest."""
        try:
            said = msgspec.msgpack.decode(write.meta, type=Said)
        except msgspec.MsgspecError:
            said = None
        if said is None or said.manifest != self._said.manifest:
            what = "by another carrier" if said is None else "with another manifest"
            raise WeightsError(
                f"rank {self.rank}: rank 0 publishes version {write.version} {what}; let every "
                "rank publish the same"
            )
        return said

    def close(self, *, remove: bool) -> None:
        """Leave; the versions go with their memory, but from readers that have mapped it."""
        self._views, self.known = {}, {}
        self._buffers.close()
        self._publisher.close(remove=remove)


class _ExportedSink:
    """A slot that is being written."""

    def __init__(
        self,
        writer: ExportedWriter,
        write: VersionWrite,
        name: BufferName,
        payload: torch.Tensor,
    ) -> None:
        self._writer = writer
        self._write = write
        self._name = name
        self._payload = payload
        self._views = writer.views(write.slot, name, payload)
        self._pending: list[Pair] = []
        self._pending_bytes = 0
        self._begun: _Known | None = None
        self._settled = False

    def put(self, piece: LocalPiece) -> int:
        """Copy a piece to its place, cast if need be; small ones together with what follows."""
        pair = self._pair(piece)
        size = pair[0].numel() * pair[0].element_size()
        self._pending.append(pair)
        self._pending_bytes += size
        if self._pending_bytes >= PENDING_BYTES:
            self._flush()
        return size

    def foresee(self, pieces: Sequence[LocalPiece]) -> None:
        """Begin to copy pieces that were put into this slot before."""
        known = self._writer.known.get(self._write.slot)
        if known is None or not self._payload.is_cuda:
            return
        if pieces is known.foreseen or are_same(known.pieces, pieces):
            known.foreseen = pieces
            known.batch.begin()
            self._begun = known

    def put_lasting(self, pieces: Sequence[LocalPiece]) -> int:
        """Copy pieces that their source gives again, all of them together."""
        known = self._writer.known.get(self._write.slot)
        if known is None or not are_same(known.pieces, pieces):
            known = _Known(pieces, Batch([self._pair(piece) for piece in pieces]))
            self._writer.known[self._write.slot] = known
        if known is not self._begun:
            known.batch.begin()
        return known.batch.nbytes

    def _pair(self, piece: LocalPiece) -> Pair:
        whole = self._views.get(piece.name)
        return target_of_piece(self._writer.places.get(piece.name), whole, piece), piece.tensor

    def _flush(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        Batch(pending).begin()

    def settle(self) -> None:
        """Wait until all is copied: the parameters may change then."""
        self._flush()
        settle_devices([self._payload])
        self._settled = True

    def finish(self) -> None:
        """Publish; a rank above 0 says that its pieces are there."""
        if not self._settled:
            self.settle()
        if self._writer.rank:
            self._write.finish()
            return
        if self._writer.digests:
            self._write.await_ranks()
        sums = block_sums(self._payload) if self._writer.digests else []
        said = Placed(self._name, self._writer.manifest.total, sums).encode()
        memoryview(self._write.buffer)[: len(said)] = said
        # Of the slot, which is small: a scribble over the buffer's name is found.
        self._write.finish(digests=True)

    def give_up(self, reason: str) -> None:
        """Leave what was newest in force; its slot is not used before the device has let go."""
        self._pending = []
        settle_devices([self._payload])
        self._write.give_up(reason)


class HasBytes(Protocol):
    """Memory, or a slot of a pool."""

    def tensor(self) -> torch.Tensor:
        """Return all its bytes, uint8."""


class Borrowed:
    """A buffer's tensors, which keep no lease, and what was checked of them.

    Parameters
    ----------
    name : BufferName
        Which buffer.
    memory : HasBytes
        Mapped.
    manifest : Manifest
        Of what lies in it.
    """

    def __init__(self, name: BufferName, memory: HasBytes, manifest: Manifest) -> None:
        payload = memory.tensor()
        self.name = name
        self.manifest = manifest
        self.tensors = {place.name: tensor_at(payload, place) for place in manifest.tensors}
        self.cache = LoadCache()


class ExportedVersion(PoolVersion):
    """A leased version in another process's memory.

    Parameters
    ----------
    lease : VersionLease
        Of a pool.
    reader : PoolReader
        Which has leased it.
    manifest : Manifest
        Checked.
    placed : Placed
        What the slot says.
    memory : Memory
        Mapped.
    borrowed : Borrowed
        Of its memory.
    """

    def __init__(
        self,
        lease: VersionLease,
        reader: PoolReader,
        manifest: Manifest,
        placed: Placed,
        memory: Memory,
        borrowed: Borrowed,
    ) -> None:
        self._borrowed = borrowed
        self._lease = lease
        self._reader = reader
        self._placed = placed
        self._memory = memory
        self._held: _Held | None = _Held(lease.buffer, memory.device)
        self.version = lease.version
        self.sequence = lease.sequence
        self.origin: object = reader.identity
        self.text = lease.text
        self.manifest = manifest

    def tensors(self) -> dict[str, torch.Tensor]:
        """View every tensor; no byte is copied. The views keep the slot."""
        payload, life = self._memory.lend()
        span: Any = life()
        span.held = self._held
        return {place.name: tensor_at(payload, place) for place in self.manifest.tensors}

    @property
    def cache(self) -> LoadCache:
        """Return what was checked of this buffer before."""
        return self._borrowed.cache

    def borrow(self) -> dict[str, torch.Tensor]:
        """View every tensor for as long as this object is open: made once for each buffer."""
        return self._borrowed.tensors

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Do nothing: there is no host memory that stays."""

    def verify(self, *, sample: bool) -> None:
        """Compare digests, on the device that reads."""
        sums = self._placed.digests
        if not sums:
            raise WeightsError(
                f"version {self.version} was published without digests, so nothing can be "
                "verified; make the publisher with digests=True, or subscribe with verify='off'"
            )
        payload = self._memory.tensor()[: self.manifest.total]
        blocks = list(range(len(sums)))
        for block in random.sample(blocks, min(SAMPLED_BLOCKS, len(blocks))) if sample else blocks:
            if block_sum(payload, block) != sums[block]:
                end = min(self.manifest.total, (block + 1) * BLOCK_BYTES)
                raise DamagedError(
                    f"version {self.version}: bytes {block * BLOCK_BYTES} to {end} do not match "
                    "their digest; do not load it: publish again, and look for a process that "
                    "writes where it should not"
                )

    def close(self) -> None:
        """Let go of the lease; views that are left keep the slot."""
        self._held = None
        self._lease.close()


class _Held:
    """A slot's lock, dropped when the device has done what was asked of it on this stream.

    The lock is not in here but in `_locks`: where an interrupt ends what follows the death of this
    object, the slot stays locked, and the next one lets go of it.
    """

    def __init__(self, buffer: object, device: torch.device) -> None:
        for dead in [known for known in _locks if known() is None]:
            _let_go(dead)
        _locks[weakref.ref(self, _let_go)] = buffer, device, os.getpid()


_locks: Final[dict[weakref.ref[_Held], tuple[object, torch.device, int]]] = {}


def _let_go(dead: weakref.ref[_Held]) -> None:
    known = _locks.get(dead)
    if known is None:
        return
    _, device, pid = known
    stream = None
    try:
        # A forked child has no context, and its parent has the lease.
        if device.type == "cuda" and os.getpid() == pid and not sys.is_finalizing():
            stream = torch.cuda.current_stream(device)
            stream.synchronize()
        _locks.pop(dead, None)
    except KeyboardInterrupt:
        # Nobody would get it from here, and the device may not be done: on both counts, later.
        threading.Thread(target=_let_go_later, args=(dead, device, stream)).start()


def _let_go_later(
    dead: weakref.ref[_Held], device: torch.device, stream: torch.cuda.Stream | None
) -> None:
    if stream is not None:
        stream.synchronize()
    elif device.type == "cuda":
        torch.cuda.synchronize(device)
    _locks.pop(dead, None)
    time.sleep(AGAIN_S)
    _thread.interrupt_main()
