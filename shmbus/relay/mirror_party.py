"""The process on a rollout node that keeps a weight pool equal to the trainer's.

Invariants:

- A version is published whole or not at all, after a comparison of every byte with the bytes sent
  by the trainer's node; readers of the pool need nothing from this process.
- The mirror publishes only into a pool without another publisher, with room for the version.
- The mirror gets a single transfer at a time, and takes each piece once. Missing pieces are asked
  for again, from the current upstream.
- Errors here are reported to the trainer's node, and hinder no other node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from shmbus import errors
from shmbus.inspect import leftovers
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, VersionLease, VersionWrite, copy_bytes
from shmbus.pool.pool_file import open_pool, pool_path, sizes_of, unlink_pool
from shmbus.pool.pool_status import ReaderStatus, status_of_pool
from shmbus.pool.slot_publisher import shortages
from shmbus.relay.distribution import count_pieces
from shmbus.relay.messages import (
    EngineRow,
    Envelope,
    MirrorState,
    PiecesGone,
    PiecesWanted,
    PoolGeometry,
    Transfer,
    VersionOffer,
    VersionPiece,
)
from shmbus.relay.party import Mailbox
from shmbus.segment.own_file import open_own
from shmbus_ext import _core

#: Pieces under way to a mirror: enough to fill a fast network, and few beside a version.
WINDOW: Final = 8
#: Seconds without any piece until the pieces under way count as lost.
ASK_AGAIN_S: Final = 0.5
#: Remembered askers, at most.
_MOST_WAITING: Final = 64


class Outgoing(NamedTuple):
    """A piece to forward."""

    to: str
    number: int


class Mirror:
    """Pieces held, pieces under way, and waiting downstream mirrors."""

    def __init__(self) -> None:
        self.getting: Transfer | None = None
        self.upstream = ""
        self.pieces = 0
        self.count = 0
        self._has = bytearray()
        self._asked: dict[int, None] = {}
        self._next = 0
        self._came_s = 0.0
        #: By address: the downstream mirror's transfer, and the pieces awaited.
        self._waiting: dict[str, tuple[Transfer, dict[int, None]]] = {}

    @property
    def is_whole(self) -> bool:
        """True if every piece of the running transfer arrived."""
        return self.getting is not None and self.count == self.pieces

    def begin(self, transfer: Transfer, pieces: int) -> None:
        """Begin a transfer of `pieces` pieces, and forget the last one's."""
        self.getting, self.pieces = transfer, pieces
        self._has = bytearray(self.pieces)
        self._asked, self._next, self.count, self.upstream = {}, 0, 0, ""

    def end(self) -> None:
        """Get nothing."""
        self.getting, self.upstream, self._asked = None, "", {}
        self.pieces = self.count = self._next = 0

    def attach(self, upstream: str, now_s: float) -> list[PiecesWanted]:
        """Get the missing pieces from `upstream`, including pieces under way from elsewhere."""
        self.upstream, self._came_s = upstream, now_s
        return self._again()

    def _again(self) -> list[PiecesWanted]:
        said = self._say(self._asked)
        return said + self.ask()

    def _say(self, pieces: Iterable[int]) -> list[PiecesWanted]:
        wanted = tuple(pieces)
        return [PiecesWanted(self.getting, wanted)] if wanted and self.getting is not None else []

    def ask(self) -> list[PiecesWanted]:
        """Ask for the next pieces, if few are under way."""
        if self.getting is None or not self.upstream or len(self._asked) > WINDOW // 2:
            return []
        new = []
        while self._next < self.pieces and len(self._asked) < WINDOW:
            if not self._has[self._next]:
                self._asked[self._next] = None
                new.append(self._next)
            self._next += 1
        return self._say(new)

    def lacks(self, transfer: Transfer, index: int) -> bool:
        """Return True if a received piece is wanted."""
        return transfer == self.getting and index < self.pieces and not self._has[index]

    def take(self, index: int, now_s: float) -> list[Outgoing]:
        """Note a checked piece; return its forwards."""
        assert self.getting is not None
        self._has[index] = 1
        self.count += 1
        self._asked.pop(index, None)
        self._came_s = now_s
        going = []
        for address, (transfer, pieces) in self._waiting.items():
            if transfer == self.getting and index in pieces:
                del pieces[index]
                going.append(Outgoing(address, index))
        return going

    def round(self, now_s: float) -> list[PiecesWanted]:
        """Ask again after a while without pieces."""
        if not self._asked or now_s - self._came_s < ASK_AGAIN_S:
            return []
        self._came_s = now_s
        return self._again()

    def asked(self, asker: str, wanted: PiecesWanted) -> None:
        """Note a downstream mirror's wanted pieces, for `due` and `take` to forward."""
        before = self._waiting.pop(asker, None)
        waits = before[1] if before is not None and before[0] == wanted.transfer else {}
        waits.update(dict.fromkeys(wanted.pieces[: 2 * WINDOW]))
        while len(waits) > 2 * WINDOW:
            del waits[next(iter(waits))]
        self._waiting[asker] = (wanted.transfer, waits)
        while len(self._waiting) > _MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def due(self, asker: str, done: Transfer | None, done_pieces: int) -> list[int]:
        """Return and forget the awaited pieces already here."""
        transfer, pieces = self._waiting.get(asker, (None, {}))
        if transfer is None:
            return []
        if transfer == done:
            found = [each for each in pieces if each < done_pieces]
        elif transfer == self.getting:
            found = [each for each in pieces if each < self.pieces and self._has[each]]
        else:
            found = []
        for each in found:
            del pieces[each]
        return found

    def transfer_of(self, asker: str) -> Transfer | None:
        """Return a downstream mirror's transfer."""
        return self._waiting.get(asker, (None, {}))[0]


_log = logging.getLogger("shmbus.relay")

#: The pool of a bus with weights.
POOL_KIND: Final = "weights"
#: In a mirror's rows of its pool.
_LABEL: Final = "relay's mirror"
#: Seconds between hellos, between progress reports, and between two looks for a slot.
_HELLO_S: Final = 1.0
_PROGRESS_S: Final = 0.05
_SLOT_S: Final = 0.1
#: Seconds with every slot held by readers until a report: readers hold slots while they load.
_HELD_S: Final = 5.0
#: Of a transfer: 4 TiB in pieces of the usual size.
_MOST_PIECES: Final = 1 << 20
#: Publications with known trainer sequences, and readers reported, at most.
_MOST_PLACES: Final = 64
_MOST_ENGINES: Final = 128


def digest_of(crcs: Sequence[int]) -> int:
    """Return the digest of a whole version by the checksums of its pieces."""
    return _core.crc32c(struct.pack(f"<{len(crcs)}I", *crcs))


class _Done(NamedTuple):
    """A finished transfer, for forwarding: a lease's bytes, or a patch's."""

    transfer: Transfer
    crcs: list[int]
    digest: int
    source: VersionLease | bytearray
    piece_bytes: int

    def bytes_of(self, index: int) -> bytes:
        held = self.source
        whole = memoryview(held.buffer if isinstance(held, VersionLease) else held)
        return bytes(whole[index * self.piece_bytes : (index + 1) * self.piece_bytes])


class _Incoming:
    """An incoming transfer: into a slot, or a patch into private memory."""

    def __init__(self, offer: VersionOffer, meta: bytes) -> None:
        self.offer, self.meta = offer, meta
        self.is_patch = offer.transfer.base != 0
        self.write: VersionWrite | None = None
        self.room = bytearray(offer.nbytes) if self.is_patch else bytearray()
        self.crcs = [0] * count_pieces(offer.nbytes, offer.piece_bytes)
        self.digest: int | None = None
        #: The time of the next look for a slot, while every slot is held.
        self.next_s = 0.0
        self.begun_s = time.monotonic()

    def view(self, index: int) -> memoryview:
        whole = memoryview(self.room)
        if not self.is_patch:
            assert self.write is not None
            whole = memoryview(self.write.buffer)
        first, each = index * self.offer.piece_bytes, self.offer.piece_bytes
        return whole[first : min(self.offer.nbytes, first + each)]


class MirrorParty:
    """A mirror with a pool."""

    def __init__(self, bus: str, mailbox: Mailbox, source: str) -> None:
        self._bus, self._mailbox, self._source = bus, mailbox, source
        self.pure = Mirror()
        self._publisher: PoolPublisher | None = None
        self._reader: PoolReader | None = None
        self._pool = ""
        self._incoming: _Incoming | None = None
        self._done: _Done | None = None
        self.sequence = 0
        self.version: int | None = None
        self.error = ""
        self.damaged = 0
        self._next_hello_s = self._next_progress_s = self._next_look_s = 0.0
        self._engines: tuple[EngineRow, ...] = ()
        #: By sequence in this node's pool: the version, and its sequence at the trainer.
        self._places: dict[int, tuple[int, int]] = {}
        self._said: tuple[object, ...] = ()

    # -- reports ---------------------------------------------------------------------------------

    def _say(self, now_s: float) -> None:
        self._next_progress_s = now_s + _PROGRESS_S
        self._next_hello_s = now_s + _HELLO_S
        self._said = self._key()
        self._mailbox.send(self._source, self.state())

    def _key(self) -> tuple[object, ...]:
        pure = self.pure
        return (
            pure.getting, pure.count, self.sequence, self.error, pure.upstream, self._engines
        )  # fmt: skip

    def state(self) -> MirrorState:
        """Return the mirror's version, transfer and readers."""
        pure, done = self.pure, self._done
        return MirrorState(
            self._mailbox.address, self._bus, self._pool, self.sequence, self.version,
            None if done is None else done.transfer, pure.getting, pure.upstream, pure.count,
            self.error, self.damaged, self._engines,
        )  # fmt: skip

    def _look_at_engines(self) -> tuple[EngineRow, ...]:
        if self._reader is None:
            return ()
        own = self._reader.pool.reader
        rows = status_of_pool(self._bus, POOL_KIND, self._reader.pool).readers
        return tuple(self._told(row) for row in rows if row.reader != own)[:_MOST_ENGINES]

    def _told(self, row: ReaderStatus) -> EngineRow:
        _, sequence = self._places.get(row.applied_sequence or 0, (0, 0))
        refused = [at for version, at in self._places.values() if version == row.refused_version]
        return EngineRow(
            row.label, row.state == "alive", row.applied_version, row.refused_version, row.error,
            sequence, max(refused, default=0), row.error_code, bool(row.holds),
        )  # fmt: skip

    def note(self) -> dict[str, Any]:
        """Return the mirror's note; from any thread."""
        return {"version": self.version, "error": self.error, "damaged": self.damaged}

    def _tell(self, error: Exception) -> None:
        text = str(error)
        if text != self.error:
            self.error = text
            _log.warning("relay: no weights for bus %r: %s; it is tried again", self._bus, text)

    # -- messages --------------------------------------------------------------------------------

    def take(self, envelope: Envelope) -> None:
        """Act on a message."""
        now_s = time.monotonic()
        match envelope.message:
            case VersionOffer() as offer if envelope.sender == self._source:
                self._offered(offer, bytes(envelope.payload), now_s)
            case VersionPiece() as piece:
                self._came(piece, envelope, now_s)
            case PiecesWanted() as wanted:
                self.pure.asked(envelope.sender, wanted)
                self._hand_on(envelope.sender)
            case PiecesGone() as gone if gone.transfer == self.pure.getting:
                if envelope.sender == self._source == self.pure.upstream:
                    self._give_up("the version has gone")
            case _:
                pass

    def _offered(self, offer: VersionOffer, meta: bytes, now_s: float) -> None:
        base = (offer.transfer.pool, offer.transfer.base)
        if offer.transfer.base and base != (self._pool, self.sequence):
            self._say(now_s)  # an offer for an older base
            return
        if offer.transfer != self.pure.getting:
            self._give_up("another version is offered")
            try:
                _check_offer(offer, len(meta))
                self._attach(offer)
            except (errors.ShmbusError, OSError, ValueError) as error:
                if isinstance(error, errors.BusRemovedError):
                    raise
                self._tell(error)
                self._say(now_s)
                return
            self._incoming = _Incoming(offer, meta)
            self.pure.begin(offer.transfer, len(self._incoming.crcs))
        self.pure.attach("", now_s)
        assert self._incoming is not None
        self._incoming.offer = offer
        self._start(now_s)

    def _start(self, now_s: float) -> None:
        """Ask for pieces, once a slot or buffer is ready."""
        incoming = self._incoming
        assert incoming is not None
        if not incoming.is_patch and incoming.write is None and not self._find_slot(now_s):
            return
        for message in self.pure.attach(incoming.offer.upstream, now_s):
            self._mailbox.send(incoming.offer.upstream, message)
        self._say(now_s)

    def _find_slot(self, now_s: float) -> bool:
        """Begin to write the version; return False if every slot is held or lacks memory."""
        incoming, publisher = self._incoming, self._publisher
        assert incoming is not None and publisher is not None
        offer = incoming.offer
        try:
            incoming.write = publisher.begin(
                offer.version, offer.size, meta=incoming.meta, text=offer.text,
                patch=incoming.is_patch,
            )  # fmt: skip
        except (errors.WaitTimeoutError, errors.CapacityError) as error:
            incoming.next_s = now_s + _SLOT_S
            if self._done is not None and isinstance(self._done.source, VersionLease):
                self._done = None  # it may hold the slot
                incoming.next_s = now_s
            elif now_s - incoming.begun_s > _HELD_S:
                self._tell(error)
            return False
        self.error = ""
        return True

    def _came(self, piece: VersionPiece, envelope: Envelope, now_s: float) -> None:
        incoming, payload = self._incoming, envelope.payload
        if incoming is None or not self.pure.lacks(piece.transfer, piece.number):
            return
        if not incoming.is_patch and incoming.write is None:
            return
        place = incoming.view(piece.number)
        good = len(payload) == len(place)
        if good:
            copy_bytes(place, payload)
            good = _core.crc32c(place) == piece.crc
        del place
        if not good:
            self.damaged += 1
            _log.warning(
                "relay: piece %d of version %d from %s is not what was sent (%d bytes): it is "
                "asked for again", piece.number, incoming.offer.version, envelope.sender,
                len(payload),
            )  # fmt: skip
            return
        incoming.crcs[piece.number] = piece.crc
        if piece.digest is not None:
            incoming.digest = piece.digest
        for address, index in self.pure.take(piece.number, now_s):
            self._mailbox.send(address, self._piece(incoming, index), payload)
        self._ask()
        if self.pure.is_whole:
            self._finish(now_s)

    def _ask(self) -> None:
        for message in self.pure.ask():
            self._mailbox.send(self.pure.upstream, message)

    def _piece(self, of: _Incoming | _Done, index: int) -> VersionPiece:
        transfer = of.transfer if isinstance(of, _Done) else of.offer.transfer
        last = index == len(of.crcs) - 1
        return VersionPiece(transfer, index, of.crcs[index], of.digest if last else None)

    def _hand_on(self, asker: str) -> None:
        """Send the awaited pieces already here."""
        done, incoming = self._done, self._incoming
        transfer = None if done is None else done.transfer
        waits_for = self.pure.transfer_of(asker)
        for index in self.pure.due(asker, transfer, 0 if done is None else len(done.crcs)):
            if done is not None and waits_for == transfer:
                self._mailbox.send(asker, self._piece(done, index), done.bytes_of(index))
            elif incoming is not None:
                there = bytes(incoming.view(index))
                self._mailbox.send(asker, self._piece(incoming, index), there)

    # -- the pool --------------------------------------------------------------------------------

    def _attach(self, offer: VersionOffer) -> None:
        """Become the publisher of a large enough pool."""
        geometry = offer.geometry
        spec = _spec_of(geometry)
        if self._publisher is not None and shortages(self._publisher.pool, sizes_of(spec)):
            # The trainer replaced its pool with a larger pool of the same name.
            self._leave(remove=True)
        if self._publisher is None:
            _remove_unfinished(self._bus)
            _remove_outgrown(self._bus, spec)
            publisher = PoolPublisher(
                self._bus, POOL_KIND, spec=spec, label=_LABEL, when_held="grow", timeout=0.0
            )
            try:
                self._reader = PoolReader(self._bus, POOL_KIND, label=_LABEL)
            except BaseException:
                publisher.close()
                raise
            self._publisher = publisher
        self.error = ""

    def _finish(self, now_s: float) -> None:
        """Publish the transfer after a check of its digest."""
        incoming = self._incoming
        assert incoming is not None
        if incoming.is_patch:
            if incoming.write is None and not self._find_slot(now_s):
                return
            assert incoming.write is not None
            pool, room = incoming.write.buffer, incoming.room
            good = _core.pool_patch_take(pool, room)
            good = good and _core.pool_patch_crc(room, pool) == incoming.digest
        else:
            assert incoming.write is not None
            good = digest_of(incoming.crcs) == incoming.digest
        if not good:
            self._refuse(incoming, now_s)
            return
        write, offer = incoming.write, incoming.offer
        incoming.write = None
        self._done = None
        write.finish(digests=offer.digests)
        self._published(incoming, now_s)

    def _refuse(self, incoming: _Incoming, now_s: float) -> None:
        self.damaged += 1
        _log.warning(
            "relay: version %d for bus %r is not what the trainer's node has, after all of its %s "
            "came; nothing of it is published, and the whole of it is asked for",
            incoming.offer.version, self._bus, "patch" if incoming.is_patch else "pieces",
        )  # fmt: skip
        # The base differed from the expected base: a whole version needs no base.
        self._pool, self.sequence = "", 0
        self._give_up("it is not what was sent")
        self._say(now_s)

    def _published(self, incoming: _Incoming, now_s: float) -> None:
        assert self._reader is not None
        offer = incoming.offer
        lease = self._reader.latest(timeout=0.0)
        self._reader.applied(lease)
        source = incoming.room if incoming.is_patch else lease
        assert incoming.digest is not None
        self._done = _Done(
            offer.transfer, incoming.crcs, incoming.digest, source, offer.piece_bytes
        )
        if offer.transfer.pool != self._pool:
            self._places.clear()  # sequences count anew
        self._pool, self.sequence = offer.transfer.pool, offer.transfer.sequence
        self._places[lease.sequence] = (offer.version, self.sequence)
        self._places.pop(next(iter(self._places)) if len(self._places) > _MOST_PLACES else 0, None)
        self.version = offer.version
        self._incoming = None
        self.pure.end()
        self._say(now_s)

    def _give_up(self, why: str) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None and incoming.write is not None:
            incoming.write.give_up(why)
        self.pure.end()

    # -- time ------------------------------------------------------------------------------------

    def round(self) -> float:
        """Do timed work, and return the seconds until the next call."""
        now_s = time.monotonic()
        incoming = self._incoming
        if incoming is not None and incoming.write is None and now_s >= incoming.next_s:
            if self.pure.is_whole:
                self._finish(now_s)
            elif not incoming.is_patch:
                self._start(now_s)
        for message in self.pure.round(now_s):
            self._mailbox.send(self.pure.upstream, message)
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _PROGRESS_S
            self._engines = self._look_at_engines()
        if now_s >= self._next_hello_s:
            if self._reader is not None and self._reader.is_removed():
                raise errors.BusRemovedError(
                    f"pool {POOL_KIND!r} of bus {self._bus!r} was removed: a mirror makes it again"
                )
            self._say(now_s)
        elif self._key() != self._said and now_s >= self._next_progress_s:
            self._say(now_s)
        return _PROGRESS_S

    def _leave(self, *, remove: bool = False) -> None:
        self._give_up("its mirror ends")
        self._done = None
        self._pool, self.sequence, self.version = "", 0, None
        if self._reader is not None:
            self._reader.close()
        if self._publisher is not None:
            self._publisher.close(remove=remove)
        self._reader = self._publisher = None
        self._engines = ()
        self._places.clear()

    def close(self) -> None:
        """Leave the pool, with its newest version, to its readers."""
        self._leave()


def _remove_unfinished(bus: str) -> None:
    """Remove a pool after its creator died before the last allocation."""
    path = pool_path(bus, POOL_KIND)
    try:
        with os.fdopen(open_own(path, os.O_RDONLY, f"the pool of bus {bus!r}"), "rb") as file:
            begun = file.read(8) == bytes(8)  # the magic comes last
    except (OSError, errors.LayoutMismatchError):
        return
    for found in leftovers.of_bus(bus) if begun else ():
        if found.path == path and leftovers.may_go(found, force=False):
            leftovers.remove(found)


def _remove_outgrown(bus: str, spec: PoolSpec) -> None:
    """Remove a too small pool without a publisher; its readers find the next pool."""
    try:
        pool = open_pool(bus, POOL_KIND, wait_s=0.0)
    except (errors.ShmbusError, OSError):
        return
    with contextlib.closing(pool):
        if not shortages(pool, sizes_of(spec)):
            return
        ranks = status_of_pool(bus, POOL_KIND, pool).ranks
    if not any(each.state == "alive" for each in ranks):
        with contextlib.suppress(errors.BusNotFoundError):
            unlink_pool(bus, POOL_KIND)


def _spec_of(geometry: PoolGeometry) -> PoolSpec:
    return PoolSpec(
        slot_bytes=geometry.slot_bytes, slots=geometry.slots, max_slots=geometry.max_slots,
        meta_bytes=geometry.meta_bytes, block_bytes=geometry.block_bytes,
        patch_bytes=geometry.patch_bytes,
    )  # fmt: skip


def _check_offer(offer: VersionOffer, meta_bytes: int) -> None:
    """Refuse an offer of another layout, or with inconsistent sizes."""
    geometry = offer.geometry
    if geometry.layout != _core.POOL_LAYOUT_VERSION:
        raise errors.LayoutMismatchError(
            f"the trainer's pool has layout version {geometry.layout}, this node needs "
            f"{_core.POOL_LAYOUT_VERSION}: install the same shmbus on both nodes"
        )
    most = geometry.patch_bytes if offer.transfer.base else geometry.slot_bytes
    whole = offer.transfer.base != 0 or offer.nbytes == offer.size
    if not whole or offer.nbytes > most or offer.size > geometry.slot_bytes:
        raise errors.ProtocolError(
            f"version {offer.version} of {offer.size} bytes goes over as {offer.nbytes}; expected "
            f"at most {most} and slots of {geometry.slot_bytes}: nothing was asked for"
        )
    if offer.nbytes > _MOST_PIECES * offer.piece_bytes:
        raise errors.ProtocolError(
            f"version {offer.version} goes over as {offer.nbytes} bytes in pieces of "
            f"{offer.piece_bytes}; expected at most {_MOST_PIECES} pieces: nothing was asked for"
        )
    if meta_bytes > geometry.meta_bytes:
        raise errors.ProtocolError(
            f"version {offer.version} says {meta_bytes} bytes of itself, expected at most "
            f"{geometry.meta_bytes}: nothing was asked for"
        )
