"""The kept file of a trainer's bus: records put on the bus, and the end of each record.

The file consists of frames with checksums: the bus and its life; labels of splits, then a block as
the network brought the block; a word a record for its end, then the records put from the block,
with missing samples.

Invariants:

- A record is written before the put, and its end before its source may release the record.
- An end overwrites a word on the disk: a full disk cannot lose an end.
- Records never return to a living bus.
- A damaged frame costs its own records. The log tells of the damage.
- Ended records take at most as much as live records: a shorter file replaces a longer file.
- A full disk stops nothing: the log tells of the error, and a later write tries again.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from shmbus import errors
from shmbus.data.encoding import decodable
from shmbus.relay.messages import ORIGIN_BYTES, Labels, MissingSample, Origin, name_origin
from shmbus.segment.locked_file import LockedFile
from shmbus.segment.own_file import open_own
from shmbus.store.directory import sync
from shmbus_ext import _core

_log = logging.getLogger("shmbus.relay")

#: Magic, kind, length and checksum of the body, followed by `_check_of` them.
_HEAD: Final = struct.Struct("<4sIQI")
_CHECK: Final = struct.Struct("<I")
_STEP: Final = _HEAD.size + _CHECK.size
_MAGIC: Final = b"SBK2"
_VERSION: Final = 2
_RUN, _BLOCK, _PUT, _ENDS, _SPLITS = range(5)
#: Word of a record: 0, and after the record's end the checksum of the origin and 1.
_WORD: Final = struct.Struct("<II")
#: Bytes of ended records in a file, beside twice the bytes of live records.
_SPARE_BYTES: Final = 256 << 20
#: Seconds between two tries of a failed write.
_AGAIN_S: Final = 1.0


@decodable
class _Run(msgspec.Struct, array_like=True):
    version: int
    bus: str
    #: Identity of the bus of the records in earlier frames.
    life: str


@decodable
class _Put(msgspec.Struct, array_like=True):
    origins: bytes
    missing: tuple[MissingSample, ...]


class Kept(NamedTuple):
    """A live record: block, place in the block, and the group's missing samples."""

    payload: memoryview
    place: int
    origin: Origin
    missing: tuple[MissingSample, ...]
    splits: Labels


class Keep:
    """The kept file of the bus with this `life`; BusBusyError if another process writes to it."""

    def __init__(
        self, directory: str, bus: str, sync_s: float, life: str = "", node: str = ""
    ) -> None:
        self._run, self._sync_s = _Run(_VERSION, bus, life), sync_s
        self._what = f"kept records of bus {bus!r}"
        self._path = Path(directory) / f"{bus}{node and '@' + node}.kept"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock, self._fd, self._nbytes = LockedFile(), -1, 0
        #: By origin: the places of the block's frame and of the record's word.
        self._places: dict[Origin, tuple[int, int]] = {}
        #: By block: samples reported missing; size in bytes, and labels of splits.
        self._missing: dict[int, tuple[MissingSample, ...]] = {}
        self._sizes: dict[int, tuple[int, Labels]] = {}
        #: Records with an end not yet on the disk.
        self.owed: set[Origin] = set()
        #: Life named by the file.
        self._life: str | None = None
        #: By kind of write, "put", "end" or "sync": the error, and when the next try is due.
        self._failed: dict[str, tuple[str, float]] = {}
        self._swap, self._over, self._writes = threading.Lock(), threading.Event(), 0
        try:
            if not self._lock.take(f"{self._path}.lock", self._what):
                raise errors.BusBusyError(
                    f"{self._path}: another relay keeps its records there; end that relay, or give "
                    "this relay another directory"
                )
            self._fd = open_own(str(self._path), os.O_RDWR | os.O_CREAT, self._what)
            self._read()
        except BaseException:
            self.close()
            raise
        if sync_s:
            threading.Thread(target=self._sync_now_and_then, daemon=True).start()

    @property
    def error(self) -> str:
        """Failed writes for people, and the count of ends not on the disk; empty without either."""
        why = [f"{self._path}: {text}" for text, _ in list(self._failed.values())]
        if self.owed:
            why.append(f"{len(self.owed)} ends are not on the disk, and their sources wait")
        return "; ".join(why)

    # -- reading ---------------------------------------------------------------------------------

    def _read(self) -> None:
        coming: dict[Origin, int] = {}
        #: By the next frame's place: labels of a block, and words of a put.
        splits: dict[int, Labels] = {}
        words: dict[int, tuple[int, memoryview]] = {}
        for at, kind, body in self._frames():
            end = at + _STEP + len(body)
            try:
                if kind == _RUN:
                    self._life = self._life_of(at, body)
                elif kind == _SPLITS:
                    splits[end] = msgspec.msgpack.decode(body, type=Labels)
                elif kind == _ENDS:
                    words[end] = at + _STEP, body
                elif kind == _BLOCK and at in splits:
                    coming.update(dict.fromkeys(_origins_of(body), at))
                    self._sizes[at] = len(body), splits[at]
                elif kind == _PUT and at in words:
                    self._read_put(msgspec.msgpack.decode(body, type=_Put), coming, *words[at])
                else:
                    raise ValueError("the frame before is missing")
            except (ValueError, msgspec.MsgspecError) as error:
                text = "relay: %s: the frame at byte %d is left out: %s"
                _log.error(text, self._path, at, error)
        os.ftruncate(self._fd, self._nbytes)
        if not self._nbytes:
            self.adopt()
            sync(self._path.parent)

    def _life_of(self, at: int, body: memoryview) -> str:
        run = msgspec.msgpack.decode(body, type=_Run)
        if (run.version, run.bus) != (_VERSION, self._run.bus):
            if at:
                raise ValueError(f"{run} belongs to another file")
            raise self._foreign(str(run))
        return run.life

    def _read_put(self, put: _Put, coming: dict[Origin, int], at: int, words: memoryview) -> None:
        origins = _split(put.origins)
        if len(put.origins) % ORIGIN_BYTES or len(words) != _WORD.size * len(origins):
            raise ValueError(f"{len(words)} bytes of words for {len(put.origins)} of origins")
        for origin, word in zip(origins, _WORD.iter_unpack(words), strict=True):
            if any(word):
                self._places.pop(origin, None)
                if word != _end_word(origin):
                    text = "relay: %s: the end of record %s is damaged; it is not brought back"
                    _log.error(text, self._path, name_origin(origin))
            elif origin in coming:
                self._note({origin: coming[origin]}, at, put.missing)
            at += _WORD.size

    def _frames(self) -> Iterator[tuple[int, int, memoryview]]:
        """Yield place, kind and body of whole frames."""
        held = self._map()
        view, at, lost = memoryview(held), 0, 0
        while at + _STEP <= len(view):
            magic, kind, nbytes, crc = _HEAD.unpack_from(view, at)
            (check,) = _CHECK.unpack_from(view, at + _HEAD.size)
            end = at + _STEP + nbytes
            good = check == _check_of(view[at : at + _HEAD.size], at) and magic == _MAGIC
            if not good or end > len(view):
                found = held.find(_MAGIC, at + 1)
                end = found if found >= 0 else len(view)
                lost, at = lost + end - at, end
                continue
            body = view[at + _STEP : end]
            if kind == _ENDS or crc == _core.crc32c(body):
                yield at, kind, body
            else:
                lost += nbytes
            self._nbytes = at = end
        if self._nbytes == 0 and len(view) >= _STEP and bytes(view[: len(_MAGIC)]) != _MAGIC:
            raise self._foreign("something else")
        lost += len(view) - at
        if lost:
            _log.error(
                "relay: %s: %d of %d bytes are cut or damaged, as by a loss of power; what was in "
                "them is not brought back", self._path, lost, len(view),
            )  # fmt: skip

    def _foreign(self, found: str) -> errors.LayoutMismatchError:
        return errors.LayoutMismatchError(
            f"{self._path}: expected version {_VERSION} of {self._what}, found {found}; give the "
            "relay another directory, or move the file away"
        )

    def _map(self) -> mmap.mmap | bytes:
        size = os.fstat(self._fd).st_size
        return mmap.mmap(self._fd, size, prot=mmap.PROT_READ) if size else b""

    def records(self, known: Collection[Origin]) -> Iterator[Kept]:
        """Yield live records of an earlier life of the bus, except `known` records."""
        return iter(()) if self._life == self._run.life else self._live(known)

    def _live(self, known: Collection[Origin]) -> Iterator[Kept]:
        held = memoryview(self._map())
        wanted = {origin: at for origin, (at, _) in self._places.items() if origin not in known}
        for at in sorted(set(wanted.values())):
            nbytes, splits = self._sizes[at]
            payload = held[at + _STEP : at + _STEP + nbytes]
            for place, origin in enumerate(_origins_of(payload)):
                if wanted.get(origin) == at:
                    yield Kept(payload, place, origin, self._missing.get(at, ()), splits)

    # -- writing ---------------------------------------------------------------------------------

    def adopt(self) -> bool:
        """Write a frame: every record of the file lies on the living bus."""
        if self._life != self._run.life and self._append([self._run_frame()]):
            self._life = self._run.life
        return self._life == self._run.life

    def _run_frame(self) -> tuple[int, bytes]:
        return _RUN, msgspec.msgpack.encode(self._run)

    def put(
        self,
        blocks: Iterable[tuple[bytes | memoryview, Labels]],
        origins: Collection[Origin],
        missing: tuple[MissingSample, ...],
    ) -> bool:
        """Keep records of these blocks before the put; False after a refusal of the disk."""
        frames = list[tuple[int, bytes | memoryview]]()
        if self._life != self._run.life:
            frames.append(self._run_frame())
        at = self._nbytes + sum(_STEP + len(body) for _, body in frames)
        places, sizes, of = dict[Origin, int](), dict[int, tuple[int, Labels]](), set(origins)
        for payload, splits in blocks:
            frames.append((_SPLITS, msgspec.msgpack.encode(splits)))
            at += _STEP + len(frames[-1][1])
            places.update(dict.fromkeys(of.intersection(_origins_of(payload)), at))
            frames.append((_BLOCK, payload))
            sizes[at] = len(payload), splits
            at += _STEP + len(payload)
        frames.append((_ENDS, bytes(_WORD.size * len(places))))
        frames.append((_PUT, msgspec.msgpack.encode(_Put(b"".join(places), missing))))
        if not self._append(frames):
            return False
        self._life = self._run.life
        self._sizes.update(sizes)
        self._note(places, at + _STEP, missing)
        return True

    def _note(
        self, blocks: dict[Origin, int], word: int, missing: tuple[MissingSample, ...]
    ) -> None:
        for origin, at in blocks.items():
            self._places[origin] = at, word
            word += _WORD.size
        if missing:
            self._missing.update(dict.fromkeys(blocks.values(), missing))

    def end(self, origins: Collection[Origin]) -> None:
        """Write ends of records; `owed` keeps ends refused by the disk."""
        self.owed |= self._places.keys() & origins
        if not self.owed or not self._is_due("end"):
            return
        words = sorted((self._places[origin][1], origin) for origin in self.owed)
        try:
            # Words of a put are neighbours: a system call writes a whole run.
            for _, run in groupby(enumerate(words), lambda each: each[1][0] - each[0] * _WORD.size):
                ((_, (at, first)), *more) = run
                said = [first, *(origin for _, (_, origin) in more)]
                self._write(at, b"".join(_WORD.pack(*_end_word(origin)) for origin in said))
            if not self._sync_s:
                os.fsync(self._fd)
        except OSError as error:
            self._tell("end", error)
            return
        self._failed.pop("end", None)
        for origin in self.owed:
            del self._places[origin]
        self.owed = set()

    def _append(self, frames: list[tuple[int, bytes | memoryview]]) -> bool:
        if not self._is_due("put"):
            return False
        at = self._nbytes
        try:
            for kind, body in frames:
                head = _HEAD.pack(_MAGIC, kind, len(body), _core.crc32c(body))
                self._write(at, head + _CHECK.pack(_check_of(head, at)))
                self._write(at + _STEP, body)
                at += _STEP + len(body)
            if not self._sync_s:
                os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._nbytes)
            self._tell("put", error)
            return False
        self._nbytes = at
        self._failed.pop("put", None)
        return True

    def _write(self, at: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while len(left):
            done = os.pwrite(self._fd, left, at)
            left, at = left[done:], at + done
        self._writes += 1

    def _is_due(self, kind: str) -> bool:
        return time.monotonic() >= self._failed.get(kind, ("", 0.0))[1]

    def _tell(self, kind: str, error: Exception) -> None:
        if kind not in self._failed:
            meanwhile = (
                "sources keep ended records" if kind == "end" else "new records are not kept"
            )
            text = "relay: %s: %s: until the next good write %s"
            _log.error(text, self._path, error, meanwhile)
        self._failed[kind] = str(error), time.monotonic() + _AGAIN_S

    def round(self) -> None:
        """Replace a file of mostly ended records by a shorter file."""
        if self._nbytes < _SPARE_BYTES or not self._is_due("put"):
            return
        blocks = {at for at, _ in self._places.values()}
        if self._nbytes < _SPARE_BYTES + 2 * sum(self._sizes[at][0] for at in blocks):
            return
        kept: dict[int, list[Kept]] = {}
        for record in self._live(self.owed):
            kept.setdefault(self._places[record.origin][0], []).append(record)
        before = (self._fd, self._nbytes, self._places, self._missing, self._sizes, self._life)
        new = f"{self._path}.new"
        try:
            fd = open_own(new, os.O_RDWR | os.O_CREAT, self._what)
            os.ftruncate(fd, 0)
        except (OSError, errors.LayoutMismatchError) as error:
            self._tell("put", error)
            return
        with self._swap:
            self._fd, self._nbytes, self._places, self._missing, self._sizes = fd, 0, {}, {}, {}
            self._life = None
            good = self.adopt()
            for records in kept.values():
                block = (records[0].payload, records[0].splits)
                origins = [record.origin for record in records]
                good = good and self.put([block], origins, records[0].missing)
            try:
                if good:
                    os.fsync(fd)
                    os.replace(new, self._path)
            except OSError as error:
                self._tell("put", error)
                good = False
            if good:
                os.close(before[0])
                sync(self._path.parent)
                self.owed = set()
            else:
                os.close(fd)
                os.unlink(new)  # frees room on the full disk
                self._fd, self._nbytes, self._places, self._missing, self._sizes = before[:5]
                self._life = before[5]

    def _sync_now_and_then(self) -> None:
        synced = -1
        while not self._over.wait(self._sync_s):
            with self._swap:
                if self._fd >= 0 and synced != self._writes:
                    synced = self._writes
                    try:
                        os.fsync(self._fd)
                        self._failed.pop("sync", None)
                    except OSError as error:
                        self._tell("sync", error)

    def close(self) -> None:
        """Close the file, and leave it on disk."""
        self._over.set()
        with self._swap:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
        self._lock.close()


def _check_of(head: bytes | memoryview, at: int) -> int:
    """Return the checksum of a head with its place; copied frames then count as data."""
    return _core.crc32c(bytes(head) + at.to_bytes(8, "little"))


def _end_word(origin: Origin) -> tuple[int, int]:
    return _core.crc32c(origin), 1


def _split(origins: bytes) -> list[Origin]:
    return [origins[at : at + ORIGIN_BYTES] for at in range(0, len(origins), ORIGIN_BYTES)]


def _origins_of(payload: bytes | memoryview) -> list[Origin]:
    return _split(_core.check_block(payload, bytes(_core.MAX_SPLITS))[0])
