"""The coordinator: groups heads and places complete groups on sinks, without state of its own.

Invariants:

- An origin has a single place here: in the stash, assigned to a sink (a lease of the stash), or
  taken.
- The coordinator places nothing before every sink has reported its settled and owed records. From
  then on a sink refuses assignments of an earlier coordinator, so no record is assigned twice.
- The tombstone of a taken record stays until an announcement as new as the record's release. A late
  announcement still names released records; the tombstone hides them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence

import msgspec

from shmbus.data.keys import split_of
from shmbus.relay.messages import (
    Announcement,
    Assignment,
    Confirmation,
    Drop,
    GroupName,
    Mark,
    Message,
    MissingSample,
    Origin,
    Returned,
    Settled,
    SinkState,
    SinkStateWanted,
    Subscription,
    Unanswered,
    Wanted,
    bus_of,
    by_bus,
    is_of,
    unpack_heads,
)
from shmbus.relay.retry_rows import RetryRequests
from shmbus.relay.splits import Splits
from shmbus.stash.failures import FailingGroup
from shmbus.stash.stash import Stash, StashPolicy
from shmbus_ext._core import SPLIT_TRAIN, GroupEntry, OriginHead

#: Above every limit of a bus or stash.
_ALL = 1 << 30
#: The reason told to a trainer for a missing sample.
_NOT_COMING = "not there when the time of its group was over"


class SinkView(msgspec.Struct):
    """The coordinator's knowledge of a sink."""

    incarnation: int = -1
    heard: bool = False
    #: Bytes assigned and not put, and bytes of every group placed here; `placed` counts as at most
    #: a window behind the other sinks.
    bytes: int = 0
    placed: int = 0
    #: The bus's limits: bytes of a record, bytes of a group, records of a group.
    largest: tuple[int, int, int] = (_ALL << 30, _ALL << 30, _ALL)
    #: Labels of the bus's splits.
    splits: tuple[str, ...] = ()
    leases: dict[frozenset[Origin], GroupEntry[OriginHead]] = {}
    #: Bytes of each leased group.
    weights: dict[frozenset[Origin], int] = {}
    #: Records owed to an earlier coordinator; no journal lists them.
    owed: frozenset[Origin] = frozenset()

    def has_room(self, window_bytes: int) -> bool:
        """Return True if the sink may get more; a first group always fits."""
        return not self.leases or self.bytes < window_bytes

    def lease(self, origins: frozenset[Origin], group: GroupEntry[OriginHead], weight: int) -> None:
        """Assign a group to the sink."""
        self.leases[origins], self.weights[origins] = group, weight
        self.bytes += weight
        self.placed += weight

    def end_lease(self, origins: frozenset[Origin]) -> GroupEntry[OriginHead]:
        """End an assignment; `placed` keeps the bytes."""
        self.bytes -= self.weights.pop(origins)
        return self.leases.pop(origins)

    def takes(self, sizes: Sequence[int], weight: int) -> bool:
        """Return True if the sink's bus can ever hold a group of these sizes."""
        record, whole, count = self.largest
        return len(sizes) <= count and weight <= whole and max(sizes) <= record


def choose_dropper(sinks: Mapping[str, SinkView]) -> str | None:
    """Return the sink with the largest journal, to write down dropped groups."""
    heard = [name for name in sorted(sinks) if sinks[name].heard]
    return max(heard, key=lambda name: sinks[name].largest[2], default=None)


def journal_parts(
    sinks: Mapping[str, SinkView], whole: Sequence[Origin]
) -> list[tuple[Origin, ...]]:
    """Cut a group into parts that fit such a journal: nearly always a single part."""
    most = max([1, *(view.largest[2] for view in sinks.values())])
    return [tuple(whole[at : at + most]) for at in range(0, len(whole), most)]


#: Bytes assigned to a sink and not put yet: a few blocks, to fetch a block while putting the last.
WINDOW_BYTES = 128 << 20

#: Groups placed together, the heaviest first: 256 make the sums nearly equal.
PLACED_AT_ONCE = 256

_NBYTES = operator.attrgetter("nbytes")
_ORIGIN = operator.attrgetter("origin")
_CHECK = operator.attrgetter("check")
#: Before the first announcement.
_NEVER: Mark = (-1, -1)


class Coordinator:
    """Groups the heads of every source, and has each complete group put by a single sink."""

    def __init__(
        self,
        term: int,
        buses: Sequence[str],
        sinks: Sequence[str],
        policy: StashPolicy | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.term = term
        self.buses = dict.fromkeys(buses)
        #: Sorted buses with news, or None after a change.
        self._heard: tuple[str, ...] | None = None
        self.stash: Stash[OriginHead] = Stash(policy)
        #: The split numbers used in keys.
        self.splits = Splits()
        #: Heads in the stash, leased or not, and no more.
        self.known: dict[Origin, OriginHead] = {}
        #: By bus: its machine's clock minus the local clock, to compare heads.
        self.clocks_ns: dict[str, int] = {}
        self.newest: dict[str, Mark] = {}
        #: Origins placed for good or dropped, with the mark of their release once known.
        self.taken: dict[Origin, Mark | None] = {}
        #: The same by bus and mark.
        self._due: dict[str, dict[Mark, list[Origin]]] = {}
        #: By assigned origin: the sink and the group.
        self.assigned: dict[Origin, tuple[str, frozenset[Origin]]] = {}
        #: Dropped by a policy, and not in a sink's journal yet.
        self.dropped: dict[tuple[Origin, ...], str] = {}
        #: Count of drops by reason.
        self.drops: Counter[str] = Counter()
        #: Taken origins whose release may never be confirmed, after a sink's death or a new
        #: coordinator's start.
        self.doubtful: set[Origin] = set()
        self.sinks = {name: SinkView() for name in sinks}
        #: Taken origins owed by a dead sink to an earlier coordinator, or given back by a sink;
        #: with the number of the question that asks their source for them.
        self.orphans: dict[Origin, int] = {}
        self._question = 0
        #: Failed samples, and the sources whose producers should repeat them.
        self.retries = RetryRequests(self.stash.failures, self.splits)
        self.policy_version = 0
        self._too_large: list[GroupEntry[OriginHead]] = []
        self._window = window_bytes

    def begin(self) -> list[Message]:
        """Ask every sink and source for its state."""
        return [
            *self.ask_sinks(),
            *(Subscription(bus, self.term, self._question) for bus in self.buses),
        ]

    def meet(self, bus: str) -> Subscription:
        """Take on a new source."""
        self.buses[bus] = None
        self._heard = None
        return Subscription(bus, self.term)

    def ask_sinks(self) -> list[Message]:
        """Ask the sinks without an answer."""
        return [
            SinkStateWanted(name, self.term) for name, view in self.sinks.items() if not view.heard
        ]

    # -- sources ---------------------------------------------------------------------------------

    def announced(self, message: Announcement, now_s: float) -> list[Message]:
        """Take a source's announcement unless stale; ProtocolError for an invalid announcement."""
        bus, mark = message.bus, message.mark
        newest = self.newest.get(bus, _NEVER)
        if not self._is_news(mark, newest):
            return []
        if not message.whole and mark != (newest[0], newest[1] + 1):
            return self._ask([bus])  # an announcement was lost
        splits = bytes(map(self.splits.number, message.splits))
        heads = unpack_heads(bus, message.heads, self.clocks_ns.get(bus, 0), splits)
        if bus not in self.newest:
            self._heard = None
        self.newest[bus] = mark
        if message.whole:
            self._take_whole(message, heads, now_s)
        new = {head.origin: head for head in heads}
        for origin in new.keys() & self.known.keys() | new.keys() & self.taken.keys():
            if origin in self.known or self._is_taken(origin):
                del new[origin]
        # Only now, because this announcement may be exactly as old as a release, and name its
        # records.
        due = self._due.get(bus, {})
        for old in [each for each in due if each <= mark]:
            for origin in due.pop(old):
                self._forget_if_old(origin)
        self.known.update(new)
        self.stash.add(list(new.values()), now_s)
        return [*self.drop_discards(), *self.place()]

    def _take_whole(self, message: Announcement, heads: Iterable[OriginHead], now_s: float) -> None:
        """Forget records missing from a source's whole announcement."""
        bus, named = message.bus, {head.origin: head for head in heads}
        gone = {o for o in self.known if is_of(o, bus) and o not in named}
        self._withdraw(gone - self.assigned.keys(), now_s)
        for origin in [o for o in self.taken if is_of(o, bus) and o not in named]:
            del self.taken[origin]  # released, and older announcements are refused
        self._adopt(message, named)

    def _adopt(self, message: Announcement, named: dict[Origin, OriginHead]) -> None:
        """Readmit orphans that their source still held after the orphaning."""
        term, question = message.answers
        for origin in [each for each in self.orphans if is_of(each, message.bus)]:
            if term == self.term and question >= self.orphans[origin]:
                del self.orphans[origin]
                if origin in named and self.taken.get(origin, _NEVER) is None:
                    del self.taken[origin]
                    # The group may have been complete here before the sink's message.
                    self.stash.table.recent.pop(named[origin].key, None)

    def _orphan(self, origins: Iterable[Origin]) -> list[Message]:
        """Ask sources for the still held records among these: no sink will put them."""
        left = {o for o in origins if o not in self.known and self.taken.get(o, _NEVER) is None}
        if not left:
            return []
        self._question += 1
        self.orphans.update(dict.fromkeys(left, self._question))
        return self._ask({bus_of(origin) for origin in left})

    def _ask(self, buses: Iterable[str]) -> list[Message]:
        return [Subscription(bus, self.term, self._question) for bus in sorted(buses)]

    def _is_news(self, mark: Mark, newest: Mark) -> bool:
        return mark > newest

    def _is_taken(self, origin: Origin) -> bool:
        return origin in self.taken

    def _take(self, origin: Origin, mark: Mark | None) -> None:
        """Keep a tombstone of a placed record until no earlier announcement of it can arrive."""
        if mark is not None or origin not in self.taken:
            self.taken[origin] = mark
        if mark is not None:
            self._due.setdefault(bus_of(origin), {}).setdefault(mark, []).append(origin)
        self._forget_if_old(origin)

    def _forget_if_old(self, origin: Origin) -> None:
        mark = self.taken.get(origin)
        if mark is not None and self.newest.get(bus_of(origin), _NEVER) >= mark:
            del self.taken[origin]

    def source_lost(self, bus: str, now_s: float) -> frozenset[Origin]:
        """Withdraw a lost source's heads, and return the origins without a fetch."""
        lost = frozenset(o for o in self.known if is_of(o, bus) and o not in self.assigned)
        self._withdraw(lost, now_s)
        return lost

    def forget_source(self, bus: str, now_s: float) -> frozenset[Origin]:
        """Forget a source for good, and return the origins without a fetch."""
        samples = [
            head for head in self.known.values()
            if is_of(head.origin, bus) and head.origin not in self.assigned and not head.failed
        ]  # fmt: skip
        lost = self.source_lost(bus, now_s)
        self._fail_lost(samples, now_s)
        self.newest.pop(bus, None)
        self._due.pop(bus, None)
        self.orphans = {o: question for o, question in self.orphans.items() if not is_of(o, bus)}
        self.buses.pop(bus, None)
        self._heard = None
        for origin in [each for each in self.taken if is_of(each, bus)]:
            del self.taken[origin]
        for whole in [each for each in self.dropped if any(is_of(o, bus) for o in each)]:
            left = tuple(origin for origin in whole if not is_of(origin, bus))
            reason = self.dropped.pop(whole)
            if left:
                self.dropped[left] = reason
        return lost

    def drop_discards(self) -> list[Message]:
        """Have sources release records dropped by a policy; their payload goes nowhere."""
        said: list[Message] = []
        for discard in self.stash.take_discards():
            said += self._drop([sample.origin for sample in discard.samples], discard.reason)
        return said

    def _drop(self, origins: list[Origin], reason: str) -> list[Message]:
        """Drop a group, or a sample alone, through the journal of a sink."""
        for origin in origins:
            self.known.pop(origin, None)
            self._take(origin, None)
        wholes = journal_parts(self.sinks, sorted(origins))
        self.dropped.update(dict.fromkeys(wholes, reason))
        return self._drop_at(choose_dropper(self.sinks), wholes)

    def _drop_at(self, sink: str | None, wholes: Iterable[tuple[Origin, ...]]) -> list[Message]:
        if sink is None:
            return []
        incarnation = self.sinks[sink].incarnation
        return [Drop(sink, incarnation, self.term, self.dropped[whole], whole) for whole in wholes]

    def drop_again(self) -> list[Message]:
        """Repeat the drops; sinks ignore known drops, and sources ignore released records."""
        return self._drop_at(choose_dropper(self.sinks), sorted(self.dropped))

    def _written_down(self, origins: frozenset[Origin]) -> None:
        """Stop repeating drops recorded in a sink's journal."""
        for whole in [each for each in self.dropped if not origins.isdisjoint(each)]:
            self.drops[self.dropped[whole]] += len(whole)
            del self.dropped[whole]

    # -- sinks -----------------------------------------------------------------------------------

    def sink_state(self, message: SinkState, now_s: float) -> list[Message]:
        """Take a sink's state; place its lost assignments again."""
        view = self.sinks[message.sink]
        if message.incarnation <= view.incarnation:
            return []
        if message.term != self.term:
            return [SinkStateWanted(message.sink, self.term)]
        view.incarnation = message.incarnation
        view.heard = True
        has = message.settled | message.owed
        orphans, view.owed = view.owed - has, message.owed
        for origins in list(view.leases):
            weight = view.weights[origins]
            samples = self._end_lease(view, origins)
            if origins & has or len(samples) < len(origins):
                # A sink puts a group whole: a confirmed or present member proves the rest.
                for sample in samples:
                    self._take(sample.origin, None)
            else:
                view.placed -= weight
                self._put_back(samples, now_s)
        self._withdraw(has.intersection(self.known), now_s)
        for origin in has:
            self._take(origin, None)
        self._written_down(message.settled)
        # No sink repeats records confirmed before this message, or lost with the sink.
        self.doubtful.update(self.taken)
        asked = self._orphan(orphans)
        return [*asked, *self.drop_discards(), *self.drop_again(), *self.place()]

    def ask_sources_again(self) -> list[Message]:
        """Ask sources for their records where the answer proves releases."""
        self.doubtful &= {origin for origin, mark in self.taken.items() if mark is None}
        return self._ask({bus_of(origin) for origin in (*self.doubtful, *self.orphans)})

    def _end_lease(self, view: SinkView, origins: frozenset[Origin]) -> list[OriginHead]:
        """End an assignment, and return the heads not confirmed as released."""
        entry = view.end_lease(origins)
        for origin in origins:
            self.assigned.pop(origin, None)
        self.stash.reports.pop(entry, None)  # the reports count among the origins
        self.stash.end_lease(entry)
        found = [self.known.pop(origin, None) for origin in origins]
        return [sample for sample in found if sample is not None]

    def _groups_at(self, sink: str, origins: Iterable[Origin]) -> list[frozenset[Origin]]:
        """Return the distinct groups assigned to a sink and containing any of these origins."""
        found = {id(each): each for each in map(self.assigned.get, origins)}
        return [each[1] for each in found.values() if each is not None and each[0] == sink]

    def _unassigned(self, origins: Iterable[Origin]) -> set[Origin]:
        """Return the origins in the stash and at no sink."""
        return {o for o in origins if o in self.known and o not in self.assigned}

    def _put_back(self, samples: Iterable[OriginHead], now_s: float) -> None:
        """Group heads again after a lease without a put."""
        again = [sample for sample in samples if not self._is_taken(sample.origin)]
        self.known.update((sample.origin, sample) for sample in again)
        self._regroup(again, now_s)

    def settled(self, message: Settled, now_s: float) -> list[Message]:
        """Record a sink's puts."""
        view = self.sinks[message.sink]
        for origins in self._groups_at(message.sink, message.origins):
            # A dead sink had put the rest, and its successor may never confirm.
            for sample in self._end_lease(view, origins):
                self.taken.setdefault(sample.origin, None)
        # The rest was confirmed earlier, or is in the sink's state on its way.
        known = self.known.keys() & message.origins
        self._withdraw(self._unassigned(known), now_s)
        for origin in known:
            self.taken.setdefault(origin, None)
        self._written_down(message.origins)
        view.owed -= message.origins
        return self.place()

    def returned(self, message: Returned, now_s: float) -> list[Message]:
        """Take back a group after a sink failed to get a part: the rest waits again."""
        view = self.sinks[message.sink]
        gone = dict(message.gone)
        samples: list[OriginHead] = []
        for origins in self._groups_at(message.sink, gone):
            view.placed -= view.weights[origins]
            samples += self._end_lease(view, origins)
        self._withdraw(self._unassigned(gone), now_s)
        for origin, mark in gone.items():
            self._take(origin, mark)
        self._put_back([s for s in samples if s.origin not in gone], now_s)
        view.owed -= gone.keys() | message.rest
        asked = self._orphan(message.rest)
        return [*asked, *self.drop_discards(), *self.place()]

    def confirmed(self, message: Confirmation, now_s: float) -> list[Message]:
        """Record a source's releases until its announcements are as new."""
        bus, mark = message.bus, message.mark
        if known := self.known.keys() & message.origins:
            self._withdraw(self._unassigned(known), now_s)
            for origin in known:
                self.known.pop(origin, None)
        if self.newest.get(bus, _NEVER) >= mark:
            for origin in message.origins:
                self.taken.pop(origin, None)
        else:
            self.taken.update(dict.fromkeys(message.origins, mark))
            self._due.setdefault(bus, {}).setdefault(mark, []).extend(message.origins)
        return []

    def lacks_news(self, bus: str, mark: Mark) -> bool:
        """Return True if no announcement with this mark or a later mark has come."""
        return mark > self.newest.get(bus, _NEVER)

    def ask_source(self, bus: str) -> list[Message]:
        """Have a source announce everything held."""
        return self._ask([bus])

    def ask_who_holds_less(self, held: Mapping[str, int]) -> list[Message]:
        """Ask sources with fewer records than known here for a whole announcement."""
        believed = [*self.known, *(o for o, mark in self.taken.items() if mark is None)]
        return self._ask({bus for bus, o in by_bus(believed) if len(o) > held.get(bus, len(o))})

    # -- failed samples --------------------------------------------------------------------------

    def ask_producers(self, now_s: float) -> list[Message]:
        """Have producers repeat newly failed samples, and cancel the ones already here."""
        if self._heard is None:
            self._heard = tuple(sorted(bus for bus in self.buses if bus in self.newest))
        changed = self.retries.update(self._heard, now_s)
        return [self.retries.wanted(bus, self.term) for bus in sorted(changed)]

    def wanted_of(self, bus: str, confirmed: tuple[int, int]) -> list[Wanted]:
        """Repeat a source's list unless the source confirmed the newest list."""
        if bus not in self.newest or confirmed == (self.term, self.retries.number(bus)):
            return []
        return [self.retries.wanted(bus, self.term)]

    def unanswered(self, message: Unanswered, now_s: float) -> list[Message]:
        """Count an attempt as failed: its producer died before a put."""
        request = self.retries.find(message.bus, message.sample)
        if request is None:
            return []
        self.stash.fail_request(request, message.sample.reason, now_s)
        return [*self.drop_discards(), *self.ask_producers(now_s), *self.place()]

    # -- placing ---------------------------------------------------------------------------------

    def place(self) -> list[Message]:
        """Assign complete groups, the heaviest first, each to the sink with the fewest bytes."""
        # Bytes under way tell nothing at a low rate: each group is put before the next comes.
        if not all(view.heard for view in self.sinks.values()):
            return []
        said: list[Message] = []
        # The training split last, because its groups may exceed the room for ever.
        for split in reversed(range(len(self.splits.labels))):
            said += self._place(split, self._sinks_of(split))
        return [*said, *self.drop_discards()]

    def _sinks_of(self, split: int) -> list[str]:
        """Return the sinks for a split: all for "train", else the first if its bus has it."""
        if split == SPLIT_TRAIN:
            return list(self.sinks)
        label = self.splits.labels[split]
        return [name for name in list(self.sinks)[:1] if label in self.sinks[name].splits]

    @property
    def unplaced(self) -> list[str]:
        """Labels of splits with complete groups, unknown to the first sink's bus."""
        count, numbers = self.stash.table.counts, range(len(self.splits.labels))
        waiting = [self.splits.labels[n] for n in numbers if count(n)[2] and not self._sinks_of(n)]
        return [*waiting, *sorted(self.splits.left_out)]

    def _place(self, split: int, sinks: Sequence[str]) -> list[Message]:
        open_ = {name for name in sinks if self.sinks[name].has_room(self._window)}
        said: list[Message] = []
        while open_ and (groups := self._lease_for(open_, split)):
            for weight, group in sorted(groups, key=lambda each: each[0], reverse=True):
                sizes = list(map(_NBYTES, self._records(group)))
                takers = [name for name in sinks if self.sinks[name].takes(sizes, weight)]
                if not takers:
                    said += self._refuse(group)
                    continue
                takers = [
                    name for name in takers if self.sinks[name].has_room(self._window)
                ] or takers
                name = min(takers, key=lambda each: (self.sinks[each].placed, each))
                said.append(self._assign(name, group, weight))
            open_ = {name for name in open_ if self.sinks[name].has_room(self._window)}
        return said

    def _lease_for(
        self, open_: Iterable[str], split: int
    ) -> list[tuple[int, GroupEntry[OriginHead]]]:
        """Take groups with their bytes while these sinks have room, and a last group beyond."""
        room = sum(self._window - self.sinks[name].bytes for name in open_)
        groups: list[tuple[int, GroupEntry[OriginHead]]] = []
        while len(groups) < PLACED_AT_ONCE and (not groups or room > 0):
            found = self.stash.lease(1, self.policy_version, split)
            if not found:
                break
            groups.append((sum(map(_NBYTES, self._records(found[0]))), found[0]))
            room -= groups[-1][0]
        return groups

    def _refuse(self, group: GroupEntry[OriginHead]) -> list[Message]:
        """Drop a group too large for every bus; waiting for room would never end."""
        origins = [sample.origin for sample in self._records(group)]
        self.stash.reports.pop(group, None)
        self.stash.end_lease(group)
        self._too_large.append(group)
        return self._drop(origins, "malformed")

    def take_too_large(self) -> list[GroupEntry[OriginHead]]:
        """Return and forget the dropped groups too large for every sink's bus."""
        groups, self._too_large = self._too_large, []
        return groups

    def assign_again(self, sinks: Collection[str] | None = None) -> list[Message]:
        """Repeat assignments not put yet; a sink ignores known assignments."""
        return [
            self._assignment(name, group, view.weights[origins])
            for name, view in self.sinks.items()
            if view.heard and (sinks is None or name in sinks)
            for origins, group in view.leases.items()
        ]

    def _assign(self, name: str, group: GroupEntry[OriginHead], weight: int) -> Assignment:
        view = self.sinks[name]
        said = self._assignment(name, group, weight)
        origins = frozenset(said.origins)
        view.lease(origins, group, weight)
        self.assigned.update(dict.fromkeys(origins, (name, origins)))
        # A sink idle for long does not get every group once it takes groups again.
        behind = view.placed - self._window
        for each in self.sinks.values():
            each.placed = max(each.placed, behind)
        return said

    def _assignment(self, name: str, group: GroupEntry[OriginHead], weight: int) -> Assignment:
        samples = self._records(group)
        origins = tuple(map(_ORIGIN, samples))
        checks = tuple(map(_CHECK, samples))
        incarnation = self.sinks[name].incarnation
        partial = len(group.samples) < group.need
        missing = find_missing(group, self.splits.name(group.key), samples) if partial else ()
        return Assignment(name, incarnation, self.term, origins, weight, checks, missing)

    # -- heads in the stash -----------------------------------------------------------------------

    def _withdraw(self, gone: Iterable[Origin], now_s: float) -> None:
        """Take heads out of unplaced groups; the remaining samples wait again."""
        lost = {origin: self.known.pop(origin) for origin in gone}
        if not lost:
            return
        table = self.stash.table
        rest: list[OriginHead] = []
        for key in {head.key for head in lost.values()}:
            entry = table.take(key)
            if entry is not None:
                rest += [sample for sample in entry.samples if sample.origin not in lost]
            failing = self.stash.failures.groups.get(key)
            if failing is not None:
                rest += self._take_failing(failing, lost)
        # Reversed, because returned groups come first again.
        splits = {split_of(head.key) for head in lost.values()}
        for group in [group for split in splits for group in reversed(table.lease(_ALL, split))]:
            samples = [*group.samples, *self.stash.reports.get(group, ())]
            if any(sample.origin in lost for sample in samples):
                table.remove(group)
                self.stash.reports.pop(group, None)
                rest += [sample for sample in samples if sample.origin not in lost]
            else:
                table.give_back(group)
        self._regroup(rest, now_s)

    def _take_failing(
        self, group: FailingGroup[OriginHead], lost: Container[Origin]
    ) -> list[OriginHead]:
        """Dissolve a failing group, and remember the number of attempts of its samples."""
        failures = self.stash.failures
        for index, failed in group.failed.items():
            failures.earlier_attempts[group.key, index] = failed.attempts
        samples = [*group.samples, *group.reports]
        failures.end(group)
        return [sample for sample in samples if sample.origin not in lost]

    def _regroup(self, samples: list[OriginHead], now_s: float) -> None:
        """Group samples of a complete but undelivered group again."""
        for key in {sample.key for sample in samples}:
            self.stash.table.recent.pop(key, None)
        # Reports after samples: a report turns an open group into a failing group.
        self.stash.add(sorted(samples, key=lambda sample: sample.failed), now_s)
        self.stash.failures.earlier_attempts.clear()

    def _fail_lost(self, samples: Iterable[OriginHead], now_s: float) -> None:
        """Have samples lost with their bus repeated elsewhere, if the policy retries."""
        if not self.stash.policy.sample_retries or self.retries.at_home:
            return  # a request's sink, the holder of the prompt, asks again for its samples
        by_key: dict[Hashable, list[OriginHead]] = {}
        for sample in samples:
            by_key.setdefault(sample.key, []).append(sample)
        for lost in by_key.values():
            self.stash.fail_lost(lost, "the bus that had it has gone", now_s)

    def _records(self, group: GroupEntry[OriginHead]) -> list[OriginHead]:
        """Return the records of a group that cross together: samples and failure reports."""
        reports = self.stash.reports.get(group) if self.stash.reports else None
        return [*group.samples, *reports] if reports else group.samples


def find_missing(
    group: GroupEntry[OriginHead], name: GroupName, records: Iterable[OriginHead]
) -> tuple[MissingSample, ...]:
    """Return the missing samples of a group without a failure report among the records."""
    there = {sample.index for sample in records}
    return tuple(
        MissingSample(name, group.size, group.need, index, 0, _NOT_COMING)
        for index in range(group.size)
        if index not in there
    )
