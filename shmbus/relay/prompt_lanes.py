"""The request lanes at both ends of a relay: the trainer's, and the rollout nodes'.

Invariant: a trailer behind a relayed prompt names the trainer's bus and the prompt's number there.
A reader of the prompt stops before the trailer, and a starting source reads the owner there.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import Hashable
from typing import Final, NamedTuple

from shmbus import Bus
from shmbus.relay.messages import Demand, GroupName, PromptOffer, Prompts
from shmbus.relay.prompts import PromptRow, PromptTaker
from shmbus.relay.record_reader import RecordReader
from shmbus.relay.splits import number_of
from shmbus_ext import _core

_log = logging.getLogger("shmbus.relay")

#: Trailer of a prompt: magic, identity of the trainer's bus, number there.
_TAIL: Final = struct.Struct(">8s16sQ")
_TAIL_WORD: Final = b"shmrelay"
#: Seconds between looks at the lane, and between repeats of an unchanged Demand.
_LOOK_S: Final = 0.01
_AGAIN_S: Final = 1.0
#: Seconds without work by any worker until requests not begun go to another node.
_IDLE_S: Final = 5.0


class HeldPrompt(NamedTuple):
    """The oldest prompt in the hands of another node, for people."""

    instance_id: str
    round: int | None
    split: str
    #: Address of the node's source.
    at: str
    #: CLOCK_MONOTONIC of the offer.
    offered_ns: int


class TrainerLane:
    """The requests of a trainer's bus offered to other nodes."""

    def __init__(self, segment: _core.Segment) -> None:
        self._segment = segment
        #: True if splits besides "train" belong to this trainer.
        self.first = False
        #: By number: the row and the offer; None after the end.
        self._known: dict[int, tuple[int, PromptOffer | None]] = {}

    def rows(self) -> dict[int, PromptRow]:
        """Return the open requests by number."""
        segment, known, found = self._segment, self._known, {}
        table = _core.request_rows(segment)
        self._known = {n: known.get(n) or self._learn(row, n) for row, n, *_ in table}
        for row, number, admitted, open_, claimed, done in table:
            _, offer = self._known[number]
            if offer is not None and (self.first or offer.group[2] == _core.TRAIN):
                # Claimed by a sink, perhaps dead since; or by workers of this bus.
                maybe = claimed > 0 and not (done or (open_ and admitted))
                sent = maybe and _core.request_send(segment, row, number) > 0
                found[number] = PromptRow(*offer[2:5], done, sent, open_ == offer.group_size)
        return found

    def _learn(self, row: int, number: int) -> tuple[int, PromptOffer | None]:
        text = _core.request_text(self._segment, row, number)
        if text is None:
            return row, None
        *_, size, need, level, _, start, data = text
        return row, PromptOffer(number, text[:3], size, need, level, len(data) - start)

    def room(self, rows: dict[int, PromptRow]) -> int | None:
        """Return the number of groups allowed to begin; None without a bound."""
        limit, held, *_ = _core.lead_state(self._segment)
        ahead = held + sum(row.sent and not row.done for row in rows.values())
        return max(0, limit - ahead) if limit else None

    def send(self, number: int) -> tuple[PromptOffer, bytes] | None:
        """Withhold a request from local workers, for other nodes; None if too late."""
        row, offer = self._known[number]
        text = _core.request_text(self._segment, row, number)
        if offer is None or text is None or not _core.request_send(self._segment, row, number):
            return None
        return offer, text[8][text[7] :]

    def held(self, number: int, at: str) -> HeldPrompt | None:
        """Describe a request in the hands of the node `at`; None after the request's end."""
        text = _core.request_text(self._segment, self._known[number][0], number)
        return None if text is None else HeldPrompt(*text[:3], at, text[6])

    def end(self, number: int) -> None:
        """End a request without a coming group."""
        _core.request_end(self._segment, self._known[number][0], number)


def _is_sound(offer: PromptOffer) -> bool:
    return offer.need <= offer.group_size and len(offer.group[0].encode()) <= _core.MAX_ID_BYTES


class _NodeRow(NamedTuple):
    """A request of a rollout node's bus: its trainer, "" for a local request; and its samples."""

    trainer: str
    there: int
    group: GroupName
    open: int
    claimed: int
    done: int


class NodePrompts:
    """A rollout node's share of trainers' requests, and its workers' demand."""

    def __init__(self, bus: Bus, segment: _core.Segment, reader: RecordReader) -> None:
        self._bus = bus
        self._segment = segment
        self._reader = reader
        #: By local number: the trainer, the number there, the group.
        self._known: dict[int, tuple[str, int, GroupName]] = {}
        found = [row[:3] for row in self._rows() if row.trainer]
        reader.relayed.update(reader.key_of(group) for _, _, group in found)
        self.taker = PromptTaker(
            reader.identity, reader.incarnation, found, self._offer,
            lambda group: reader.end_request(reader.key_of(group)),
        )  # fmt: skip
        #: By trainer's bus: the sink's address, the last Demand, and its time.
        self._told: dict[str, tuple[str, object, float]] = {}
        #: Held groups with records released as surplus.
        self._surplus: set[Hashable] = set()
        self._next_s = 0.0
        self._busy_s = time.monotonic()

    def take(self, sender: str, message: Prompts, payload: bytes | memoryview) -> None:
        """Take a trainer side's message, and answer soon; ignore an invalid message."""
        ends = [0, *itertools.accumulate(offer.nbytes for offer in message.offers)]
        if ends[-1] != len(payload) or not all(map(_is_sound, message.offers)):
            return
        prompts = [bytes(payload[at:end]) for at, end in itertools.pairwise(ends)]
        if self.taker.take(message, prompts):
            for old in [each for each, told in self._told.items() if told[0] == sender]:
                if old != message.trainer:  # a recreated bus: the old requests end
                    for number in list(self.taker.here.get(old, ())):
                        self.taker.give_back(old, number)
                del self._told[old]
            self._told[message.trainer] = (sender, None, 0.0)
            self._next_s = 0.0

    def released(self, surplus: set[Hashable]) -> None:
        """Give back requests with surplus records, once no record of the group is held."""
        self._surplus |= surplus
        over = {key for key in self._surplus if not self._reader.holds(key)}
        self._surplus -= over
        for trainer, here in self.taker.here.items() if over else ():
            for number, group in list(here.items()):
                if self._reader.key_of(group) in over:
                    self.taker.give_back(trainer, number)

    def look(self, now_s: float) -> list[_NodeRow] | None:
        """Read the requests' states, before the ring is read; None while no trainer asks."""
        if now_s < self._next_s or not self._told:
            return None
        self._next_s = now_s + _LOOK_S
        return self._rows()

    def say(self, rows: list[_NodeRow], now_s: float) -> list[tuple[str, Demand]]:
        """Return Demands by address, after everything from before the look was read."""
        open_, claimed = sum(row.open for row in rows), sum(row.claimed for row in rows)
        if claimed or not open_:
            self._busy_s = now_s
        elif now_s - self._busy_s > _IDLE_S:
            for row in rows:
                if not row.done:
                    self.taker.give_back(row.trainer, row.there)
        wants = 0
        if not open_ and _core.request_wanted(self._segment) and self._bus.paused is None:
            wants = max(1, claimed)  # the number of samples in workers' hands
        said, holds, key_of = [], self._reader.holds, self._reader.key_of
        for trainer, (address, before, told_s) in self._told.items():
            ended = {
                row.there
                for row in rows
                if row.trainer == trainer and row.done and not holds(key_of(row.group))
            }
            what = (list(self.taker.here.get(trainer, ())), ended, wants)
            if what != before or now_s - told_s >= _AGAIN_S:
                self._told[trainer] = (address, what, now_s)
                said.append((address, self.taker.say(trainer, ended, wants)))
        return said

    # -- the lane --------------------------------------------------------------------------------

    def _rows(self) -> list[_NodeRow]:
        table = _core.request_rows(self._segment)
        self._known = {
            each[1]: self._known.get(each[1]) or self._learn(*each[:2]) for each in table
        }
        return [_NodeRow(*self._known[n], *counts) for _, n, _, *counts in table]

    def _learn(self, row: int, number: int) -> tuple[str, int, GroupName]:
        text = _core.request_text(self._segment, row, number)
        if text is not None and len(text[8]) - text[7] >= _TAIL.size:
            word, trainer, there = _TAIL.unpack_from(text[8], len(text[8]) - _TAIL.size)
            if word == _TAIL_WORD:
                return trainer.hex(), there, text[:3]
        return "", 0, ("", None, "")

    def _offer(self, trainer: str, offer: PromptOffer, prompt: bytes) -> bool:
        """Offer a request; return False without room."""
        data = prompt + _TAIL.pack(_TAIL_WORD, bytes.fromhex(trainer), offer.number)
        _, (id_, round, label), size, need, level, _ = offer
        split, key = number_of(self._segment, label), self._reader.key_of(offer.group)
        # Before the request appears: the reader ends requests not relayed.
        self._reader.relayed.add(key)
        done, status = 0, -2
        if split < _core.MAX_SPLITS:
            done, status = _core.request_offer(
                self._segment, [(id_.encode(), round, split, size, need, level, data)], 0
            )
        if status == -2:
            _log.error(
                "bus %r: there is never room for the request %r, of %d bytes and split %r: it "
                "waits until the bus is made again, with more request_capacity or fewer splits",
                self._bus.name, id_, len(data), label,
            )  # fmt: skip
        elif not done:
            self._reader.relayed.discard(key)
        return bool(done) or status == -2
