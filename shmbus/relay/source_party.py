"""The process beside a rollout node's bus: announces, sends and releases committed records.

Invariants:

- Only the bus, and a growing number in the bus, outlive the process.
- No announcement after a release names the released records.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

from shmbus import Bus
from shmbus.base.arguments import fit_text
from shmbus.relay.direct import BufferPool
from shmbus.relay.messages import (
    Announcement,
    Cancelled,
    Envelope,
    Fetch,
    Fetched,
    Hello,
    HelloWanted,
    Mark,
    Message,
    Origin,
    Prompts,
    Release,
    Released,
    Steering,
    Subscription,
    Wanted,
)
from shmbus.relay.party import Mailbox
from shmbus.relay.prompt_lanes import NodePrompts
from shmbus.relay.record_reader import RecordReader, reason_of
from shmbus.relay.retry_rows import RetryRows
from shmbus.relay.splits import labels_of
from shmbus.segment import lifecycle
from shmbus_ext import _core


class Source:
    """The relay's side at a rollout node's bus."""

    def __init__(
        self,
        bus: str,
        incarnation: int,
        read: Callable[[Mapping[Origin, Any]], bytes],
        splits: Callable[[], tuple[str, ...]],
    ) -> None:
        self.bus = bus
        self.incarnation = incarnation
        self.number = 0
        self.asked = (0, 0)
        self.held: dict[Origin, Any] = {}
        self._read, self._splits = read, splits

    @property
    def mark(self) -> Mark:
        """The position in the announcements."""
        return (self.incarnation, self.number)

    def begin(self, found: Mapping[Origin, Any]) -> list[Message]:
        """Take every record of the ring, and announce the full set."""
        self.held.update(found)
        return [self._announce(self.held, whole=True)]

    def poll(self, new: Mapping[Origin, Any]) -> list[Message]:
        """Take and announce new records."""
        self.held.update(new)
        return [self._announce(new, whole=False)] if new else []

    def _announce(self, what: Mapping[Origin, Any], *, whole: bool) -> Announcement:
        self.number += 1
        heads = self._read(what)
        return Announcement(self.bus, self.mark, whole, heads, self.asked, self._splits())

    def subscribe(self, message: Subscription) -> list[Message]:
        """Announce every held record to a coordinator after a lost message."""
        self.asked = max(self.asked, (message.term, message.question))
        return [self._announce(self.held, whole=True)]

    def fetch(self, message: Fetch) -> list[Message]:
        """Name the held records among these; the caller adds their bytes."""
        here = message.origins
        gone: tuple[Origin, ...] = ()
        if not self.held.keys() >= set(here):
            here = tuple(origin for origin in message.origins if origin in self.held)
            gone = tuple(origin for origin in message.origins if origin not in self.held)
        return [Fetched(message.sink, message.incarnation, here, gone, self.mark, message.number)]

    def release(self, message: Release) -> list[Message]:
        """Let records go, once or again; the caller has released them in the ring."""
        deque(map(self.held.pop, message.origins, repeat(None)), maxlen=0)
        return [Released(self.bus, message.sink, message.origins, self.mark)]


#: Seconds to gather heads before an announcement: little beside a rollout, and a limit on the
#: coordinator's messages from each source.
LINGER_S = 0.01
#: The same after an announcement of many heads: at such a rate a record waits for its block anyway,
#: and a message costs sender, receiver and responders as much as many heads.
BUSY_LINGER_S = 0.04
#: Heads that count as many.
MANY_HEADS = 64
#: Records polled in a round: a fast bus's records since the last round; messages wait no longer.
_POLL_AT_ONCE = 4096
#: Seconds between hellos.
HELLO_S = 1.0
#: Prefix of a pause from the trainers' side.
PAUSED_BY_RELAY = "relayed: "
#: Records released at a time.
_RELEASE_AT_ONCE = 16_384


class SourceParty:
    """A source with its bus."""

    def __init__(self, bus: str, mailbox: Mailbox, coordinator: str) -> None:
        self.reader = RecordReader(bus)
        self._bus = Bus.open(bus)
        self._segment = lifecycle.open_segment(bus)
        self.rows = RetryRows(self._segment, self.reader.identity)
        self.prompts = NodePrompts(self._bus, self._segment, self.reader)
        self._mailbox = mailbox
        self._coordinator = coordinator
        self.source = Source(
            self.reader.identity, self.reader.incarnation,
            lambda held: _core.read_heads(held.values(), reason_of),
            lambda: labels_of(self._segment),
        )  # fmt: skip
        #: Of the newest coordinator.
        self.term = 0
        self._new: dict[Origin, _core.Trajectory] = {}
        self._next_announcement_s = 0.0
        self._next_hello_s = 0.0
        self._pool = BufferPool()
        self.released = 0
        while self._poll():
            pass
        self._begin()

    def _begin(self) -> None:
        self._say_hello()
        found, self._new = self._new, {}
        self._send_all(self.source.begin(found))

    def _poll(self) -> int:
        """Read and queue new records for an announcement; return their number."""
        origins, records = self.reader.poll(_POLL_AT_ONCE)
        self._new.update(zip(origins, records, strict=True))
        return len(records)

    def _send_all(self, said: Sequence[Message]) -> None:
        for message in said:
            self._mailbox.send(self._coordinator, message)

    def _say_hello(self, to: str = "") -> None:
        self._next_hello_s = time.monotonic() + HELLO_S
        self._mailbox.send(
            to or self._coordinator,
            Hello(
                self._mailbox.address, False, self.reader.name, self.source.bus,
                self.source.incarnation, self.term, self._coordinator,
                self.reader.policy_version, self._bus.paused,
                0, 0, 0, time.monotonic_ns(), len(self.source.held), 0, self.released,
                self.rows.mark, self.source.mark, self._oldest_ns(),
            ),
        )  # fmt: skip
        self.reader.note((len(self.source.held), self.released, self.source.number))

    def _oldest_ns(self) -> int:
        """Return the commit time of the oldest record, precise to a poll."""
        oldest = next(iter(self.source.held.values()), None)
        return 0 if oldest is None else oldest.committed_ns

    def round(self) -> float:
        """Do timed work, and return the seconds until the next call."""
        now = time.monotonic()
        asked = self.prompts.look(now)
        count = self._poll()
        if asked is not None and count < _POLL_AT_ONCE:
            for address, word in self.prompts.say(asked, now):
                self._mailbox.send(address, word)
        if self._new and now >= self._next_announcement_s:
            new, self._new = self._new, {}
            busy = len(new) >= MANY_HEADS
            self._next_announcement_s = now + (BUSY_LINGER_S if busy else LINGER_S)
            self._send_all(self.source.poll(new))
        if count < _POLL_AT_ONCE and not self._new:
            # Every commit of a dead producer was read, and announced earlier.
            self._send_all(self.rows.lost())
        if now >= self._next_hello_s:
            self.reader.require_bus()
            self._say_hello()
            self.rows.check_claimants()
        return LINGER_S

    def take(self, envelope: Envelope) -> None:
        """Act on a message."""
        match envelope.message:
            case HelloWanted() as wanted:
                if wanted.term == 0:
                    self._coordinator = envelope.sender
                self._say_hello(envelope.sender)
            case Subscription() as asked if asked.bus == self.source.bus:
                if asked.term >= self.term:
                    self._coordinator, self.term = envelope.sender, asked.term
                    self._announce_all(asked)
            case Fetch() as asked if asked.bus == self.source.bus:
                self._fetch(envelope.sender, asked)
            case Release() as asked if asked.bus == self.source.bus:
                self._release(envelope.sender, asked)
            case Steering() as steering:
                self._steer(steering)
            case Prompts() as prompts if prompts.bus == self.source.bus:
                self.prompts.take(envelope.sender, prompts, envelope.payload)
            case Cancelled() as cancelled:
                self.reader.cancel(map(self.reader.key_of, cancelled.groups))
            case Wanted() as wanted if wanted.bus == self.source.bus:
                if wanted.term >= self.term:
                    self.rows.take(wanted)
                    self._say_hello()
            case _:
                pass  # for an earlier bus

    def _announce_all(self, asked: Subscription) -> None:
        for message in self.source.subscribe(asked):
            assert isinstance(message, Announcement)
            self._mailbox.send(self._coordinator, message)

    def _fetch(self, sink: str, asked: Fetch) -> None:
        for message in self.source.fetch(asked):
            assert isinstance(message, Fetched)
            payload: bytes | memoryview = b""
            if message.origins:
                held = self.source.held
                size = _core.BLOCK_HEADER_BYTES
                size += sum([held[origin].nbytes for origin in message.origins])
                payload = self.reader.export(message.origins, self._pool.take(size))
                # The block names the origins, and the sink already knows the requested origins.
                message = message._replace(origins=(), splits=labels_of(self._segment))
            self._mailbox.send(sink, message, payload)

    def _release(self, asker: str, asked: Release) -> None:
        held = self.source.held
        here = [origin for origin in asked.origins if origin in held]
        surplus = {held[origin].key for origin in here} if asked.reason == "surplus" else set()
        for at in range(0, len(here), _RELEASE_AT_ONCE):
            self.reader.release(here[at : at + _RELEASE_AT_ONCE], asked.reason)
        self.released += len(here)
        self.prompts.released(surplus)
        for message in self.source.release(asked):
            self._mailbox.send(asker, message)

    def _steer(self, steering: Steering) -> None:
        if steering.policy_version != self.reader.policy_version:
            self.reader.policy_version = steering.policy_version
        paused = self._bus.paused
        relayed = paused is not None and paused.startswith(PAUSED_BY_RELAY)
        if steering.paused is None:
            if relayed:
                self._bus.resume()
        elif paused is None or relayed:
            why = fit_text("paused", PAUSED_BY_RELAY + steering.paused, _core.PAUSE_REASON_BYTES)
            if why != paused:
                self._bus.pause(why)

    def close(self) -> None:
        """Leave the bus; unreleased records stay for the next relay."""
        self.reader.close()
        self._segment.close()
        self._bus.close()
