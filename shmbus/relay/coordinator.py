"""The coordinator: groups heads, places complete groups on sinks, and keeps nothing of its own.

Invariants:

- An origin is in one place here: in the stash, assigned to a sink (a lease of the stash), or taken.
- It places nothing before every sink has said what it has and owes; from then on a sink takes no
  assignment of an earlier coordinator. So no record is assigned twice.
- A tombstone of what was taken is kept until an announcement has come that is as new as its
  release. One that was on its way meanwhile names records that nobody has: it changes nothing.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence

import msgspec

from shmbus._keys import split_of
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
from shmbus.relay.retries import RetryRequests
from shmbus.relay.splits import Splits
from shmbus.stash.failures import FailingGroup
from shmbus.stash.stash import Stash, StashPolicy
from shmbus_ext._core import SPLIT_TRAIN, GroupEntry, OriginHead

#: More than any bus or stash has.
_ALL = 1 << 30
#: What a trainer is told of a sample that never came.
_NOT_COMING = "not there when the time of its group was over"


class SinkView(msgspec.Struct):
    """What the coordinator knows of a sink."""

    incarnation: int = -1
    heard: bool = False
    #: Bytes that are assigned and not put, and those of all groups that were placed here; the
    #: latter count as at most a window behind those of others.
    bytes: int = 0
    placed: int = 0
    #: Bytes of a record and of a group that its bus takes, and records of a group.
    largest: tuple[int, int, int] = (_ALL << 30, _ALL << 30, _ALL)
    #: Labels of the splits that its bus has.
    splits: tuple[str, ...] = ()
    leases: dict[frozenset[Origin], GroupEntry[OriginHead]] = {}
    #: Bytes of each of them.
    weights: dict[frozenset[Origin], int] = {}
    #: What it owes to an earlier coordinator: it is written down nowhere else.
    owed: frozenset[Origin] = frozenset()

    def has_room(self, window_bytes: int) -> bool:
        """Whether more may be assigned to it; one group always may."""
        return not self.leases or self.bytes < window_bytes

    def lease(self, origins: frozenset[Origin], group: GroupEntry[OriginHead], weight: int) -> None:
        """Assign a group to it."""
        self.leases[origins], self.weights[origins] = group, weight
        self.bytes += weight
        self.placed += weight

    def end_lease(self, origins: frozenset[Origin]) -> GroupEntry[OriginHead]:
        """End an assignment; what was placed here stays so."""
        self.bytes -= self.weights.pop(origins)
        return self.leases.pop(origins)

    def takes(self, sizes: Sequence[int], weight: int) -> bool:
        """Whether its bus ever has room for a group of records of so many bytes, and all of it."""
        record, whole, count = self.largest
        return len(sizes) <= count and weight <= whole and max(sizes) <= record


def choose_dropper(sinks: Mapping[str, SinkView]) -> str | None:
    """Return the sink that writes down what is dropped: the one with the largest journal."""
    heard = [name for name in sorted(sinks) if sinks[name].heard]
    return max(heard, key=lambda name: sinks[name].largest[2], default=None)


def journal_parts(
    sinks: Mapping[str, SinkView], whole: Sequence[Origin]
) -> list[tuple[Origin, ...]]:
    """Cut a group into parts that such a journal has room for: nearly always it is one."""
    most = max([1, *(view.largest[2] for view in sinks.values())])
    return [tuple(whole[at : at + most]) for at in range(0, len(whole), most)]


#: Bytes assigned to a sink and not put yet: some blocks, so that one is fetched while one is put.
WINDOW_BYTES = 128 << 20

#: Groups that are placed together, the heaviest first: so many make sums nearly equal.
PLACED_AT_ONCE = 256

_NBYTES = operator.attrgetter("nbytes")
_ORIGIN = operator.attrgetter("origin")
_CHECK = operator.attrgetter("check")
#: Before the first announcement.
_NEVER: Mark = (-1, -1)


class Coordinator:
    """Groups the heads of all sources, and has each complete group put by one sink."""

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
        #: In keys, these are the numbers of splits.
        self.splits = Splits()
        #: Heads in the stash, under lease or not, and no other ones.
        self.known: dict[Origin, OriginHead] = {}
        #: Of each bus, the clock of its machine minus this one's, for comparing heads.
        self.clocks_ns: dict[str, int] = {}
        self.newest: dict[str, Mark] = {}
        #: Placed for good, or dropped; with the mark of its release once that is known.
        self.taken: dict[Origin, Mark | None] = {}
        #: The same by bus and mark.
        self._due: dict[str, dict[Mark, list[Origin]]] = {}
        #: Of what is assigned, the sink and the group.
        self.assigned: dict[Origin, tuple[str, frozenset[Origin]]] = {}
        #: Dropped by a policy, and not in a sink's journal yet.
        self.dropped: dict[tuple[Origin, ...], str] = {}
        #: How many were, by reason.
        self.drops: Counter[str] = Counter()
        #: Taken, and whose release may never be confirmed: a sink has died, or this has just begun.
        self.doubtful: set[Origin] = set()
        self.sinks = {name: SinkView() for name in sinks}
        #: Taken, since a sink that has died had owed them to an earlier coordinator, or gave them
        #: back; with the question whose answer tells whether their source has them still.
        self.orphans: dict[Origin, int] = {}
        self._question = 0
        #: Samples that failed, and which source's producers are asked for them again.
        self.retries = RetryRequests(self.stash.failures, self.splits)
        self.policy_version = 0
        self._too_large: list[GroupEntry[OriginHead]] = []
        self._window = window_bytes

    def begin(self) -> list[Message]:
        """Ask everybody what there is."""
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
        """Ask those that have not answered."""
        return [
            SinkStateWanted(name, self.term) for name, view in self.sinks.items() if not view.heard
        ]

    # -- what sources say ------------------------------------------------------------------------

    def announced(self, message: Announcement, now_s: float) -> list[Message]:
        """Take news of a source, unless newer ones were taken; ProtocolError for what is none."""
        bus, mark = message.bus, message.mark
        newest = self.newest.get(bus, _NEVER)
        if not self._is_news(mark, newest):
            return []
        if not message.whole and mark != (newest[0], newest[1] + 1):
            return self._ask([bus])  # one before it was lost
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
        # After that: this announcement may be as old as a release, and name what was released.
        due = self._due.get(bus, {})
        for old in [each for each in due if each <= mark]:
            for origin in due.pop(old):
                self._forget_if_old(origin)
        self.known.update(new)
        self.stash.add(list(new.values()), now_s)
        return [*self.drop_discards(), *self.place()]

    def _take_whole(self, message: Announcement, heads: Iterable[OriginHead], now_s: float) -> None:
        """Forget what a source does not hold any more, which has said all that it holds."""
        bus, named = message.bus, {head.origin: head for head in heads}
        gone = {o for o in self.known if is_of(o, bus) and o not in named}
        self._withdraw(gone - self.assigned.keys(), now_s)
        for origin in [o for o in self.taken if is_of(o, bus) and o not in named]:
            del self.taken[origin]  # it has gone, and older announcements are refused
        self._adopt(message, named)

    def _adopt(self, message: Announcement, named: dict[Origin, OriginHead]) -> None:
        """Take orphans for new, which their source holds after they were orphaned."""
        term, question = message.answers
        for origin in [each for each in self.orphans if is_of(each, message.bus)]:
            if term == self.term and question >= self.orphans[origin]:
                del self.orphans[origin]
                if origin in named and self.taken.get(origin, _NEVER) is None:
                    del self.taken[origin]
                    # Its group may have been complete here before its sink told of it.
                    self.stash.table.recent.pop(named[origin].key, None)

    def _orphan(self, origins: Iterable[Origin]) -> list[Message]:
        """Ask sources which of these they hold still: nobody else will put them."""
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
        """Remember it as placed, until what was said of it before its release cannot come."""
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
        """Withdraw what a lost source had announced, and return what nobody had fetched of it."""
        lost = frozenset(o for o in self.known if is_of(o, bus) and o not in self.assigned)
        self._withdraw(lost, now_s)
        return lost

    def forget_source(self, bus: str, now_s: float) -> frozenset[Origin]:
        """Forget a source that will not come back, and return what nobody had fetched of it."""
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
        """Have sources let go what a policy has dropped: its payload goes nowhere."""
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
        """Say once more what is dropped: a sink ignores what it has, and what has gone is gone."""
        return self._drop_at(choose_dropper(self.sinks), sorted(self.dropped))

    def _written_down(self, origins: frozenset[Origin]) -> None:
        """Note that a sink's journal has these, so that they need not be dropped again."""
        for whole in [each for each in self.dropped if not origins.isdisjoint(each)]:
            self.drops[self.dropped[whole]] += len(whole)
            del self.dropped[whole]

    # -- what sinks say --------------------------------------------------------------------------

    def sink_state(self, message: SinkState, now_s: float) -> list[Message]:
        """Take what a sink has; what it was assigned before and does not know is placed again."""
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
                # A group is put as a whole: what was confirmed or is there tells of the others.
                for sample in samples:
                    self._take(sample.origin, None)
            else:
                view.placed -= weight
                self._put_back(samples, now_s)
        self._withdraw(has.intersection(self.known), now_s)
        for origin in has:
            self._take(origin, None)
        self._written_down(message.settled)
        # What was confirmed before this came, or was lost with the sink, no sink will say again.
        self.doubtful.update(self.taken)
        asked = self._orphan(orphans)
        return [*asked, *self.drop_discards(), *self.drop_again(), *self.place()]

    def ask_sources_again(self) -> list[Message]:
        """Have sources say what they hold, where that settles which of them it has released."""
        self.doubtful &= {origin for origin, mark in self.taken.items() if mark is None}
        return self._ask({bus_of(origin) for origin in (*self.doubtful, *self.orphans)})

    def _end_lease(self, view: SinkView, origins: frozenset[Origin]) -> list[OriginHead]:
        """End an assignment, and return what of it no source has confirmed as released."""
        entry = view.end_lease(origins)
        for origin in origins:
            self.assigned.pop(origin, None)
        self.stash.reports.pop(entry, None)  # they are among the origins
        self.stash.end_lease(entry)
        found = [self.known.pop(origin, None) for origin in origins]
        return [sample for sample in found if sample is not None]

    def _groups_at(self, sink: str, origins: Iterable[Origin]) -> list[frozenset[Origin]]:
        """Return the groups that are assigned to a sink and have one of these, each once."""
        found = {id(each): each for each in map(self.assigned.get, origins)}
        return [each[1] for each in found.values() if each is not None and each[0] == sink]

    def _unassigned(self, origins: Iterable[Origin]) -> set[Origin]:
        """Return those of these that are in the stash, and at no sink."""
        return {o for o in origins if o in self.known and o not in self.assigned}

    def _put_back(self, samples: Iterable[OriginHead], now_s: float) -> None:
        """Group heads again whose lease has ended without a put."""
        again = [sample for sample in samples if not self._is_taken(sample.origin)]
        self.known.update((sample.origin, sample) for sample in again)
        self._regroup(again, now_s)

    def settled(self, message: Settled, now_s: float) -> list[Message]:
        """Note that a sink has put these."""
        view = self.sinks[message.sink]
        for origins in self._groups_at(message.sink, message.origins):
            # A sink that died had put the others; its successor's word of that may never come.
            for sample in self._end_lease(view, origins):
                self.taken.setdefault(sample.origin, None)
        # Others were confirmed before this came, or are in the sink's state, which is under way.
        known = self.known.keys() & message.origins
        self._withdraw(self._unassigned(known), now_s)
        for origin in known:
            self.taken.setdefault(origin, None)
        self._written_down(message.origins)
        view.owed -= message.origins
        return self.place()

    def returned(self, message: Returned, now_s: float) -> list[Message]:
        """Take back a group of which a sink could not get a part: the rest waits for it again."""
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
        """Remember what a source has released until its announcements are as new as that."""
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
        """Whether an announcement with this mark, or one after it, has not come."""
        return mark > self.newest.get(bus, _NEVER)

    def ask_source(self, bus: str) -> list[Message]:
        """Have a source say all that it holds."""
        return self._ask([bus])

    def ask_who_holds_less(self, held: Mapping[str, int]) -> list[Message]:
        """Have sources say what they hold that hold less than is believed here."""
        believed = [*self.known, *(o for o, mark in self.taken.items() if mark is None)]
        return self._ask({bus for bus, o in by_bus(believed) if len(o) > held.get(bus, len(o))})

    # -- samples that failed ---------------------------------------------------------------------

    def ask_producers(self, now_s: float) -> list[Message]:
        """Have producers asked for what has failed since, and not for what has come."""
        if self._heard is None:
            self._heard = tuple(sorted(bus for bus in self.buses if bus in self.newest))
        changed = self.retries.update(self._heard, now_s)
        return [self.retries.wanted(bus, self.term) for bus in sorted(changed)]

    def wanted_of(self, bus: str, confirmed: tuple[int, int]) -> list[Wanted]:
        """Say a source's list once more, unless it has said that it took the newest one."""
        if bus not in self.newest or confirmed == (self.term, self.retries.number(bus)):
            return []
        return [self.retries.wanted(bus, self.term)]

    def unanswered(self, message: Unanswered, now_s: float) -> list[Message]:
        """Count an attempt as failed: who had the sample has died, and put nothing before."""
        request = self.retries.find(message.bus, message.sample)
        if request is None:
            return []
        self.stash.fail_request(request, message.sample.reason, now_s)
        return [*self.drop_discards(), *self.ask_producers(now_s), *self.place()]

    # -- placing ---------------------------------------------------------------------------------

    def place(self) -> list[Message]:
        """Assign complete groups, the heaviest first, each to the sink that has got the least.

        What is under way would tell nothing at a low rate: each group is put before the next comes.
        """
        if not all(view.heard for view in self.sinks.values()):
            return []
        said: list[Message] = []
        # What is trained on comes last: there may be more of it than there is ever room for.
        for split in reversed(range(len(self.splits.labels))):
            said += self._place(split, self._sinks_of(split))
        return [*said, *self.drop_discards()]

    def _sinks_of(self, split: int) -> list[str]:
        """Return who puts groups of a split: but for "train" the first, once its bus has it."""
        if split == SPLIT_TRAIN:
            return list(self.sinks)
        label = self.splits.labels[split]
        return [name for name in list(self.sinks)[:1] if label in self.sinks[name].splits]

    @property
    def unplaced(self) -> list[str]:
        """Labels of splits whose complete groups wait until the first sink's bus has that split."""
        ready, numbers = self.stash.table.count_ready, range(len(self.splits.labels))
        waiting = [self.splits.labels[n] for n in numbers if ready(n) and not self._sinks_of(n)]
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
        """Take groups, with their bytes, as these sinks have room for, and one that is too much."""
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
        """Drop a group that no bus takes: waiting for room would be for ever."""
        origins = [sample.origin for sample in self._records(group)]
        self.stash.reports.pop(group, None)
        self.stash.end_lease(group)
        self._too_large.append(group)
        return self._drop(origins, "malformed")

    def take_too_large(self) -> list[GroupEntry[OriginHead]]:
        """Return the groups that were dropped since no sink's bus takes them, and forget them."""
        groups, self._too_large = self._too_large, []
        return groups

    def assign_again(self, sinks: Collection[str] | None = None) -> list[Message]:
        """Say once more what was assigned and is not put: a sink ignores what it has."""
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
        # One that took nothing for long does not get all there is once it takes again.
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
        """Take heads out of groups that are not placed; what is left of those waits again."""
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
        # In reverse, since what is given back comes first again.
        splits = {split_of(head.key) for head in lost.values()}
        for group in [group for split in splits for group in reversed(table.lease(_ALL, split))]:
            samples = [*group.samples, *self.stash.reports.get(group, ())]
            if any(sample.origin in lost for sample in samples):
                table.end_lease(group)
                self.stash.reports.pop(group, None)
                rest += [sample for sample in samples if sample.origin not in lost]
            else:
                table.give_back(group)
        self._regroup(rest, now_s)

    def _take_failing(
        self, group: FailingGroup[OriginHead], lost: Container[Origin]
    ) -> list[OriginHead]:
        """Take a failing group apart; how often its samples were asked for is remembered."""
        failures = self.stash.failures
        for index, failed in group.failed.items():
            failures.earlier_attempts[group.key, index] = failed.attempts
        samples = [*group.samples, *group.reports]
        failures.end(group)
        return [sample for sample in samples if sample.origin not in lost]

    def _regroup(self, samples: list[OriginHead], now_s: float) -> None:
        """Group samples again, whose group was complete before and was not delivered."""
        for key in {sample.key for sample in samples}:
            self.stash.table.recent.pop(key, None)
        # A report after the samples beside it: it makes of an open group a failing one.
        self.stash.add(sorted(samples, key=lambda sample: sample.failed), now_s)
        self.stash.failures.earlier_attempts.clear()

    def _fail_lost(self, samples: Iterable[OriginHead], now_s: float) -> None:
        """Have samples that went with their bus asked for elsewhere, where the policy retries."""
        if not self.stash.policy.sample_retries or self.retries.at_home:
            return  # of a request all samples are asked for again, by the sink that has its prompt
        by_key: dict[Hashable, list[OriginHead]] = {}
        for sample in samples:
            by_key.setdefault(sample.key, []).append(sample)
        for lost in by_key.values():
            self.stash.fail_lost(lost, "the bus that had it has gone", now_s)

    def _records(self, group: GroupEntry[OriginHead]) -> list[OriginHead]:
        """Return what of a group crosses together: samples, and reports of those that failed."""
        reports = self.stash.reports.get(group) if self.stash.reports else None
        return [*group.samples, *reports] if reports else group.samples


def find_missing(
    group: GroupEntry[OriginHead], name: GroupName, records: Iterable[OriginHead]
) -> tuple[MissingSample, ...]:
    """Return samples that a group goes without, and of which no record says that they failed."""
    there = {sample.index for sample in records}
    return tuple(
        MissingSample(name, group.size, group.need, index, 0, _NOT_COMING)
        for index in range(group.size)
        if index not in there
    )
