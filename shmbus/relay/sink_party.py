"""The process beside a trainer's bus: fetches what it was assigned, puts it, tells what it became.

Invariants:

- A block is checked, and compared with what was asked for, before any of it is put.
- Nothing here waits for room: while the bus is full, messages are answered and others are served.
- What is put lies in the journal before, and is settled there after it. An entry is freed after
  its source let go.
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
from shmbus._backoff import Backoff
from shmbus.ledger import REASONS
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

#: Of an entry's number, as the core takes it.
ENTRY_BYTES: Final = 4
_NEW: Final = 0xFFFFFFFF


class BusJournal:
    """The journal of one bus, for the process that is its sink."""

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
        #: What the sinks before this one have left.
        self.found = Journal(frozenset(settled), tuple(sorted(owed)), ended=frozenset(ends))
        self.term = _core.relay_words(segment)[4]
        self.capacity = _core.relay_words(segment)[0]

    def bind(self, writer: _core.Writer) -> None:
        """Have this writer's lane be the one that the journal speaks of."""
        _core.relay_bind(writer)

    def intend(self, writer: _core.Writer, origins: Sequence[Origin]) -> bytes | None:
        """Write that these are put next, in this order; None without room for them."""
        given = _core.relay_intend(writer, b"".join(origins), self._pack(origins))
        if given is not None:
            self._enter(origins, given)
        return given

    def drop(self, origins: Sequence[Origin], reason: str) -> bool:
        """Write that these are not put, and have ended; False without room for them."""
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

    def settle(self, writer: _core.Writer, entries: bytes) -> None:
        """Write that the records of these entries were put."""
        _core.relay_settle(writer, entries)

    def forget(self, origins: Collection[Origin]) -> None:
        """Free the entries of these."""
        entries = array("I", map(self._entries.pop, origins))
        _core.relay_forget(self._segment, entries)
        deque(map(self._origins.__delitem__, entries), maxlen=0)

    def withdraw(self, origin: Origin) -> None:
        """Free the entry of a refused record."""
        if origin in self._entries:
            self.forget([origin])

    def keep(self, origins: set[Origin]) -> None:
        """Free the entries of all but these."""
        self.forget([origin for origin in self._entries if origin not in origins])

    def ends(self) -> dict[str, list[Origin]]:
        """Return what the trainer is done with, by reason; empty where nothing has changed."""
        ended = _core.relay_words(self._segment)[5]
        if ended == self._ended:
            return {}
        self._ended = ended
        known = self._origins
        return {
            REASONS[reason]: [known[entry] for entry in array("I", entries) if entry in known]
            for reason, entries in _core.relay_ends(self._segment).items()
        }

    def look_again(self) -> None:
        """Have `ends` return all once more, though no more has ended."""
        self._ended = -1

    def note(self, term: int, seen_ns: int, figures: tuple[int, ...]) -> None:
        """Write what a successor and `shmbus status` need."""
        _core.relay_note(self._segment, term, seen_ns, figures)


_log = logging.getLogger("shmbus.relay")

#: Seconds until the bus is tried again that was full.
FULL_PAUSE_S = 0.002
#: Seconds in which a bus takes what is brought back: it was made for as much.
_PATIENCE_S: Final = 5.0
#: Seconds between rounds with nothing to put.
IDLE_S = 0.01
#: Seconds between checks of what the trainer has ended: a source's space is free so much later.
ENDS_S = 0.05
#: Seconds for which the coordinator is not told of what was put, while it has assigned more than is
#: fetched: a message for each block costs it, and what it answers this, as much as the heads do.
SETTLED_LINGER_S = 0.02
#: Seconds after which a release that no source has confirmed is asked for again.
ASK_AGAIN_S = 2.0
HELLO_S = 1.0
#: Seconds between looks at the trainer's requests: after words of what workers want, and without.
ASKED_S, PROMPTS_S = 0.01, 0.05
#: Most of the bus, and of the journal's entries, in a block: the trainer's groups need room, too.
_BLOCK_SHARE = 8
#: The same of a group: it is put whole, beside what the trainer holds.
_GROUP_SHARE = 2


class _Block:
    """Records that are here, and where each lies among them."""

    def __init__(
        self, origins: tuple[Origin, ...], payload: bytes | memoryview, splits: messages.Labels
    ) -> None:
        self.origins = origins
        self.payload = payload
        self.splits = splits  # of the records' bus, "" for those that this bus does not have

    @cached_property
    def _index(self) -> dict[Origin, int]:
        return dict(zip(self.origins, range(len(self.origins)), strict=True))

    def has_some_of(self, origins: tuple[Origin, ...]) -> bool:
        """Whether some of these are here."""
        return not self._index.keys().isdisjoint(origins)

    def find(self, order: tuple[Origin, ...], at: int) -> tuple[int, int]:
        """Return where what is `at` this place of an order lies, and how many lie as the order."""
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
    """Return origins that lie one behind the other, as the objects that were asked for."""
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
        #: What outlives the machine's memory, where that is asked for.
        self.keep: Keep | None = None
        try:
            self.journal = BusJournal(self._segment, bus)
            if keep:
                self.keep = Keep(keep, bus, keep_sync_s, self._bus.identity, node)
            self.producer = Producer(bus, label="shmbus relay", on_stall="log")
        except BaseException:
            self._close()
            raise
        self.journal.bind(self.producer)
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
        #: Where each source is, by its bus's identity.
        self.addresses: dict[str, str] = {}
        #: What is here and not put yet.
        self._blocks: list[_Block] = []
        #: What is being put, the journal's entries of it, and how many of it are.
        self._order: tuple[Origin, ...] = ()
        self._entries = b""
        self._put = 0
        self._waited = False
        #: Samples of the next groups that the trainer was told are missing.
        self._told: set[tuple[messages.GroupName, int, int]] = set()
        self._next_hello_s = self._next_ends_s = self._next_ask_s = 0.0
        self._fetches = Backoff(PARTY_BACKOFF_S)
        #: What was put, and the coordinator is not told of yet.
        self._untold: set[Origin] = set()
        self._next_settled_s = 0.0
        #: What sources were to let go at the last time that this was asked for again.
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
        self.journal.settle(self.producer, entries)
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
        """Tell the coordinator what was put, before anything else that this says of it."""
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
                self._say(sink.assign(message))
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
                pass  # for a sink that was here before this one

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
            # A message to one that is not connected is lost: send one before the first block.
            sink = self.sink
            self._say(
                [messages.Fetch(bus, sink.name, sink.incarnation, ()) for bus in sorted(came)]
            )
            self._say(sink.ask_again())
            self._next_hello_s = 0.0  # which asks them what they want

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
                return  # an answer that came twice
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
        """Let go of blocks of which nothing is to be put: it was, or was given back."""
        owed = self.sink.owed
        self._blocks = [each for each in self._blocks if not owed.isdisjoint(each.origins)]

    def _check(
        self, batch: Batch, message: messages.Fetched, payload: bytes | memoryview, splits: bytes
    ) -> tuple[Origin, ...]:
        """Return the records of a block; ValueError says what is wrong with it."""
        origins, packed = _core.check_block(payload, splits)
        checks = array("I", packed)
        if message.origins and origins != b"".join(message.origins):
            of = bus_of(origins) if origins else "none"
            raise ValueError(
                f"its records are not those that its sender names: it is of bus {of}, with "
                f"{len(checks)} records for {len(message.origins)}"
            )
        found = _named(origins, batch.origins)
        if found is not batch.origins and frozenset(batch.origins).isdisjoint(found):
            of = bus_of(origins) if origins else "none"
            raise ValueError(
                f"none of its {len(checks)} records, of bus {of}, is one that was asked for"
            )
        heads: dict[Origin, int] = {}
        for group in batch.groups:
            heads.update(zip(group.origins, group.checks, strict=False))
        if list(map(heads.get, found)) == checks.tolist():
            return found
        for origin, check in zip(found, checks, strict=True):
            # What an earlier sink had begun has no head here.
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
        """Free what the journal need not say any more."""
        sink = self.sink
        self.journal.keep(sink.settled.union(sink.intent, sink.left_behind))

    # -- doing -----------------------------------------------------------------------------------

    def round(self) -> float:
        """Do what there is to do, and return the seconds until it is to be called again."""
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
        """Have sources' workers make what the trainer requested, and no more what is over."""
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
        """Have sources let go what the trainer is done with, or what was dropped."""
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
        """Put what can be put of the next block; return the seconds until more may be put."""
        sink = self.sink
        if not self._order:
            if not sink.ready:
                return IDLE_S
            if not self._tell_missing():
                return FULL_PAUSE_S
            entries = self.journal.intend(self.producer, sink.fetching)
            if entries is None:
                return FULL_PAUSE_S  # the journal is full: until sources have let go
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
        self.journal.settle(self.producer, self._entries)
        if self._waited:
            # The trainer may have ended what found room before the rest: no end counts before this.
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
        """Put the next records that lie behind each other in one block; 0 on a full bus."""
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
        """Leave the bus; the next sink goes on from its journal."""
        self.producer.close()
        self._close()

    def _close(self) -> None:
        if self.keep is not None:
            self.keep.close()
        self._segment.close()
        self._bus.close()
