"""What the side of a trainer keeps on disk: what was put, and what the trainer is done with.

A file of frames, each with checksums, that is only appended to: the bus that it is of; a block as
it came, after the labels of its splits; the records that are put of it, with the samples that were
told to be missing; those that have ended.

Invariants:

- A record is written before it is put, and its end before its source is told to let go.
- What is cut or damaged is told, and the frames that are whole are used.
- Of what has ended, no more is kept than of the rest: a shorter file takes its place, whole.
- A disk that takes no more stops nothing here: it is told, and tried again.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from shmbus import errors
from shmbus.relay.messages import ORIGIN_BYTES, Labels, MissingSample, Origin
from shmbus.segment.locked_file import LockedFile
from shmbus.store.directory import sync
from shmbus_ext import _core

_log = logging.getLogger("shmbus.relay")

#: Magic, kind, length and checksum of what follows; then the checksum of these.
_HEAD: Final = struct.Struct("<4sIQI")
_CHECK: Final = struct.Struct("<I")
_STEP: Final = _HEAD.size + _CHECK.size
_MAGIC: Final = b"SBKP"
_VERSION: Final = 1
_RUN, _BLOCK, _PUT, _END, _SPLITS = range(5)
#: Bytes that a file may have of what has ended, beside as many as are needed.
_SPARE_BYTES: Final = 256 << 20
#: Seconds between two tries of a disk that took no more.
_AGAIN_S: Final = 1.0


class _Run(msgspec.Struct, array_like=True):
    version: int
    bus: str


class _Put(msgspec.Struct, array_like=True):
    origins: bytes
    missing: tuple[MissingSample, ...]


class Kept(NamedTuple):
    """A record that was put and has not ended: its block, its place there, what is missing."""

    payload: memoryview
    place: int
    origin: Origin
    missing: tuple[MissingSample, ...]
    splits: Labels


class Keep:
    """The file of one bus in a directory; BusBusyError where another process writes it."""

    def __init__(self, directory: str, bus: str, sync_s: float) -> None:
        self._bus, self._sync_s = bus, sync_s
        self._path = Path(directory) / f"{bus}.kept"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock, self._fd, self._nbytes = LockedFile(), -1, 0
        #: By origin, where its block's frame is; by that, samples that were told to be missing.
        self._places: dict[Origin, int] = {}
        self._missing: dict[int, tuple[MissingSample, ...]] = {}
        #: Of a block: its bytes, and the labels of its splits.
        self._sizes: dict[int, tuple[int, Labels]] = {}
        self._owed_ends: set[Origin] = set()
        self._next_try_s = 0.0
        #: Why nothing is kept now.
        self.error = ""
        self._swap, self._over = threading.Lock(), threading.Event()
        try:
            if not self._lock.take(f"{self._path}.lock", f"what is kept of bus {bus!r}"):
                raise errors.BusBusyError(
                    f"{self._path}: another relay keeps there what it puts; end it, or give this "
                    "one another directory"
                )
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._read()
        except BaseException:
            self.close()
            raise
        if sync_s:
            threading.Thread(target=self._sync_now_and_then, daemon=True).start()

    # -- reading ---------------------------------------------------------------------------------

    def _read(self) -> None:
        coming: dict[Origin, int] = {}
        #: By where the block begins whose splits they are; without them its numbers say nothing.
        splits: dict[int, Labels] = {}
        for at, kind, body in self._frames():
            if at == 0:
                self._require_ours(kind, body)
            elif kind == _BLOCK and at in splits:
                try:
                    coming.update(dict.fromkeys(_origins_of(body), at))
                except ValueError as error:
                    raise errors.LayoutMismatchError(f"{self._path}: {error}") from error
                self._sizes[at] = len(body), splits[at]
            elif kind == _SPLITS:
                splits[at + _STEP + len(body)] = msgspec.msgpack.decode(body, type=Labels)
            elif kind == _PUT:
                put = msgspec.msgpack.decode(body, type=_Put)
                there = coming.keys() & _split(put.origins)
                self._note({origin: coming[origin] for origin in there}, put.missing)
            elif kind == _END:
                self._drop(_split(bytes(body)))
        os.ftruncate(self._fd, self._nbytes)
        os.lseek(self._fd, 0, os.SEEK_END)
        if not self._nbytes:
            self._append([(_RUN, msgspec.msgpack.encode(_Run(_VERSION, self._bus)))])

    def _frames(self) -> Iterator[tuple[int, int, memoryview]]:
        """Yield where each whole frame begins, its kind, and what it has."""
        held, at, lost = self._map(), 0, 0
        while at + _STEP <= len(held):
            magic, kind, nbytes, crc = _HEAD.unpack_from(held, at)
            (check,) = _CHECK.unpack_from(held, at + _HEAD.size)
            good = magic == _MAGIC and check == _core.crc32c(held[at : at + _HEAD.size])
            if not good or at + _STEP + nbytes > len(held):
                break
            body = held[at + _STEP : at + _STEP + nbytes]
            if crc == _core.crc32c(body):
                yield at, kind, body
            else:
                lost += nbytes
            at += _STEP + nbytes
        if at == 0 and len(held) >= _STEP:
            self._require_ours(-1, held)  # no file of ours, which is left as it is
        self._nbytes, lost = at, lost + len(held) - at
        if lost:
            _log.error(
                "relay: %s: %d of %d bytes are cut or damaged, as by a loss of power; what was in "
                "them is not brought back", self._path, lost, len(held),
            )  # fmt: skip

    def _require_ours(self, kind: int, body: memoryview) -> None:
        try:
            run = msgspec.msgpack.decode(body, type=_Run) if kind == _RUN else None
        except msgspec.MsgspecError:
            run = None
        if run != _Run(_VERSION, self._bus):
            raise errors.LayoutMismatchError(
                f"{self._path}: expected what version {_VERSION} keeps of bus {self._bus!r}, found "
                f"{run or 'something else'}; give the relay another directory, or move it away"
            )

    def _map(self) -> memoryview:
        size = os.fstat(self._fd).st_size
        return memoryview(mmap.mmap(self._fd, size, prot=mmap.PROT_READ) if size else b"")

    def records(self, known: Collection[Origin]) -> Iterator[Kept]:
        """Yield what was put and has not ended, and is not among what the bus has."""
        held = self._map()
        for at in sorted({at for origin, at in self._places.items() if origin not in known}):
            nbytes, splits = self._sizes[at]
            payload = held[at + _STEP : at + _STEP + nbytes]
            for place, origin in enumerate(_origins_of(payload)):
                if origin not in known and self._places.get(origin) == at:
                    yield Kept(payload, place, origin, self._missing.get(at, ()), splits)

    # -- writing ---------------------------------------------------------------------------------

    def put(
        self,
        blocks: Iterable[tuple[bytes | memoryview, Labels]],
        origins: Collection[Origin],
        missing: tuple[MissingSample, ...],
    ) -> None:
        """Keep records that are put next, which these blocks have."""
        at, frames, places = self._nbytes, list[tuple[int, bytes | memoryview]](), {}
        sizes: dict[int, tuple[int, Labels]] = {}
        of = set(origins)
        for payload, splits in blocks:
            frames.append((_SPLITS, msgspec.msgpack.encode(splits)))
            at += _STEP + len(frames[-1][1])
            places.update(dict.fromkeys(of.intersection(_origins_of(payload)), at))
            frames.append((_BLOCK, payload))
            sizes[at] = len(payload), splits
            at += _STEP + len(payload)
        said = msgspec.msgpack.encode(_Put(b"".join(places), missing))
        if self._append([*frames, (_PUT, said)]):
            self._sizes.update(sizes)
            self._note(places, missing)

    def end(self, origins: Collection[Origin]) -> None:
        """Keep that the trainer is done with these."""
        self._owed_ends |= self._places.keys() & origins
        if self._owed_ends and self._append([(_END, b"".join(self._owed_ends))]):
            self._drop(self._owed_ends)
            self._owed_ends = set()

    def _note(self, places: dict[Origin, int], missing: tuple[MissingSample, ...]) -> None:
        self._places.update(places)
        if missing:
            self._missing.update(dict.fromkeys(places.values(), missing))

    def _drop(self, origins: Iterable[Origin]) -> None:
        for origin in origins:
            self._places.pop(origin, None)

    def _append(self, frames: list[tuple[int, bytes | memoryview]]) -> bool:
        """Write frames, all or nothing."""
        if time.monotonic() < self._next_try_s:
            return False
        try:
            for kind, body in frames:
                head = _HEAD.pack(_MAGIC, kind, len(body), _core.crc32c(body))
                for part in (head + _CHECK.pack(_core.crc32c(head)), body):
                    left = memoryview(part)
                    while len(left):
                        left = left[os.write(self._fd, left) :]
            if not self._sync_s:
                os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._nbytes)
            os.lseek(self._fd, 0, os.SEEK_END)
            self._tell(error)
            return False
        self._nbytes += sum(_STEP + len(body) for _, body in frames)
        self.error = ""
        return True

    def _tell(self, error: OSError) -> None:
        self._next_try_s = time.monotonic() + _AGAIN_S
        if not self.error:
            text = "relay: %s: %s: what is put now is not kept; it is tried again"
            _log.error(text, self._path, error)
        self.error = f"{self._path}: {error}"

    def round(self) -> None:
        """Write what is needed once more, where the file has too much beside that."""
        if self._nbytes < _SPARE_BYTES:
            return
        blocks = set(self._places.values())
        if self._nbytes < _SPARE_BYTES + 2 * sum(self._sizes[at][0] for at in blocks):
            return
        kept: dict[int, list[Kept]] = {}
        for record in self.records(()):
            kept.setdefault(self._places[record.origin], []).append(record)
        before = (self._fd, self._nbytes, self._places, self._missing, self._sizes)
        new = f"{self._path}.new"
        try:
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._tell(error)
            return
        with self._swap:
            self._fd, self._nbytes, self._places, self._missing, self._sizes = fd, 0, {}, {}, {}
            good = self._append([(_RUN, msgspec.msgpack.encode(_Run(_VERSION, self._bus)))])
            for records in kept.values():
                block = (records[0].payload, records[0].splits)
                self.put([block], [r.origin for r in records], records[0].missing)
                good = good and not self.error
            try:
                if good:
                    os.fsync(fd)
                    os.replace(new, self._path)
            except OSError as error:
                self._tell(error)
                good = False
            if good:
                os.close(before[0])
                sync(self._path.parent)
            else:
                os.close(fd)
                os.unlink(new)  # what it has is what the disk lacks
                self._fd, self._nbytes, self._places, self._missing, self._sizes = before

    def _sync_now_and_then(self) -> None:
        synced = -1
        while not self._over.wait(self._sync_s):
            with self._swap:
                if self._fd >= 0 and synced != self._nbytes:
                    synced = self._nbytes
                    try:
                        os.fsync(self._fd)
                    except OSError as error:
                        self._tell(error)

    def close(self) -> None:
        """Let go of the file, which stays."""
        self._over.set()
        with self._swap:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
        self._lock.close()


def _split(origins: bytes) -> list[Origin]:
    return [origins[at : at + ORIGIN_BYTES] for at in range(0, len(origins), ORIGIN_BYTES)]


def _origins_of(payload: bytes | memoryview) -> list[Origin]:
    """Return the records of a block, in order."""
    return _split(_core.check_block(payload, bytes(_core.MAX_SPLITS))[0])
