"""The process on the trainer's node that sends versions of weights to the mirrors.

Invariants:

- The process is an ordinary reader of the trainer's pool: it leases the newest version, and an
  older version only until a mirror holds it whole, or every mirror stopped.
- Waiting peers get copies: a stuck peer holds no slot.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from shmbus import errors
from shmbus.data.encoding import decodable
from shmbus.pool import PoolReader, VersionLease
from shmbus.pool.pool_status import ARRIVED_CODE, RESTARTED_CODE
from shmbus.relay.distribution import PIECE_BYTES, SILENT_S, Distribution, Hop, count_pieces
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
from shmbus.relay.mirror_party import POOL_KIND, digest_of
from shmbus.relay.party import Mailbox
from shmbus_ext import _core

_log = logging.getLogger("shmbus.relay")

#: Seconds between two looks for a version.
_LOOK_S: Final = 0.02
#: Seconds between two checks of the pool's name.
_NAME_S: Final = 1.0
#: Of several publications between two looks, only the newest is taken.
_NOW_S: Final = 0.0


@decodable
class _Where(msgspec.Struct):
    """The part of a version's text with the place of its bytes."""

    memory: str = "slot"


class _Version:
    """The newest version, or an older version still in transfer."""

    def __init__(self, pool: str, lease: VersionLease, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self.lease: VersionLease | None = lease
        self.whole = Transfer(pool, lease.sequence, 0)
        self.version, self.size, self.text = lease.version, lease.size, lease.text
        self.digests, self.meta = lease.digests > 0, lease.meta()
        exported = _core.pool_patch_bytes(lease.buffer)
        base, self.patch = exported or (0, b"")
        if not 0 < len(self.patch) < self.size:
            base, self.patch = 0, b""
        self.patched = self.whole._replace(base=base)
        self._patch_digest: int | None = None
        self._crcs: dict[Transfer, dict[int, int]] = {}

    def nbytes(self, transfer: Transfer) -> int:
        return len(self.patch) if transfer.base else self.size

    def pieces(self, transfer: Transfer) -> int:
        return count_pieces(self.nbytes(transfer), self._piece_bytes)

    def has(self, transfer: Transfer) -> bool:
        if transfer == self.whole:
            return self.lease is not None
        return transfer == self.patched and bool(self.patch)

    def piece(self, transfer: Transfer, index: int) -> tuple[VersionPiece, bytes]:
        """Return a piece, and the last one with the digest."""
        payload = self._bytes(transfer, index)
        crc = self._crcs.setdefault(transfer, {}).setdefault(index, _core.crc32c(payload))
        digest = None
        if index == self.pieces(transfer) - 1:
            digest = self._digest(transfer)
        return VersionPiece(transfer, index, crc, digest), payload

    def _bytes(self, transfer: Transfer, index: int) -> bytes:
        assert transfer.base or self.lease is not None
        held = memoryview(self.patch)
        if not transfer.base and self.lease is not None:
            held = memoryview(self.lease.buffer)
        return bytes(held[index * self._piece_bytes : (index + 1) * self._piece_bytes])

    def _digest(self, transfer: Transfer) -> int:
        if transfer.base:
            return self._digest_of_patch()
        crcs = self._crcs[transfer]
        pieces = range(self.pieces(transfer))
        for index in pieces:
            if index not in crcs:
                crcs[index] = _core.crc32c(self._bytes(transfer, index))
        return digest_of([crcs[index] for index in pieces])

    def _digest_of_patch(self) -> int:
        if self._patch_digest is None:
            assert self.lease is not None, "it is computed before the lease is let go"
            found = _core.pool_patch_crc(self.patch, self.lease.buffer)
            assert found is not None, "the core made it"
            self._patch_digest = found
        return self._patch_digest

    def let_go(self) -> None:
        if self.lease is not None:
            if self.patch:
                self._digest_of_patch()
            self.lease.close()
            self.lease = None


class RemoteRows:
    """Rows of the trainer's pool for readers of other nodes' pools."""

    def __init__(self, bus: str) -> None:
        self._bus = bus
        #: By mirror, label, and number among the mirror's readers of that label.
        self._rows: dict[tuple[str, str, int], PoolReader] = {}
        self._is_full = False

    def hear(self, state: MirrorState, pool: str) -> None:
        """Write a mirror's living readers, and leave other mirrors' rows."""
        living: dict[tuple[str, int], EngineRow] = {}
        of_label: Counter[str] = Counter()
        for row in state.engines:
            if row.alive:
                living[row.label, of_label[row.label]] = row
                of_label[row.label] += 1
        self.forget({state.address}, but=living)
        for (label, number), row in living.items():
            try:
                reader = self._row(state.address, label, number)
            except errors.ShmbusError as error:  # no free row, or the pool is being removed
                if not self._is_full:
                    _log.warning("relay: %s of %s is not shown: %s", label, state.bus, error)
                self._is_full = True
                return
            ours = state.pool == pool  # otherwise the sequences count in an earlier pool
            reader.pool.applied(row.sequence if ours else 0, row.version or 0)
            refused = (row.refuses if ours else 0, row.refused or 0, row.code, row.error)
            lacks = row.code in (0, RESTARTED_CODE) and not row.holds
            if ours and lacks and row.sequence != state.sequence:
                said = "it has come to its node, and is not loaded"
                refused = (state.sequence, state.version or 0, ARRIVED_CODE, said)
            reader.pool.refused(*refused)
        self._is_full = False

    def _row(self, mirror: str, label: str, number: int) -> PoolReader:
        if (mirror, label, number) not in self._rows:
            self._rows[mirror, label, number] = PoolReader(self._bus, POOL_KIND, label=label)
        return self._rows[mirror, label, number]

    def forget(self, mirrors: Collection[str], but: Collection[tuple[str, int]] = ()) -> None:
        """Give up the rows of these mirrors' readers."""
        for key in [key for key in self._rows if key[0] in mirrors and key[1:] not in but]:
            self._rows.pop(key).close()


class WeightsParty:
    """A pool of weights, and its mirrors on other nodes."""

    def __init__(
        self, bus: str, mailbox: Mailbox, mirrors: Sequence[str], piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._piece_bytes = piece_bytes
        self._bus, self._mailbox = bus, mailbox
        self._reader = PoolReader(bus, POOL_KIND, label="relay")
        self._pool = "{}.{}".format(*self._reader.identity)
        self.pure = Distribution(mailbox.address, mirrors, piece_bytes)
        self._versions: dict[int, _Version] = {}
        self._newest: _Version | None = None
        self._seen = 0
        self.error = ""
        self._mirrors = set(mirrors)
        #: Written by another thread: mirrors to take on, and mirrors to forget.
        self.joined: list[str] = []
        self.forgotten: list[str] = []
        self._next_name_s = 0.0
        self._said_applied = 0
        self._rows = RemoteRows(bus)
        pool = self._reader.pool
        self._geometry = (
            pool.slot_bytes, pool.max_slots, pool.meta_bytes, pool.block_bytes, pool.patch_bytes
        )  # fmt: skip

    # -- messages --------------------------------------------------------------------------------

    def take(self, envelope: Envelope) -> None:
        """Act on a message."""
        match envelope.message:
            case MirrorState() as state if envelope.sender == state.address in self._mirrors:
                self.pure.hear(state, time.monotonic())
                self._rows.hear(state, self._pool)
            case PiecesWanted() as wanted:
                self._send_pieces(envelope.sender, wanted)
            case _:
                pass

    def _send_pieces(self, asker: str, wanted: PiecesWanted) -> None:
        found = self._versions.get(wanted.transfer.sequence)
        if found is None or not found.has(wanted.transfer):
            self._mailbox.send(asker, PiecesGone(wanted.transfer))
            return
        pieces = found.pieces(wanted.transfer)
        for index in wanted.pieces:
            if index < pieces:
                self._mailbox.send(asker, *found.piece(wanted.transfer, index))

    def _offer(self, hop: Hop) -> None:
        found = self._versions.get(hop.transfer.sequence)
        if found is None:
            return
        slot_bytes, max_slots, meta_bytes, block_bytes, patch_bytes = self._geometry
        # A mirror writes while its readers use the version before: at least two slots.
        geometry = PoolGeometry(
            _core.POOL_LAYOUT_VERSION, slot_bytes, min(2, max_slots), max_slots, meta_bytes,
            block_bytes, patch_bytes,
        )  # fmt: skip
        offer = VersionOffer(
            hop.transfer, hop.upstream, found.nbytes(hop.transfer), self._piece_bytes,
            found.version, found.size, found.digests, found.text, geometry,
        )  # fmt: skip
        self._mailbox.send(hop.mirror, offer, found.meta)

    # -- time ------------------------------------------------------------------------------------

    def round(self) -> float:
        """Do timed work, and return the seconds until the next call."""
        now_s = time.monotonic()
        while self.joined:
            self._mirrors.add(self.joined[-1])
            self.pure.join(self.joined.pop())
        while self.forgotten:
            self._mirrors.discard(self.forgotten[-1])
            self._rows.forget(self.forgotten[-1:])
            self.pure.forget(self.forgotten.pop())
        if self._reader.newest > self._seen:
            self._look(now_s)
        if now_s >= self._next_name_s:
            self._next_name_s = now_s + _NAME_S
            if self._reader.is_removed():
                raise errors.BusRemovedError(
                    f"pool {POOL_KIND!r} of bus {self._bus!r} was removed: its mirrors keep their "
                    "versions, and get the next publication"
                )
        self._let_go(now_s)
        for hop in self.pure.round(now_s):
            self._offer(hop)
        self._note_applied(now_s)
        self._rows.forget({at for at, _, s in self.pure.seen(now_s) if s > SILENT_S})
        return _LOOK_S

    def _look(self, now_s: float) -> None:
        try:
            lease = self._reader.latest(after=self._seen, timeout=_NOW_S)
        except errors.WaitTimeoutError:
            return
        except errors.DamagedError as error:
            self._seen = self._reader.newest
            self._refuse(str(error))
            return
        self._seen = lease.sequence
        try:
            found = _Version(self._pool, lease, self._piece_bytes)
        except errors.DamagedError as error:
            lease.close()
            self._refuse(str(error))
            return
        if _where(found.meta) != "slot":
            found.let_go()
            self._refuse(
                f"version {found.version} of bus {self._bus!r} lies in a device's memory, which no "
                "other node reads: publish with the carrier 'shm' where a relay carries weights"
            )
            return
        self.error = ""
        self._versions[found.whole.sequence] = self._newest = found
        self.pure.publish(found.whole, found.size, found.patched.base, len(found.patch), now_s)

    def _refuse(self, why: str) -> None:
        self.error = why
        _log.error("relay: %s; mirrors keep the version before", why)

    def _let_go(self, now_s: float) -> None:
        """Return the slots of versions without further transfers to the publisher."""
        for sequence, version in list(self._versions.items()):
            if version is self._newest:
                continue
            if version.lease is not None and not self.pure.keeps(version.whole, now_s):
                version.let_go()
                self.pure.let_go(version.whole)
            if version.lease is None and not self.pure.keeps(version.patched, now_s):
                self.pure.let_go(version.patched)
                del self._versions[sequence]

    def _note_applied(self, now_s: float) -> None:
        """Write in the pool's own row the version held by every mirror."""
        newest = self._newest
        if newest is None or newest.lease is None or self._said_applied == newest.whole.sequence:
            return
        if self.pure.everybody_has_it(now_s):
            self._said_applied = newest.whole.sequence
            self._reader.applied(newest.lease)

    # -- seeing ----------------------------------------------------------------------------------

    def note(self) -> WeightsNote:
        """Return the note; from any thread."""
        newest, now_s = self._newest, time.monotonic()
        mirrors = [_note_of(*seen) for seen in self.pure.seen(now_s)]
        return WeightsNote(
            self._bus, None if newest is None else newest.version,
            0 if newest is None else newest.size, 0 if newest is None else len(newest.patch),
            self.error, mirrors,
        )  # fmt: skip

    def close(self) -> None:
        """Leave the pool."""
        for version in self._versions.values():
            if version.lease is not None:
                version.lease.close()
        self._rows.forget(self._mirrors)
        self._reader.close()


def _where(meta: bytes) -> str:
    try:
        return msgspec.msgpack.decode(meta, type=_Where).memory
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "slot"  # not weights: the bytes are the version


class EngineNote(msgspec.Struct, frozen=True):
    """A reader of a mirror's pool."""

    label: str
    alive: bool
    #: The version in use, and a refused newer version.
    version: int | None
    refused: int | None
    error: str


class MirrorNote(msgspec.Struct, frozen=True):
    """A mirror at an instant, by its last state."""

    address: str
    #: Seconds since the last state; None before the first.
    heard_s: float | None = None
    bus: str = ""
    version: int | None = None
    #: Pieces of the running transfer, and its upstream.
    pieces: int = 0
    upstream: str = ""
    error: str = ""
    damaged: int = 0
    engines: list[EngineNote] = []


def _note_of(address: str, state: MirrorState | None, heard_s: float) -> MirrorNote:
    if state is None:
        return MirrorNote(address)
    engines = [
        EngineNote(each.label, each.alive, each.version, each.refused, each.error)
        for each in state.engines
    ]
    return MirrorNote(
        address, heard_s, state.bus, state.version, state.pieces, state.upstream, state.error,
        state.damaged, engines,
    )  # fmt: skip


class WeightsNote(msgspec.Struct, frozen=True):
    """A pool of weights and its mirrors at an instant, for people."""

    bus: str
    version: int | None
    size: int
    #: Bytes of the patch; 0 for none.
    patch: int
    error: str
    mirrors: list[MirrorNote]
