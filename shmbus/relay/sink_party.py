"""The process beside a trainer's bus: fetches assignments, puts them, reports their ends.

Invariants:

- A block is checked, and compared with the request, before any put.
- No step waits for room: while the bus is full, messages are answered and other sources served.
- A record enters the journal before its put, and is settled there afterwards. An entry is freed
  after the source's release.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Final

from shmbus import Bus, Producer, errors
from shmbus.base.backoff import Backoff
from shmbus.base.ledger import REASONS
from shmbus.relay import messages
from shmbus.relay.keep import Keep, Kept
from shmbus.relay.messages import (
    ORIGIN_BYTES,
    Envelope,
    Message,
    MissingSample,
    Origin,
    bus_of,
    by_bus,
    name_origin,
)
from shmbus.relay.party import PARTY_BACKOFF_S, Mailbox
from shmbus.relay.prompt_lanes import HeldPrompt, TrainerLane
from shmbus.relay.prompts import PromptSender
from shmbus.relay.sink import BLOCK_BYTES, BLOCK_RECORDS, Batch, Journal, Sink
from shmbus.relay.splits import labels_of, number_of
from shmbus.segment import lifecycle
from shmbus_ext import _core

#: Bytes of an entry's number, as the core takes it.
ENTRY_BYTES: Final = 4
_NEW: Final = 0xFFFFFFFF


class BusJournal:
    """A bus's journal, for the sink's process."""

    def __init__(self, segment: _core.Segment, name: str) -> None:
        incarnation = _core.relay_begin(segment)
        if incarnation is None:
            raise errors.BusBusyError(
                f"bus {name!r}: another relay puts records onto it; a bus has one. `shmbus status "
                f"{name}` shows its process: stop it, or let it go on"
            )
        self.incarnation: int = incarnation
        self._segment = segment
        self._entries: dict[Origin, int] = {}
        self._origins: dict[int, Origin] = {}
        self._ended = -1
        settled, owed, ends = set(), [], set()
        for entry, origin, state, ended in _core.relay_notes(segment):
            self._entries[origin] = entry
            self._origins[entry] = origin
            if state == _core.RELAY_SETTLED:
                settled.add(origin)
                if ended >= 0:
                    ends.add((origin, REASONS[ended]))
            else:
                owed.append(origin)
        #: State left by earlier sinks.
        self.found = Journal(frozenset(settled), tuple(sorted(owed)), ended=frozenset(ends))
        self.term = _core.relay_words(segment)[4]
        self.capacity = _core.relay_words(segment)[0]

    def intend(self, writer: _core.Writer, origins: Sequence[Origin]) -> bytes | None:
        """Write the intent to put these records, in this order; return None without room."""
        given = _core.relay_intend(writer, b"".join(origins), self._pack(origins))
        if given is not None:
            self._enter(origins, given)
        return given

    def drop(self, origins: Sequence[Origin], reason: str) -> bool:
        """Write these records as dropped and ended; return False without room."""
        given = _core.relay_drop(self._segment, b"".join(origins), REASONS.index(reason))
        if given is None:
            return False
        self._enter(origins, given)
        return True

    def _enter(self, origins: Sequence[Origin], given: bytes) -> None:
        entries = array("I", given)
        self._entries.update(zip(origins, entries, strict=True))
        self._origins.update(zip(entries, origins, strict=True))

    def _pack(self, origins: Sequence[Origin]) -> array[int]:
        known = self._entries
        if known.keys().isdisjoint(origins):
            return array("I", [_NEW]) * len(origins)
        return array("I", [known.get(origin, _NEW) for origin in origins])

    def forget(self, origins: Collection[Origin]) -> None:
        """Free the entries of these records."""
        entries = array("I", map(self._entries.pop, origins))
        _core.relay_forget(self._segment, entries)
        deque(map(self._origins.__delitem__, entries), maxlen=0)

    def withdraw(self, origin: Origin) -> None:
        """Free the entry of a refused record."""
        if origin in self._entries:
            self.forget([origin])

    def keep(self, origins: set[Origin]) -> None:
        """Free every entry but these records'."""
        self.forget([origin for origin in self._entries if origin not in origins])

    def ends(self) -> dict[str, list[Origin]]:
        """Return the records ended by the trainer, by reason; empty without a change."""
        ended = _core.relay_words(self._segment)[5]
        if ended == self._ended:
            return {}
        self._ended = ended
        known = self._origins
        ends: dict[str, list[Origin]] = {}
        for entry, _, _, reason in _core.relay_notes(self._segment, True):
            if entry in known and reason >= 0:
                ends.setdefault(REASONS[reason], []).append(known[entry])
        return ends

    def look_again(self) -> None:
        """Make `ends` return every end again, even without a new end."""
        self._ended = -1

    def note(self, term: int, seen_ns: int, figures: tuple[int, ...]) -> None:
        """Write the figures for a successor and `shmbus status`."""
        _core.relay_note(self._segment, term, seen_ns, figures)


_log = logging.getLogger("shmbus.relay")

#: Seconds until the next try of a full bus.
FULL_PAUSE_S = 0.002
#: Seconds for a bus to take the kept records: a bus of the old size holds them.
_PATIENCE_S: Final = 5.0
#: Seconds between rounds without work.
IDLE_S = 0.01
#: Seconds between checks of the trainer's ends: they delay a source's space by as much.
ENDS_S = 0.05
#: Seconds to collect settled records for the coordinator, while assignments exceed the fetches
#: under way: a message for each block, and the answer, cost the coordinator as much as the heads.
SETTLED_LINGER_S = 0.02
#: Seconds until an unconfirmed release is repeated.
ASK_AGAIN_S = 2.0
HELLO_S = 1.0
#: Seconds between looks at the trainer's requests: after words of what workers want, and without.
ASKED_S, PROMPTS_S = 0.01, 0.05
#: Most of the bus, and of the journal's entries, in a block: the trainer's groups need room, too.
_BLOCK_SHARE = 8
#: The same limit for a group: a group is put whole, beside the trainer's groups.
_GROUP_SHARE = 2


class _Block:
    """Received records, and their places in the block."""

    def __init__(
        self, origins: tuple[Origin, ...], payload: bytes | memoryview, splits: messages.Labels
    ) -> None:
        self.origins = origins
        self.payload = payload
        self.splits = splits  # labels of the records' bus, "" for labels unknown to this bus

    @cached_property
    def _index(self) -> dict[Origin, int]:
        return dict(zip(self.origins, range(len(self.origins)), strict=True))

    def has_some_of(self, origins: tuple[Origin, ...]) -> bool:
        return not self._index.keys().isdisjoint(origins)

    def find(self, order: tuple[Origin, ...], at: int) -> tuple[int, int]:
        """Return the place of record `at` of an order, and the length of the common run there."""
        if self.origins == order:
            return at, len(order) - at
        first = self._index.get(order[at], -1)
        if first < 0:
            return 0, 0
        most = min(len(order) - at, len(self.origins) - first)
        if order[at : at + most] == self.origins[first : first + most]:
            return first, most
        count = 1
        while count < most and order[at + count] == self.origins[first + count]:
            count += 1
        return first, count


def _named(origins: bytes, asked: tuple[Origin, ...]) -> tuple[Origin, ...]:
    """Return packed origins, reusing the requested objects."""
    if origins == b"".join(asked):
        return asked
    known = {origin: origin for origin in asked}
    found = [origins[at : at + ORIGIN_BYTES] for at in range(0, len(origins), ORIGIN_BYTES)]
    return tuple([known.get(origin, origin) for origin in found])


class SinkParty:
    """A sink with its bus."""

    def __init__(
        self,
        bus: str,
        mailbox: Mailbox,
        coordinator: str,
        release: str = "acknowledged",
        block_bytes: int = BLOCK_BYTES,
        keep: str = "",
        keep_sync_s: float = 1.0,
        node: str = "",
    ) -> None:
        self._segment = lifecycle.open_segment(bus)
        self._bus = Bus.open(bus)
        #: The log that survives the machine's memory, if requested.
        self.keep: Keep | None = None
        try:
            self.journal = BusJournal(self._segment, bus)
            if keep:
                self.keep = Keep(keep, bus, keep_sync_s, self._bus.identity, node)
            self.producer = Producer(bus, label="shmbus relay", on_stall="log")
        except BaseException:
            self._close()
            raise
        _core.relay_bind(self.producer)
        self._mailbox = mailbox
        self._coordinator = coordinator
        block_bytes = min(block_bytes, self._bus.capacity // _BLOCK_SHARE)
        found = self.journal.found
        unwritten = self._write_ends([origin for origin, _ in found.ended])
        ended = frozenset(each for each in found.ended if each[0] not in unwritten)
        self.sink = Sink(
            mailbox.address, self.journal.incarnation, found._replace(ended=ended), release,
            block_bytes,
            min(BLOCK_RECORDS, self.journal.capacity // _BLOCK_SHARE),
        )  # fmt: skip
        self.sink.term = self.journal.term
        self._tracks_ends = release == "acknowledged"
        self._lane = TrainerLane(self._segment)
        self.prompts = PromptSender(self._bus.identity, self.journal.incarnation)
        self._next_prompts_s = 0.0
        #: The oldest prompt in a node's hands.
        self.held_prompt: HeldPrompt | None = None
        #: Addresses of sources, by the identity of their bus.
        self.addresses: dict[str, str] = {}
        #: Blocks received and not put yet.
        self._blocks: list[_Block] = []
        #: Records being put, their journal entries, and the number already put.
        self._order: tuple[Origin, ...] = ()
        self._entries = b""
        self._put = 0
        self._waited = False
        #: Missing samples of the next groups already reported to the trainer.
        self._told: set[tuple[messages.GroupName, int, int]] = set()
        self._next_hello_s = self._next_ends_s = self._next_ask_s = 0.0
        self._fetches = Backoff(PARTY_BACKOFF_S)
        #: Records put, and not yet reported to the coordinator.
        self._untold: set[Origin] = set()
        self._next_settled_s = 0.0
        #: Unconfirmed releases at the last repeat.
        self._unconfirmed: set[Origin] = set()
        self.refused = 0
        self.records = 0
        if self.keep is not None:
            self._bring_back(self.keep)
        self._hello()
        self._say(self.sink.begin())
        self._say(self.sink.ask_release_again())

    def _bring_back(self, keep: Keep) -> None:
        """Put kept records of an earlier life of the bus."""
        try:
            for record in keep.records(self.sink.settled | self.sink.owed):
                try:
                    self._bring_back_one(record)
                except (errors.CapacityError, errors.RecordTooLargeError):
                    raise
                except (ValueError, TypeError, OverflowError) as error:
                    self.journal.withdraw(record.origin)
                    self.refused += 1
                    text = "bus %r: kept record %s is refused: %s"
                    _log.error(text, self._bus.name, name_origin(record.origin), error)
            keep.adopt()
        except BaseException:
            self.close()
            raise
        self._told.clear()
        if self.records:
            text = "bus %r: %d records that were kept are on it again"
            _log.warning(text, self._bus.name, self.records)

    def _bring_back_one(self, record: Kept) -> None:
        self._fail(record.missing, _PATIENCE_S)
        entries = self.journal.intend(self.producer, [record.origin])
        put = entries is not None and _core.import_block(
            self.producer, record.payload, record.place, 1, _PATIENCE_S, entries,
            self._numbers(record.splits),
        )  # fmt: skip
        if entries is None or not put:
            raise errors.BusFullError(
                f"bus {self._bus.name!r} has no room for all that was kept of the one before; "
                "make it as large, or let its trainer begin"
            )
        _core.relay_settle(self.producer, entries)
        self.sink.settled.add(record.origin)
        self.records += 1

    def _write_ends(self, origins: Collection[Origin]) -> set[Origin]:
        """Keep ends of records; return the records whose sources must wait for the disk."""
        if self.keep is None:
            return set()
        self.keep.end(origins)
        return self.keep.owed.intersection(origins)

    # -- saying ----------------------------------------------------------------------------------

    def _say(self, said: list[Message]) -> None:
        for message in said:
            match message:
                case messages.Fetch() | messages.Release():
                    to = self.addresses.get(message.bus)
                    if to is not None:
                        self._mailbox.send(to, message)
                case messages.Settled():
                    self._untold |= message.origins
                case _:
                    self._tell_settled()
                    self._mailbox.send(self._coordinator, message)

    def _tell_settled(self) -> None:
        """Report puts to the coordinator, before any other message about them."""
        if self._untold:
            origins, self._untold = frozenset(self._untold), set()
            self._mailbox.send(self._coordinator, messages.Settled(self.sink.name, origins))

    def _hello(self, to: str = "") -> None:
        now = time.monotonic_ns()
        self._shown = self._to_show()
        self._next_hello_s = now / 1e9 + HELLO_S
        bus, sink, offers = self._bus, self.sink, _core.request_number(self._segment) > 0
        for source, address in self.addresses.items() if offers else ():
            self._mailbox.send(address, self.prompts.say(source, (), ()))
        moving, settled = len(sink.owed), len(sink.settled)
        self._mailbox.send(
            to or self._coordinator,
            messages.Hello(
                sink.name, True, bus.name, bus.identity, sink.incarnation, sink.term,
                self._coordinator,
                bus.policy_version, bus.paused, bus.record_limit, bus.capacity // _GROUP_SHARE,
                self.journal.capacity // _GROUP_SHARE, now, 0, moving, settled, offers=offers,
                splits=self._shown[2],
            ),
        )  # fmt: skip
        figures = (moving, settled, self.records, self.refused, len(self.addresses))
        self.journal.note(sink.term, now, figures)

    # -- hearing ---------------------------------------------------------------------------------

    def take(self, envelope: Envelope) -> None:
        """Act on a message."""
        sink = self.sink
        match envelope.message:
            case messages.HelloWanted() as wanted:
                if wanted.term == 0:
                    self._coordinator = envelope.sender
                self._hello(envelope.sender)
            case messages.SinkStateWanted() as message if message.sink == sink.name:
                said = sink.tell(message)
                if said:
                    self._coordinator = envelope.sender
                    self.journal.note(sink.term, time.monotonic_ns(), ())
                self._say(said)
            case messages.Assignments() as message:
                self._say(sink.assign_all(g for g in message.groups if g.sink == sink.name))
            case messages.Assignment() as message if message.sink == sink.name:
                self._say(sink.assign_all([message]))
            case messages.Drop() as message if message.sink == sink.name and sink.is_meant(message):
                unwritten = self._write_ends(message.origins)
                if not unwritten and self.journal.drop(message.origins, message.reason):
                    self._say(sink.drop(message))
            case messages.Fetched() as message if message.sink == sink.name:
                self._fetched(envelope.sender, message, envelope.payload)
            case messages.Released() as message if message.sink == sink.name:
                self._released(message)
            case messages.Demand() as message if message.trainer == self._bus.identity:
                if self.prompts.demand(message):
                    self._next_prompts_s = min(self._next_prompts_s, time.monotonic() + ASKED_S)
            case messages.Peers() as message:
                self._learn(message)
            case _:
                pass  # for an earlier sink

    def _learn(self, message: messages.Peers) -> None:
        new = dict(message.addresses)
        came = new.keys() - self.addresses.keys()
        self.addresses = new
        self.prompts.peers(new, complete=message.complete)
        self._lane.first = message.first
        if message.complete:
            named = {bus for bus, _ in by_bus(self.sink.settled | self.sink.owed)}
            for bus in sorted(named - new.keys()):
                _log.warning(
                    "bus %r: the source bus %s has gone; what it held of groups under way is given "
                    "back", self._bus.name, bus,
                )  # fmt: skip
                said = self.sink.bus_gone(bus)
                self._write()
                self._say(said)
        if came:
            # A message without a connection is lost: send a message before the first block.
            sink = self.sink
            self._say(
                [messages.Fetch(bus, sink.name, sink.incarnation, ()) for bus in sorted(came)]
            )
            self._say(sink.ask_again())
            self._next_hello_s = 0.0  # asks them for their demand

    def _fetched(self, sender: str, message: messages.Fetched, payload: bytes | memoryview) -> None:
        batch = self.sink.asked_by(message)
        if batch is None:
            return
        if message.origins or len(payload):
            own = labels_of(self._segment)
            splits = tuple(label if label in own else "" for label in message.splits)
            try:
                found = self._check(batch, message, payload, self._numbers(splits))
            except ValueError as error:
                self.refused += 1
                _log.error("bus %r: a block from %s is refused: %s", self._bus.name, sender, error)
                return
            if self.sink.wanted.isdisjoint(found):
                return  # a doubled answer
            self._blocks.append(_Block(found, payload, splits))
            message = message._replace(origins=found)
        said = self.sink.fetched(message)
        if message.gone:
            self._write()
            self._keep_blocks()
        self._say(said)

    def _numbers(self, labels: messages.Labels) -> bytes:
        return bytes([number_of(self._segment, label) for label in labels])

    def _keep_blocks(self) -> None:
        """Drop blocks without owed records: put, or given back."""
        owed = self.sink.owed
        self._blocks = [each for each in self._blocks if not owed.isdisjoint(each.origins)]

    def _check(
        self, batch: Batch, message: messages.Fetched, payload: bytes | memoryview, splits: bytes
    ) -> tuple[Origin, ...]:
        """Return the records of a block; ValueError names the block's fault."""
        origins, packed = _core.check_block(payload, splits)
        checks = array("I", packed)
        if message.origins and origins != b"".join(message.origins):
            of = bus_of(origins) if origins else "none"
            raise ValueError(
                f"expected {len(message.origins)} records as announced by its sender, got "
                f"{len(checks)} records of bus {of}"
            )
        found = _named(origins, batch.origins)
        if found is not batch.origins and frozenset(batch.origins).isdisjoint(found):
            of = bus_of(origins) if origins else "none"
            raise ValueError(
                f"expected requested records, got {len(checks)} unrequested records of bus {of}"
            )
        heads: dict[Origin, int] = {}
        for group in batch.groups:
            heads.update(zip(group.origins, group.checks, strict=False))
        if list(map(heads.get, found)) == checks.tolist():
            return found
        for origin, check in zip(found, checks, strict=True):
            # An earlier sink's intent carries no heads.
            head = heads.get(origin, check)
            if head != check:
                raise ValueError(
                    f"record {name_origin(origin)} of bus {bus_of(origin)} says another thing than "
                    f"its head did: its checksum is {check:#x}, and the head that was grouped has "
                    f"{head:#x}"
                )
        return found

    def _released(self, message: messages.Released) -> None:
        for said in self.sink.released(message):
            assert isinstance(said, messages.Confirmation)
            self.journal.forget(said.origins)
            self._say([said])

    def _write(self) -> None:
        """Free unneeded journal entries."""
        sink = self.sink
        self.journal.keep(sink.settled.union(sink.intent, sink.left_behind))

    # -- doing -----------------------------------------------------------------------------------

    def round(self) -> float:
        """Do the due work, and return the seconds until the next call."""
        now = time.monotonic()
        wait_s = self._step()
        if self.sink.is_hungry or now >= self._next_settled_s:
            self._next_settled_s = now + SETTLED_LINGER_S
            self._tell_settled()
        if self._tracks_ends and now >= self._next_ends_s:
            self._next_ends_s = now + ENDS_S
            self._tell_ends()
            if self.keep is not None:
                self.keep.round()
        if self.sink.wanted and self._fetches.is_over(
            (self.sink.fetching[0], len(self.sink.wanted)), now
        ):
            self._say(self.sink.ask_again())
        if now >= self._next_ask_s:
            self._next_ask_s = now + ASK_AGAIN_S
            self._say(self.sink.ask_release_again(self._unconfirmed & self.sink.ended.keys()))
            self._unconfirmed = set(self.sink.ended)
        if now >= self._next_prompts_s and _core.request_number(self._segment):
            self._next_prompts_s = now + PROMPTS_S
            self._share_prompts()
        if now >= self._next_hello_s:
            self._segment.require_name()
            self._hello()
        elif self._shown != self._to_show():
            self._hello()  # workers wait for it
        return wait_s

    def _to_show(self) -> tuple[int, str | None, tuple[str, ...]]:
        return self._bus.policy_version, self._bus.paused, labels_of(self._segment)

    def _share_prompts(self) -> None:
        """Send the trainer's new requests to sources' workers, and cancel the ended requests."""
        rows, sender = self._lane.rows(), self.prompts
        for number in sender.ended(rows):
            self._lane.end(number)
            del rows[number]
        room = 0 if self._bus.paused is not None else self._lane.room(rows)
        for bus, over, numbers in sender.share(rows, room):
            found = [each for each in map(self._lane.send, numbers) if each is not None]
            offers = [offer for offer, _ in found]
            begun = tuple(offer.group for offer in offers)
            self._say([messages.Begun(begun)] if begun else [])
            said = sender.say(bus, over, offers)
            self._mailbox.send(self.addresses[bus], said, b"".join([each for _, each in found]))
        at = sender.at
        first = min((n for n in rows if n in at and rows[n].done < rows[n].need), default=None)
        self.held_prompt = (
            None
            if first is None
            else self._lane.held(first, self.addresses.get(at[first], at[first]))
        )

    def _tell_ends(self) -> None:
        """Have sources release the records ended by the trainer or dropped."""
        ends = self.journal.ends()
        unwritten = self._write_ends([origin for origins in ends.values() for origin in origins])
        if unwritten:
            self.journal.look_again()
        for reason, found in ends.items():
            origins = [origin for origin in found if origin not in unwritten]
            new = self.sink.settled.intersection(origins).difference(self.sink.ended)
            if new:
                self._say(self.sink.end(frozenset(new), reason))
            if self.sink.left_behind:
                over = self.sink.left_behind.intersection(origins)
                self.sink.left_behind -= over
                self.journal.forget(over)

    def _step(self) -> float:
        """Put records of the next block; return the seconds until the next step."""
        sink = self.sink
        if not self._order:
            if not sink.ready:
                return IDLE_S
            if not self._tell_missing():
                return FULL_PAUSE_S
            entries = self.journal.intend(self.producer, sink.fetching)
            if entries is None:
                return FULL_PAUSE_S  # a full journal, until sources release
            if self.keep is not None:
                here = [
                    (each.payload, each.splits)
                    for each in self._blocks
                    if each.has_some_of(sink.fetching)
                ]
                missing = [sample for group in sink.batches[0].groups for sample in group.missing]
                self.keep.put(here, sink.fetching, tuple(missing))
            sink.intend(self.producer.stats().committed)
            self._told.clear()
            self._order, self._entries, self._put = sink.fetching, entries, 0
        while self._put < len(self._order):
            done = self._put_some()
            if not done:
                self._waited = True
                return FULL_PAUSE_S
            self._put += done
            self.records += done
        _core.relay_settle(self.producer, self._entries)
        if self._waited:
            # The trainer may have ended the first records before the rest found room: count ends
            # only from now.
            self.journal.look_again()
            self._waited = False
        self._order = ()
        self._say(sink.settle())
        self._keep_blocks()
        return 0.0 if sink.ready else IDLE_S

    def _tell_missing(self) -> bool:
        """Report samples that will not come, once or again; False on a full bus."""
        try:
            for group in self.sink.batches[0].groups:
                self._fail(group.missing, 0.0)
        except errors.BusFullError:
            return False
        return True

    def _fail(self, missing: Collection[MissingSample], timeout_s: float) -> None:
        for sample in missing:
            if sample.id not in self._told:
                id_, round, split = sample.group
                self.producer.fail(
                    id_, sample.index, sample.reason, round=round, split=split,
                    group_size=sample.group_size or None, need=sample.need or None,
                    timeout=timeout_s,
                )  # fmt: skip
                self._told.add(sample.id)

    def _put_some(self) -> int:
        """Put the next neighbouring records of a block; return 0 on a full bus."""
        order, at = self._order, self._put
        block, first, count = next(
            (block, *place) for block in self._blocks if (place := block.find(order, at))[1]
        )
        entries = b""
        if self._tracks_ends:
            entries = self._entries[at * ENTRY_BYTES : (at + count) * ENTRY_BYTES]
        try:
            return _core.import_block(
                self.producer, block.payload, first, count, 0.0, entries,
                self._numbers(block.splits),
            )  # fmt: skip
        except errors.BusFullError:
            return 0

    def close(self) -> None:
        """Leave the bus; the next sink continues from its journal."""
        self.producer.close()
        self._close()

    def _close(self) -> None:
        if self.keep is not None:
            self.keep.close()
        self._segment.close()
        self._bus.close()
