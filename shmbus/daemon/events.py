"""What happened on a bus, kept for whoever asks: a bounded history.

Invariants:

- Bounded: the oldest is forgotten first. What happens to groups, thousands of times a second, does
  not push out who came and who died. Policy versions that follow each other are one event.
- Nothing is decided by it. Noting costs a tuple in a list, and texts are made when somebody asks.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from shmbus import limits
from shmbus._keys import split_key
from shmbus.inspect.view_types import BusEvent
from shmbus_ext import _core

__all__ = ["Events", "ProducerWatch"]

#: Events that are kept of groups: some seconds at full speed, days of a run that takes minutes a
#: step. And of all else.
GROUP_EVENTS: Final = 8192
OTHER_EVENTS: Final = 1024


class _Noted(NamedTuple):
    number: int
    unix_s: float
    kind: str
    who: str
    text: str
    key: Hashable
    sample: int | None
    amount: int
    #: Of a run of policy versions: the first, and the number that its event had.
    first: str = ""
    since: int = 0


class Events:
    """The history of one daemon.

    Parameters
    ----------
    segment : Segment
        The bus, for the labels of splits.
    """

    def __init__(self, segment: _core.Segment) -> None:
        self._segment = segment
        self._numbers = itertools.count(1)
        self._newest = 0
        self._groups: deque[_Noted] = deque(maxlen=GROUP_EVENTS)
        self._others: deque[_Noted] = deque(maxlen=OTHER_EVENTS)
        #: Numbers and texts of events that went into a later one.
        self._joined: deque[tuple[int, str]] = deque(maxlen=OTHER_EVENTS)

    def note(self, kind: str, who: str = "", text: str = "") -> None:
        """Note something that is of no group."""
        self._newest = next(self._numbers)
        self._others.append(_Noted(self._newest, time.time(), kind, who, text, None, None, 0))

    def note_version(self, version: int) -> None:
        """Note a policy version; one right behind a lower one is the same event."""
        before = self._others[-1] if self._others else None
        if before is None or before.kind != "policy_version" or int(before.text) >= version:
            self.note("policy_version", text=str(version))
            return
        self._joined.append((before.number, before.text))
        self._newest = next(self._numbers)
        self._others[-1] = before._replace(
            number=self._newest,
            unix_s=time.time(),
            text=str(version),
            first=before.first or before.text,
            since=before.since or before.number,
        )

    def note_group(
        self,
        kind: str,
        key: Hashable,
        who: str = "",
        text: str = "",
        *,
        index: int | None = None,
        count: int = 0,
    ) -> None:
        """Note what happened to a group, or to one of its samples."""
        self._newest = next(self._numbers)
        self._groups.append(_Noted(self._newest, time.time(), kind, who, text, key, index, count))

    def read(
        self, after: int, limit: int, *, groups: bool = True
    ) -> tuple[list[BusEvent], int, int]:
        """Return events behind a number.

        Parameters
        ----------
        after : int
            The number of the last that is known; 0 for none.
        limit : int
            How many at most; the newest.
        groups : bool
            Whether those of groups and samples are among them.

        Returns
        -------
        events : list[BusEvent]
            Oldest first.
        newest : int
            To go on from.
        missed : int
            Events behind `after` that are not among them.
        """
        if after > self._newest:
            after = 0  # a number of an earlier daemon
        found = _newest_of(self._others, after, limit)
        if groups:
            found += _newest_of(self._groups, after, limit)
        found.sort()
        shown = found[-limit:]
        joined = sum(number > after for number, _ in self._joined)
        missed = self._newest - after - len(shown) - joined
        return [self._told(each, after) for each in shown], self._newest, missed

    def of_group(self, key: Hashable, limit: int) -> list[BusEvent]:
        """Return the newest events of one group, oldest first."""
        found = [each for each in self._groups if each.key == key]
        return [self._told(each) for each in found[-limit:]]

    def _text(self, noted: _Noted, after: int) -> str:
        """Of a run of versions: those behind a number."""
        if noted.since > after:
            return f"{noted.first} to {noted.text}"
        newer = (text for number, text in self._joined if after < number < noted.number)
        first = next(newer, noted.text) if noted.since else noted.text
        return noted.text if first == noted.text else f"{first} to {noted.text}"

    def _told(self, noted: _Noted, after: int = 0) -> BusEvent:
        key, round, split = ("", None, _core.SPLIT_TRAIN)
        if noted.key is not None:
            key, round, split = split_key(noted.key)
        return BusEvent(
            number=noted.number,
            unix_s=noted.unix_s,
            kind=noted.kind,
            who=noted.who,
            text=self._text(noted, after)[: limits.FAIL_REASON_CHARS],
            instance_id=key,
            round=round,
            split=_core.split_label(self._segment, split),
            index=noted.sample,
            count=noted.amount,
        )


def _newest_of(events: deque[_Noted], after: int, limit: int) -> list[_Noted]:
    newer = itertools.takewhile(lambda each: each.number > after, reversed(events))
    return list(itertools.islice(newer, limit))


class ProducerWatch:
    """Tells which producers came and went between two looks at their slots."""

    def __init__(self) -> None:
        self._epoch = -1
        self._deaths = 0
        #: Slot by producer number: its name, and whether it had closed.
        self._known: dict[int, tuple[str, bool]] = {}

    def name(self, number: int) -> str:
        """Name a producer, as of the last look."""
        return self._known[number][0] if number in self._known else f"producer {number}"

    def look(self, segment: _core.Segment, deaths: int) -> Iterable[tuple[str, str]]:
        """Compare the slots with the last look; costs a load where nobody came or went.

        Parameters
        ----------
        segment : Segment
            The bus.
        deaths : int
            Producers that the collector has reaped while they were attached, so far.

        Returns
        -------
        iterable of (str, str)
            The kind of an event, and who.
        """
        if segment.attach_epoch == self._epoch:
            return ()
        self._epoch = segment.attach_epoch
        rows = segment.producers()
        now = {
            row[2]: (f"{row[4] or f'producer {row[2]}'} (pid {row[3]})", row[1])
            for row in rows
            if row[2]
        }
        return list(self._changes(now, deaths))

    def _changes(self, now: dict[int, tuple[str, int]], deaths: int) -> Iterable[tuple[str, str]]:
        attached = {number: who for number, (who, state) in now.items() if state != _FREE}
        gone = [
            who for number, (who, closed) in self._known.items()
            if number not in attached and not closed
        ]  # fmt: skip
        # A slot that is free again does not say how its owner ended; the count of deaths may.
        ended = "producer_died" if deaths - self._deaths >= len(gone) else "producer_gone"
        self._deaths = deaths
        for who in gone:
            yield ended, who
        for number, who in attached.items():
            closed = now[number][1] == _core.SLOT_CLOSED
            known = self._known.get(number)
            if known is None:
                yield "producer_came", who
            if closed and (known is None or not known[1]):
                yield "producer_left", who
        self._known = {
            number: (who, now[number][1] == _core.SLOT_CLOSED) for number, who in attached.items()
        }


_FREE = 0
