"""Requests of trainers' buses on other nodes: owners, transfers and ends.

Invariants:

- A whole request lies with a single source at a time: its samples share a prompt and a prefix
  cache.
- The trainer's lane records a request as sent, and a source's lane records it as present. A
  starting sink sends no sent request again before every source has reported.
- A source keeps a request until the sink ends it. A source that took the message but lacks the
  request has refused or returned it: another source may get the request.
- A source takes only messages addressed to its incarnation, by growing marks: nothing begins twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shmbus.relay.messages import Demand, GroupName, Mark, PromptOffer, Prompts

_NEVER: Mark = (-1, -1)


class PromptRow(NamedTuple):
    """An open request of the trainer's bus: `sent` to another node, or `untouched` by anybody."""

    size: int
    need: int
    level: int
    done: int
    sent: bool
    untouched: bool


Rows: TypeAlias = Mapping[int, PromptRow]


class PromptSender:
    """The side beside a trainer's bus: gives requests to sources with idle workers."""

    def __init__(self, trainer: str, incarnation: int) -> None:
        self.trainer = trainer
        self.incarnation = incarnation
        self.number = 0
        #: By number of the request: its source; and the number of the message with the request.
        self.at: dict[int, str] = {}
        self.sent: dict[int, int] = {}
        #: By present source: number of the last message with prompts; and newest Demand.
        self.asked: dict[str, int] = {}
        self.heard: dict[str, Demand] = {}
        self.complete = False

    def peers(self, buses: Collection[str], *, complete: bool) -> None:
        """Learn the present sources: requests of a lost source are free again."""
        self.complete = complete
        self.asked = {bus: self.asked.get(bus, 0) for bus in buses}
        if complete:
            self.heard = {bus: word for bus, word in self.heard.items() if bus in buses}
            self.at = {number: bus for number, bus in self.at.items() if bus in buses}

    def demand(self, word: Demand) -> bool:
        """Update a source's state. Return False if the message is old or the source unknown."""
        bus, before = word.bus, self.heard.get(word.bus)
        if bus not in self.asked or (before is not None and word.mark <= before.mark):
            return False
        if word.answers[0] != self.incarnation:
            # From before this sink's first message: another source may hold the requests now.
            word = word._replace(here=(), ended=())
        self.heard[bus] = word
        for number in [n for n, at in self.at.items() if at == bus and n not in word.here]:
            # Otherwise the message with the request may still arrive.
            if self.sent.get(number, 0) <= self._answered(bus):
                del self.at[number]
        for number in word.here:
            self.at.setdefault(number, bus)
        return True

    def _answered(self, bus: str) -> int:
        """Return the number of the last message taken by a source; -1 for none of this sink."""
        answers = self.heard[bus].answers if bus in self.heard else _NEVER
        return answers[1] if answers[0] == self.incarnation else -1

    def ended(self, rows: Rows) -> list[int]:
        """Return requests that can bring no samples. `rows` must be newer than every Demand."""
        return [
            number
            for bus, word in self.heard.items()
            for number in word.ended
            if self.at.get(number) == bus and number in rows and not rows[number].done
        ]

    def share(self, rows: Rows, room: int | None) -> list[tuple[str, list[int], list[int]]]:
        """Return ended and new requests by source; `room` limits the groups that may begin."""
        self.sent = {n: number for n, number in self.sent.items() if n in self.at}
        chosen = self._choose(rows, room)
        going_on = {number for number, row in rows.items() if row.done < row.need}
        found = []
        for bus in self.asked.keys() & self.heard.keys():
            here = self.heard[bus].here
            over = [n for n in here if n not in going_on or self.at.get(n) != bus]
            if over or bus in chosen:
                found.append((bus, over, chosen.get(bus, [])))
        return found

    def _choose(self, rows: Rows, room: int | None) -> dict[str, list[int]]:
        wants = {
            bus: word.wants if room is None else min(word.wants, 1)
            for bus, word in self.heard.items()
            # A Demand from before the last message misses the prompts of the last message.
            if word.wants and bus in self.asked and self._answered(bus) >= self.asked[bus]
        }
        chosen: dict[str, list[int]] = {}
        for number in self._free(rows) if wants else ():
            if room is not None and not rows[number].sent:
                room -= 1
                if room < 0:
                    continue
            bus = min(wants, key=lambda bus: (wants[bus] <= 0, bus in chosen, -wants[bus], bus))
            if wants[bus] <= 0:
                break
            chosen.setdefault(bus, []).append(number)
            wants[bus] -= rows[number].size
        return chosen

    def _free(self, rows: Rows) -> list[int]:
        """Return the free requests, in the lane's order."""
        all_heard = self.complete and all(self._answered(bus) >= 0 for bus in self.asked)
        free = [
            number
            for number, row in rows.items()
            if number not in self.at and (all_heard and not row.done if row.sent else row.untouched)
        ]
        return sorted(free, key=lambda number: (-rows[number].level, number))

    def say(self, bus: str, over: Sequence[int], offers: Sequence[PromptOffer]) -> Prompts:
        """Make the next message to a source; the lane already records the offers as sent."""
        self.number += 1
        for offer in offers:
            self.at[offer.number], self.sent[offer.number] = bus, self.number
            self.asked[bus] = self.number
        life = self.heard[bus].mark[0] if bus in self.heard else -1
        mark = (self.incarnation, self.number)
        return Prompts(bus, self.trainer, life, mark, tuple(over), tuple(offers))


class PromptTaker:
    """The side beside a rollout node's bus: offers received requests to workers until their end."""

    def __init__(
        self,
        bus: str,
        incarnation: int,
        found: Collection[tuple[str, int, GroupName]],
        offer: Callable[[str, PromptOffer, bytes], bool],
        end: Callable[[GroupName], None],
    ) -> None:
        self.bus = bus
        self.incarnation = incarnation
        self.number = 0
        self._offer, self._end = offer, end  # `offer` returns False without room
        #: By trainer's bus: groups of present requests by number; and the newest message.
        self.here: dict[str, dict[int, GroupName]] = {trainer: {} for trainer, _, _ in found}
        self.taken: dict[str, Mark] = {}
        for trainer, number, group in found:
            self.here[trainer][number] = group

    def take(self, message: Prompts, prompts: Sequence[bytes]) -> bool:
        """Offer new requests, end old ones; return False for a late message, without effect."""
        trainer = message.trainer
        if message.mark <= self.taken.get(trainer, _NEVER):
            return False
        self.taken[trainer] = message.mark
        if message.incarnation == self.incarnation:
            for number in message.over:
                self.give_back(trainer, number)
            groups = {group for those in self.here.values() for group in those.values()}
            here = self.here.setdefault(trainer, {})
            for offer, prompt in zip(message.offers, prompts, strict=True):
                # Otherwise a repeat, or another request of a living group.
                if offer.group not in groups and self._offer(trainer, offer, prompt):
                    here[offer.number] = offer.group
        return True

    def give_back(self, trainer: str, number: int) -> None:
        """Stop the making of a request's samples here."""
        if number in self.here.get(trainer, {}):
            self._end(self.here[trainer].pop(number))

    def say(self, trainer: str, ended: Collection[int], wants: int) -> Demand:
        """Make a Demand for a trainer's bus; `ended` requests were answered and released."""
        self.number += 1
        here = tuple(self.here.get(trainer, ()))
        mark, answers = (self.incarnation, self.number), self.taken.get(trainer, _NEVER)
        gone = tuple(number for number in here if number in ended)
        return Demand(self.bus, trainer, mark, answers, here, gone, wants)
