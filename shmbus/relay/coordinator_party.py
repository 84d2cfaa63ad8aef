"""The coordinator's process: grouping and placing with a clock, and the list of peers.

Invariants:

- The process keeps no state: a new coordinator asks every peer, and takes a term above every
  earlier term.
- A sink or source with a replaced bus, or gone for good, voids the knowledge of its old bus: the
  coordinator begins again.
- A coordinator ends when a newer coordinator appears.
- Clocks of other nodes decide only ages, and the order of two records.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from shmbus import errors
from shmbus.base.backoff import Backoff
from shmbus.relay import messages
from shmbus.relay.coordinator import WINDOW_BYTES, Coordinator
from shmbus.relay.messages import Envelope, Mark, Message, bus_of, name_origin
from shmbus.relay.party import PARTY_BACKOFF_S, Mailbox
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

_log = logging.getLogger("shmbus.relay")

#: Seconds until an unanswered message is repeated.
ASK_AGAIN_S = 1.0
#: Seconds of silence until the coordinator asks a peer: dead, or following another coordinator.
SILENT_S = 3.0
#: Seconds between rounds without a message: the precision of group deadlines.
ROUND_S = 0.05
#: Random bits of a term, below its number: they separate two coordinators that begin at once.
_RANDOM_BITS = 16
#: Refusals and missing samples shown in a note, at most.
_SHOWN = 16


class CoordinatorParty:
    """A coordinator with a clock."""

    def __init__(
        self,
        mailbox: Mailbox,
        sources: Sequence[str],
        sinks: Sequence[str],
        policy: StashPolicy | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._mailbox = mailbox
        #: Serializes the party's thread and threads that read notes.
        self._lock = threading.Lock()
        self.sources = dict.fromkeys(sources)
        self.sinks = list(sinks)
        self._policy = policy
        self._window = window_bytes
        self.hellos: dict[str, tuple[messages.Hello, float]] = {}
        self.clocks = Clocks()
        #: Buses by address, and addresses by bus.
        self._bus_of: dict[str, str] = {}
        self._address_of: dict[str, str] = {}
        self.pure: Coordinator | None = None
        self._next_ask_s = self._next_peers_s = 0.0
        #: Sinks must hear the sources' addresses again.
        self._peers_changed = False
        self.lost = 0
        #: Written by another thread: sources to take on, and peers to forget.
        self.joined: list[str] = []
        self.forgotten: list[str] = []
        #: Settled messages by sink.
        self.settled: dict[str, int] = {}
        self._assignments: dict[str, Backoff] = {}
        self._drops = Backoff(PARTY_BACKOFF_S)
        #: Newest policy version of the trainers and reason of a pause; the same by source, as told.
        self._steering: tuple[int, str | None] | None = None
        self._steered: dict[str, tuple[int, str | None]] = {}
        self._news: dict[str, Backoff] = {}
        self._releases = Backoff(PARTY_BACKOFF_S)
        #: Splits unknown to the first trainer's bus; each is logged once.
        self._unplaced: set[str] = set()
        self.refused = 0
        #: Senders outside the peers; each is logged once.
        self._strangers: set[str] = set()
        self._ask_who()

    def _ask_who(self) -> None:
        now_s = time.monotonic()
        for address in [*self.sources, *self.sinks]:
            heard = self.hellos.get(address)
            if heard is None or now_s - heard[1] > SILENT_S:
                self._mailbox.send(
                    address, messages.HelloWanted(self.pure.term if self.pure else 0)
                )

    # -- peers -----------------------------------------------------------------------------------

    def _hello(self, hello: messages.Hello) -> None:
        address = hello.address
        if address not in (self.sinks if hello.is_sink else self.sources):
            self._count_refused(f"{address} is not among the relay's peers; start it with them all")
            return
        elsewhere = hello.coordinator != self._mailbox.address
        if self.pure is not None and hello.term > self.pure.term and elsewhere:
            raise errors.BusBusyError(
                f"relay: {address} follows coordinator {hello.term} at {hello.coordinator}, and "
                f"this is {self.pure.term} at {self._mailbox.address}: another one was started "
                "for the same trainers; this one ends"
            )
        before = self._bus_of.get(address)
        earlier = self.hellos.get(address)
        double = self._address_of.get(hello.bus, address)
        if double != address:
            self._count_refused(
                f"bus {hello.bus} ({hello.name!r}) is announced by {address} and by {double}; "
                "a bus has one relay: start one of them with another bus"
            )
            return
        if before != hello.bus:
            self._address_of.pop(before or "", None)
            self._bus_of[address], self._address_of[hello.bus] = hello.bus, address
        if before != hello.bus or (
            hello.is_sink and (earlier is None or earlier[0].incarnation != hello.incarnation)
        ):
            self._peers_changed = True
        self.hellos[address] = (hello, time.monotonic())
        self._note_clock(hello)
        if self.pure is None:
            if all(address in self.hellos for address in self.sinks):
                self._begin()
        elif hello.term > self.pure.term:
            # The term of an earlier coordinator, in a late message.
            self._begin()
        elif before is not None and before != hello.bus:
            self._bus_changed(hello, before)
        elif not hello.is_sink and hello.bus not in self.pure.buses:
            self._meet_source(hello.bus)
        if not hello.is_sink and self.pure is not None:
            self._say(self.pure.wanted_of(hello.bus, hello.asked))
            if earlier is not None:
                self._ask_for_news(hello.bus, earlier[0].mark)
        if hello.is_sink and self.pure is not None:
            self._note_limits(hello)
            view = self.pure.sinks[address]
            if view.heard and view.incarnation < hello.incarnation:
                # The sink's first message was lost.
                self._say([messages.SinkStateWanted(address, self.pure.term)])
        self._steer(hello)

    def _ask_for_news(self, bus: str, mark: Mark) -> None:
        """Ask a source for everything after a lost announcement that an earlier hello named."""
        assert self.pure is not None
        backoff = self._news.setdefault(bus, Backoff(PARTY_BACKOFF_S))
        newest = self.pure.newest.get(bus)
        if self.pure.lacks_news(bus, mark) and backoff.is_over(newest, time.monotonic()):
            self._say(self.pure.ask_source(bus))

    def _note_clock(self, hello: messages.Hello) -> None:
        jump_s = self.clocks.note(hello.address, hello.clock_ns, time.monotonic_ns())
        if jump_s:
            _log.warning(
                "relay: the clock of %s has jumped by %+.3g s; ages of what bus %r holds are by "
                "the new one, and nothing else depends on it", hello.address, jump_s, hello.name,
            )  # fmt: skip
        if self.pure is not None and not hello.is_sink:
            self.pure.clocks_ns[hello.bus] = self.clocks.offset_ns(hello.address)

    def _begin(self) -> None:
        """Begin, or begin again, with a term above every term heard."""
        heard = [hello.term for hello, _ in self.hellos.values()]
        newest = max([*heard, 0 if self.pure is None else self.pure.term])
        term = (newest >> _RANDOM_BITS) + 1 << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        buses = [self._bus_of[address] for address in self.sources if address in self._bus_of]
        drops = self.pure.drops if self.pure is not None else None
        self.pure = Coordinator(term, buses, self.sinks, self._policy, self._window)
        if drops is not None:
            self.pure.drops = drops
        for address in self.sources:
            if address in self._bus_of:
                self.pure.clocks_ns[self._bus_of[address]] = self.clocks.offset_ns(address)
        for address in self.sinks:
            if address in self.hellos:
                self._note_limits(self.hellos[address][0])
        self._steering = None
        self._tell_peers()
        self._say(self.pure.begin())

    def _note_limits(self, hello: messages.Hello) -> None:
        assert self.pure is not None
        limits = (hello.largest_record, hello.largest_group, hello.largest_count)
        self.pure.sinks[hello.address].largest = limits
        self.pure.sinks[hello.address].splits = hello.splits
        for label in hello.splits:
            self.pure.splits.number(label)  # before labels of other buses take every number
        self.pure.retries.at_home |= hello.offers

    def _meet_source(self, bus: str) -> None:
        assert self.pure is not None
        self._say([self.pure.meet(bus)])

    def _bus_changed(self, hello: messages.Hello, before: str) -> None:
        """Begin again after a bus was removed and recreated under its name."""
        assert self.pure is not None
        if hello.is_sink:
            _log.warning(
                "relay: %s has another bus now (%s, before %s): what that one held is asked for "
                "again at its sources", hello.address, hello.bus, before,
            )  # fmt: skip
            self._begin()
        else:
            self._forget_bus(before)
            self._meet_source(hello.bus)

    def _forget_bus(self, bus: str) -> None:
        assert self.pure is not None
        lost = self.pure.forget_source(bus, time.monotonic())
        self.lost += len(lost)
        _log.warning(
            "relay: bus %s has gone, with %d records that nobody had fetched: %s", bus, len(lost),
            ", ".join(map(name_origin, sorted(lost)[:20])),
        )  # fmt: skip

    def peer_lost(self, address: str) -> None:
        """Go on without a lost source or sink, for example of a dead node."""
        bus = self._bus_of.pop(address, None)
        self._address_of.pop(bus or "", None)
        self.hellos.pop(address, None)
        if address in self.sources:
            del self.sources[address]
            self._steered.pop(address, None)
            if bus is not None and self.pure is not None:
                self._forget_bus(bus)
        if address in self.sinks:
            self.sinks.remove(address)
            if self.pure is not None:
                self._begin()
        self._tell_peers()

    def _tell_peers(self) -> None:
        self._peers_changed = False
        self._next_peers_s = time.monotonic() + ROUND_S
        known = self._bus_of
        addresses = tuple(sorted((known[each], each) for each in self.sources if each in known))
        complete = len(addresses) == len(self.sources)
        for sink in self.sinks:
            first = sink == self.sinks[0]
            self._mailbox.send(sink, messages.Peers(addresses, complete, first))

    def _steer(self, hello: messages.Hello) -> None:
        """Have sources show the trainers' policy version and pause; the sender alone, if old."""
        if self.pure is None:
            return
        if hello.is_sink or self._steering is None:
            sinks = [self.hellos[each][0] for each in self.sinks if each in self.hellos]
            if not sinks:
                return
            version = max(each.policy_version for each in sinks)
            self.pure.policy_version = version
            paused = next((each for each in sinks if each.paused is not None), None)
            why = None if paused is None else f"{paused.name}: {paused.paused}"[:80]
            if (version, why) != self._steering:
                self._steering = version, why
                for address in self.sources:
                    if address in self.hellos:
                        self._steer_one(address)
                return
        if not hello.is_sink:
            self._steer_one(hello.address)

    def _steer_one(self, address: str) -> None:
        assert self._steering is not None
        shown, (version, why) = self.hellos[address][0], self._steering
        new = self._steered.get(address) != self._steering
        if new or shown.policy_version != version or (shown.paused is None) != (why is None):
            self._steered[address] = self._steering
            self._mailbox.send(address, messages.Steering(version, why))

    # -- messages --------------------------------------------------------------------------------

    def _say(self, said: Sequence[Message]) -> None:
        if not said:
            return
        placed: dict[str, list[messages.Assignment]] = {}
        for message in said:
            match message:
                case messages.Assignment():
                    placed.setdefault(message.sink, []).append(message)
                case messages.Drop() | messages.SinkStateWanted():
                    self._mailbox.send(message.sink, message)
                case messages.Subscription() | messages.Wanted():
                    to = self._address_of.get(message.bus)
                    if to is not None:
                        self._mailbox.send(to, message)
                case _:
                    raise AssertionError(f"a coordinator does not say {type(message).__name__}")
        for sink, groups in placed.items():
            self._mailbox.send(sink, messages.Assignments(tuple(groups)))

    def _count_refused(self, why: str) -> None:
        self.refused += 1
        self._mailbox.opener.told[why] = None
        _log.error("relay: refused: %s", why)

    def _refuse_stranger(self, sender: str, bus: str) -> None:
        if sender in self._strangers:
            self.refused += 1
            return
        self._strangers.add(sender)
        self._count_refused(
            f"{sender} announces bus {bus} to {self._mailbox.address}, and is none of its peers: "
            "it was forgotten, or belongs to another relay. What it has stays in its ring; start "
            "the relay again with it"
        )

    def take(self, envelope: Envelope) -> None:
        """Act on a message."""
        with self._lock:
            self._take(envelope)

    def _take(self, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, messages.Hello):
            self._hello(message)
            return
        pure = self.pure
        if pure is None:
            return
        now_s = time.monotonic()
        match message:
            case messages.Announcement() if message.bus in pure.buses:
                self._announced(envelope.sender, message, now_s)
            case messages.SinkState() if message.sink in pure.sinks:
                self._say(pure.sink_state(message, now_s))
            case messages.Settled() if message.sink in pure.sinks:
                self.settled[message.sink] = self.settled.get(message.sink, 0) + 1
                self._say(pure.settled(message, now_s))
            case messages.Returned() if message.sink in pure.sinks:
                self._say(pure.returned(message, now_s))
            case messages.Confirmation() if message.bus in pure.buses:
                self._say(pure.confirmed(message, now_s))
            case messages.Unanswered() if message.bus in pure.buses:
                self._say(pure.unanswered(message, now_s))
            case messages.Begun() if envelope.sender in pure.sinks:
                for group in message.groups:
                    pure.stash.table.recent.pop(pure.splits.key(group), None)
            case messages.Announcement() if envelope.sender not in self.sources:
                self._refuse_stranger(envelope.sender, message.bus)
            case _:
                pass  # from a peer gone or not known yet

    def _announced(self, sender: str, message: messages.Announcement, now_s: float) -> None:
        assert self.pure is not None
        try:
            self._say(self.pure.announced(message, now_s))
        except errors.ProtocolError as error:
            self._count_refused(f"{sender}: {error}")

    def round(self) -> float:
        """Do timed work, and return the seconds until the next call."""
        with self._lock:
            self._round(time.monotonic())
        return ROUND_S

    def _round(self, now_s: float) -> None:
        while self.joined:
            self.sources[self.joined.pop()] = None
            self._next_ask_s = 0.0
        while self.forgotten:
            self.peer_lost(self.forgotten.pop())
        pure = self.pure
        if pure is not None:
            pure.stash.expire(now_s)
            pure.stash.expire_failing(now_s)
            self._say(pure.drop_discards())
            self._say(pure.ask_producers(now_s))
            self._say(pure.place())
            cancelled = tuple(map(pure.splits.name, pure.stash.table.cancelled))
            pure.stash.table.cancelled.clear()
            for address in self.sources if cancelled else ():
                self._mailbox.send(address, messages.Cancelled(cancelled))
            for group in pure.take_too_large():
                _log.error(
                    "relay: group %r (%d records, the largest of %d bytes) fits no trainer's bus, "
                    "and is dropped as malformed; create those buses with more capacity",
                    group.key, len(group.samples), max(each.nbytes for each in group.samples),
                )  # fmt: skip
            for label in {*pure.unplaced} - self._unplaced:
                self._unplaced.add(label)
                _log.warning(
                    "relay: groups of split %r wait on their buses: the bus of %s has no such "
                    "split, or all buses have more than %d; take them by Consumer(..., split=%r)",
                    label, self.sinks[0], _core.MAX_SPLITS, label,
                )  # fmt: skip
        if self._peers_changed and now_s >= self._next_peers_s:
            self._tell_peers()
        if now_s >= self._next_ask_s:
            self._next_ask_s = now_s + ASK_AGAIN_S
            self._ask_again()

    def _ask_again(self) -> None:
        self._ask_who()
        if self.pure is None:
            return
        self._say(self.pure.ask_sinks())
        self._say(self.pure.ask_sources_again())
        now_s = time.monotonic()
        self._ask_who_holds_less(now_s)
        late = [name for name in self.sinks if self._lacks(name, now_s)]
        if late:
            self._say(self.pure.assign_again(late))
        if self.pure.dropped and self._drops.is_over(len(self.pure.dropped), now_s):
            self._say(self.pure.drop_again())
        term = self.pure.term
        unheard = [bus for bus in self.pure.buses if bus not in self.pure.newest]
        self._say([messages.Subscription(bus, term) for bus in unheard])
        self._tell_peers()

    def _ask_who_holds_less(self, now_s: float) -> None:
        assert self.pure is not None
        hellos = [self.hellos[each][0] for each in self.sources if each in self.hellos]
        held = {hello.bus: hello.held for hello in hellos}
        believed, total = len(self.pure.known) + len(self.pure.taken), sum(held.values())
        if self._releases.is_over((believed, total), now_s) and believed > total:
            self._say(self.pure.ask_who_holds_less(held))

    def _lacks(self, sink: str, now_s: float) -> bool:
        """Return True if a sink holds less of its assignments and makes no progress."""
        assert self.pure is not None
        hello, _ = self.hellos.get(sink, (None, 0.0))
        assigned = sum(map(len, self.pure.sinks[sink].leases))
        backoff = self._assignments.setdefault(sink, Backoff(PARTY_BACKOFF_S))
        if hello is None or hello.moving >= assigned:
            return False
        return backoff.is_over((self.settled.get(sink), hello.moving), now_s)

    # -- seeing ----------------------------------------------------------------------------------

    def note(self) -> RelayNote:
        """Return the relay's note; from any thread."""
        with self._lock:
            return self._note()

    def _note(self) -> RelayNote:
        now_s, pure = time.monotonic(), self.pure
        peers = [
            PeerNote(
                address, hello.name, hello.bus, hello.is_sink, now_s - heard_s,
                self.clocks.offset_ns(address) / 1e9, hello.held, hello.moving, hello.settled,
                hello.policy_version, hello.paused,
                now_s - heard_s + (hello.clock_ns - hello.oldest_ns) / 1e9
                if hello.oldest_ns else None,
            )
            for address, (hello, heard_s) in sorted(self.hellos.items())
        ]  # fmt: skip
        everybody = [*self.sources, *self.sinks]
        return RelayNote(
            pure.term if pure else 0,
            peers,
            [address for address in everybody if address not in self.hellos],
            pure.stash.open_records if pure else 0,
            pure.stash.table.ready_cells if pure else 0,
            pure.stash.table.leased_cells if pure else 0,
            dict(pure.drops) if pure else {},
            self.lost,
            self.refused + self._mailbox.opener.refused,
            [*self._mailbox.opener.told][-_SHOWN:],
            pure.retries.open if pure else 0,
            pure.stash.given_up if pure else 0,
            waiting_notes(pure, self._address_of, _SHOWN) if pure else [],
            pure.unplaced if pure else [],
        )

    def close(self) -> None:
        """Close nothing: the party holds no resources."""


#: Messages of a peer compared: the slowest say the least. After about 16 seconds the offset follows
#: a clock set back.
_WORDS: Final = 16
#: A logged change of the offset: far above a network's delay of a message.
JUMP_S: Final = 1.0


class Clocks:
    """Offsets of monotonic clocks, from the times in peers' messages.

    No message arrives before it is sent. The sender's clock therefore leads by at least the
    message's time minus its arrival time, and the greatest of these differences is nearest.
    """

    def __init__(self) -> None:
        self._words: dict[str, deque[int]] = {}

    def note(self, peer: str, said_ns: int, now_ns: int) -> float:
        """Take a peer's time, and return the seconds of a jump of its clock."""
        words = self._words.setdefault(peer, deque(maxlen=_WORDS))
        before = max(words, default=None)
        words.append(said_ns - now_ns)
        after = max(words)
        jump_s = 0.0 if before is None else (after - before) / 1e9
        if abs(jump_s) < JUMP_S:
            return 0.0
        if jump_s > 0:
            words.clear()
            words.append(after)
        return jump_s

    def offset_ns(self, peer: str) -> int:
        """Return a peer's clock minus the local clock; 0 for a silent peer."""
        return max(self._words.get(peer, ()), default=0)


#: Waiting groups shown, at most.
_MOST_WAITING: Final = 5


class PeerNote(msgspec.Struct, frozen=True):
    """The coordinator's knowledge of a source or a sink, for people."""

    #: Its address, its bus's name, and the bus's identity.
    address: str
    name: str
    bus: str
    is_sink: bool
    #: Seconds since its last message.
    heard_s: float
    #: Its CLOCK_MONOTONIC minus the coordinator's, by the quickest of its last messages.
    clock_offset_s: float
    #: Records: in a source's ring; under way to a sink; on its bus, and at their source too.
    held: int
    moving: int
    settled: int
    policy_version: int
    paused: str | None
    #: Sources only: seconds since the commit of the record held longest.
    oldest_s: float | None


class WaitingNote(msgspec.Struct, frozen=True):
    """A group waiting for samples."""

    instance_id: str
    round: int | None
    #: Samples of the group, and the number announced.
    size: int
    here: int
    #: Seconds since its first sample was committed, corrected for the machine's clock.
    age_s: float
    #: Addresses of the sources that hold them.
    at: list[str]
    #: The first indexes not announced; and the group's split.
    missing: list[int]
    split: str


class RelayNote(msgspec.Struct, frozen=True):
    """A relay at an instant, for people."""

    term: int
    #: Sources and sinks with a hello.
    peers: list[PeerNote]
    #: Addresses of the peers without a hello.
    missing: list[str]
    #: Heads in incomplete groups.
    announced: int
    #: Records of complete groups waiting for a sink, and of groups assigned to a sink.
    ready: int
    assigned: int
    #: Records that never crossed the network, by reason.
    dropped: dict[str, int]
    #: Announced records lost with their bus before a fetch.
    lost: int
    refused: int
    #: The last reasons of refusals: names of both sides, and the next step.
    why_refused: list[str]
    #: Samples that producers should repeat.
    asked: int
    #: Groups with a sample failed for good.
    given_up: int
    #: The groups waiting longest for samples.
    waiting: list[WaitingNote]
    #: Splits with complete groups that wait, unknown to the first trainer's bus.
    unplaced: list[str]


def waiting_notes(
    pure: Coordinator, address_of: Mapping[str, str], most_missing: int
) -> list[WaitingNote]:
    """Describe the groups waiting longest, by the commit of their first sample."""
    now_ns = time.monotonic_ns()
    found = []
    for group in pure.stash.oldest(_MOST_WAITING):
        if not group.samples:
            continue  # only failure reports
        id_, round, split = pure.splits.name(group.key)
        here = {sample.index for sample in group.samples}
        age_s = max(now_ns - sample.committed_ns for sample in group.samples) / 1e9
        on = {bus_of(sample.origin) for sample in group.samples}
        at = sorted(address_of.get(bus, bus) for bus in on)
        missing = [index for index in range(group.size) if index not in here]
        found.append(
            WaitingNote(id_, round, group.size, len(here), age_s, at, missing[:most_missing], split)
        )
    return found
