"""The collector: a bus's only reader, in a Consumer or in the daemon; moves records into the stash.

The collector joins three independent parts: the Reader (C: bytes and space), the Stash (pure:
completeness of groups) and the clock. A lock serialises them. The lock is not held while sleeping,
so a thread can acknowledge groups while another thread waits for the next.

Invariants
----------
- A sample handed out by the Reader is in the stash, under lease, or released.
- Every call that can raise runs before a lease: a later exception would lose the group.
- A sample a checkpoint counts as trained ends on arrival, and joins no group again.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Literal, TypeAlias

from shmbus import errors
from shmbus.base import limits
from shmbus.base.arguments import process_label
from shmbus.base.ledger import (
    REASONS,
    LanePauseStatus,
    Ledger,
    RequestCounts,
    SplitCounts,
    TrainedBefore,
)
from shmbus.data.keys import make_key, split_of
from shmbus.handles.stall import Watch
from shmbus.segment import lifecycle
from shmbus.stash.drops import DropLog, duplicate_error
from shmbus.stash.retries import Retries
from shmbus.stash.stash import Stash, StashPolicy
from shmbus.stash.upkeep import Straggler, Upkeep
from shmbus_ext import _core

#: Most portions of `limits.POLL_RECORDS` read per `take`, a bound that lets `take` return under
#: load.
_TAKE_POLLS = 16

#: First names of the core's totals of requests.
_REQUEST_COUNTS = ("offered", "open", "claimed", "done", "given_up", "groups")

Trajectory = _core.Trajectory
#: Samples refused by the group table, and complete groups that wait for a policy decision.
Undecided: TypeAlias = "list[_core.GroupEntry[Trajectory] | tuple[int, Trajectory]]"


class Collector:
    """Attaches to a bus as its only reader, and leases complete groups."""

    def __init__(
        self,
        name: str,
        policy: StashPolicy,
        duplicate: Literal["drop", "error"] = "drop",
        label: str | None = None,
    ) -> None:
        self.lock = _core.RecursiveLock()
        self.stash: Stash[Trajectory] = Stash(policy)
        self._expires = policy.group_timeout_s is not None
        self._bounded = policy.max_stash_bytes is not None
        self._duplicate = duplicate
        self._errors: list[errors.ProtocolError] = []
        #: Withholds samples from the stash, and returns the rest; None withholds nothing.
        self.divert: Callable[[list[Trajectory]], list[Trajectory]] | None = None
        self.segment = lifecycle.open_segment(name)
        try:
            self.reader = _core.Reader(self.segment, label or process_label())
        except BaseException:
            self.segment.close()
            raise
        self.drops = DropLog(self.segment)
        self._corrupt = self.segment.released()[_core.DROP_CORRUPT]
        self._retries = Retries(self.segment, self.stash)
        self._upkeep = Upkeep(self.segment, self.reader, self.stash.table.recent)
        self._lead = self._upkeep.lead
        self._requests = self._upkeep.requests
        self.stash.offered_again = self._requests.offered_again
        #: Lasting names of samples a checkpoint counts as trained and that may still come.
        self.trained: set[bytes] = set()
        #: True while a snapshot is written: releases must wait.
        self.frozen = False
        self.stash.failures.in_lane = self._requests.is_open
        self.stash.failures.has_open = self._requests.has_open
        #: Groups of an earlier collector held by other processes, never in this stash; None while
        #: the list is incomplete.
        self.held_elsewhere: Callable[[], list[list[Trajectory]] | None] = list

    def require(self) -> None:
        """Raise BusClosedError in a child of the process that attached."""
        if self.segment.closed:
            raise errors.BusClosedError(
                f"bus {self.segment.name!r}: this Consumer was made in another process, before a "
                "fork; make a new one in this process"
            )

    # -- from the ring to a lease ---------------------------------------------------------------

    def intake(self, kind: type[_core.GroupBase], watch: Watch) -> _core.Intake:
        """Return the loop that takes complete groups: in C, except for `on_due`."""
        policy = self.stash.policy
        timeout_s = math.inf if policy.on_timeout == "wait" else policy.group_timeout_s
        # The watch must not refer to the intake: the last reference to a Consumer ends everything.
        check = functools.partial(watch.check, self.segment, "a complete group")
        return _core.Intake(
            self.reader,
            self.stash.table,
            self.lock,
            kind,
            on_due=self.on_due,
            lease=self.lease if self._notes_deliveries else None,
            watch=None if watch.slice_s is None else check,
            portion=limits.POLL_RECORDS,
            portions=_TAKE_POLLS,
            watch_s=watch.slice_s or math.inf,
            group_timeout_s=math.inf if timeout_s is None else timeout_s,
        )

    @property
    def _notes_deliveries(self) -> bool:
        """Tell if a delivery needs more work than C does."""
        lag = self.stash.policy.max_policy_lag
        return lag is not None or self._lead.bounded or self._requests.used

    def on_due(self, intake: _core.Intake, undecided: Undecided, enough: bool, now: float) -> bool:
        """Decide on undecided samples, run maintenance, poll, and set when to be called next."""
        stash = self.stash
        stash.apply_policy(undecided, now)
        self.run_maintenance(now)
        more = enough or self.pump_once(now)
        if self._notes_deliveries:
            intake.lease = self.lease  # the first request may come while this reads
        if stash.discards or self._errors:
            self.release_discarded()
        failures = stash.failures
        intake.delegate_all = bool(
            failures.active
            or failures.dirty
            or self._errors
            or self._bounded
            or self.trained
            or stash.inherited
        )
        sweep_s, due_s = self._upkeep.next_sweep_s, stash.next_deadline_s()
        intake.due_s = min(sweep_s, self._upkeep.next_evacuation_s)
        intake.wake_s = sweep_s if due_s is None else min(sweep_s, due_s)
        return more

    def pump_once(self, now: float) -> bool:
        """Move one portion of records into the stash; True if the ring may hold more."""
        stash = self.stash
        self._upkeep.begin_checks()
        if self.divert is None and not self.trained:
            undecided: Undecided = []
            count = self.reader.poll_into(stash.table, limits.POLL_RECORDS, now, undecided)
            stash.apply_policy(undecided, now)
        else:
            samples = self.reader.poll(limits.POLL_RECORDS)
            count = len(samples)
            self.add(samples if self.divert is None else self.divert(samples), now)
        more = count == limits.POLL_RECORDS
        # What completes a group may lie unread in the ring, after a long step of the trainer.
        if self._expires and not more:
            stash.expire(now, limits.EXPIRE_GROUPS)
        if stash.inherited and not more:
            stash.settle_inherited(now)
        if stash.failures.active or stash.failures.dirty:
            self._update_failing(now, drained=not more)
        if not more and self._upkeep.checks:
            self._end_checks()
        if stash.table.cancelled:
            self.flush()
        return more

    def read_inherited(self) -> None:
        """Read the ring before a lease, if an earlier collector leased a group in part."""
        # A late sample, if read first, would begin the group anew.
        if _core.leased_in_part(self.segment):
            self._read_all(time.monotonic())
            self.stash.settle_inherited(time.monotonic())
            self.release_discards()

    def _read_all(self, now: float) -> None:
        _, unread = self.reader.count_unread()
        while unread > 0 and self.pump_once(now):
            unread -= limits.POLL_RECORDS

    # -- trained samples -------------------------------------------------------------------------

    def add(self, samples: list[Trajectory], now: float) -> None:
        """Put samples into the stash, without those trained before."""
        trained = self.trained_of(samples)
        if trained:
            ids = {id(sample) for sample in trained}
            samples = [sample for sample in samples if id(sample) not in ids]
            self._release_trained(trained)
        self.stash.add(samples, now)

    def trained_of(self, samples: list[Trajectory]) -> list[Trajectory]:
        """Return the samples a checkpoint counts as trained."""
        trained = self.trained
        if not trained:
            return []
        return [
            sample
            for sample, origins in zip(samples, _core.lasting_origins(samples), strict=True)
            if not trained.isdisjoint(origins)
        ]

    def _release_trained(self, samples: list[Trajectory]) -> None:
        by_key: dict[Hashable, list[Trajectory]] = {}
        for sample in samples:
            by_key.setdefault(sample.key, []).append(sample)
        for key, trained in by_key.items():
            self.stash.note_complete(key)
            self._requests.note_end(key)
            self.reader.release(trained, _core.ACKED)
        self._upkeep.doubt(by_key)  # their requests end after a full read of the ring

    def end_trained_waiting(self, now: float) -> None:
        """End trained samples outside of leases; their siblings begin their groups anew."""
        trained = [] if self.frozen else self.trained_of(self.stash.waiting_samples())
        if trained:
            rest = self.stash.take_out(trained)
            self._release_trained(trained)
            self.stash.add(rest, now)
            self.release_discards()
            self.flush()

    def end_trained(self, origins: Iterable[bytes], held: Iterable[Trajectory] = ()) -> None:
        """End all samples a checkpoint counts as trained, now and on later arrival."""
        # The call reads the whole ring. So only samples held by other processes (`held`), or
        # brought by a relay, come later.
        with self.lock:
            _core.uninterrupted(self._end_trained, {*origins}, [*held])

    def _end_trained(self, origins: set[bytes], held: list[Trajectory]) -> None:
        self.trained = origins
        now = time.monotonic()
        self.end_trained_waiting(now)
        self._read_all(now)
        self.pump_once(now)  # ends the requests of trained samples
        self.release_discards()
        self.forget_trained(held)

    def forget_trained(self, held: list[Trajectory]) -> None:
        """Forget names that cannot come again: those of this bus outside of `held`."""
        here = _core.lineage(self.segment)
        names: set[bytes] = set().union(*_core.lasting_origins(held))
        self.trained = {
            name for name in self.trained if name[: len(here[0])] not in here or name in names
        }

    def note_trained(self, leases: list[_core.GroupEntry[Trajectory]], step: int) -> None:
        """Do nothing: a collector serves no further ranks."""

    def ended_names(self) -> set[bytes]:
        """Return samples that a relay may bring again: a checkpoint's, and those not kept yet."""
        return self.trained.union(note[1] for note in _core.relay_notes(self.segment, True))

    def trained_before(self, step: int) -> TrainedBefore:
        """Return ended samples that may still come."""
        return TrainedBefore(self.ended_names(), [])

    def _end_checks(self) -> None:
        """Clear up after deaths and discards, with all earlier commits in the stash."""
        stash, elsewhere = self.stash, self.held_elsewhere()
        held = {samples[0].key for samples in elsewhere or () if samples}
        self._upkeep.end_checks(
            lambda: {sample.key for sample in stash.waiting_samples()},
            stash.waits,
            lambda key: elsewhere is None or key in held or stash.has(key),
        )
        if elsewhere is None:
            self._requests.doubt()  # and look again, once known

    def expire(self, now: float) -> None:
        """End groups and requests past their deadline, even if no record arrives."""
        due_s = self.stash.next_deadline_s()
        if self.stash.failures.dirty or (due_s is not None and now >= due_s):
            self.pump_once(now)
        elif self.stash.table.cancelled:
            self.flush()

    def _update_failing(self, now: float, *, drained: bool) -> None:
        """Expire failing groups, and update the retry table."""
        self.stash.follow_lane(now)
        if drained:
            self.stash.expire_failing(now, limits.EXPIRE_GROUPS)
        if self.stash.failures.dirty:
            self._retries.update(now, drained=drained)

    def lease(
        self, max_groups: int, split: int = _core.SPLIT_TRAIN
    ) -> list[_core.GroupEntry[Trajectory]]:
        """Lease ready groups of a split; ProtocolError as for `take`."""
        stash = self.stash
        if stash.discards or self._errors:
            self.release_discarded()
        leased = stash.lease(max_groups, self.segment.policy_version, split)
        try:
            if stash.discards:
                self.release_discarded()
            if leased:
                self.note_leased(leased)
                if split == _core.SPLIT_TRAIN:
                    _core.count_delivered(self.segment, leased)
                self.flush()  # a producer may need it for a message before the caller comes back
        except BaseException:
            for group in reversed(leased):
                stash.table.give_back(group)
            raise
        return leased

    def note_leased(self, leased: list[_core.GroupEntry[Trajectory]]) -> None:
        """Admit new groups in the place of leased groups; hand out no more of the leased."""
        self._requests.delivered(leased)
        if self._lead.bounded:
            self._lead.delivered(leased, self.stash.table.leased_groups)

    def wait_s(self, now: float, remaining_s: float | None) -> float:
        """Seconds until the caller's deadline, the stash's, or the next sweep."""
        candidates = [self._upkeep.next_sweep_s - now]
        if remaining_s is not None:
            candidates.append(remaining_s)
        group_deadline = self.stash.next_deadline_s()
        if group_deadline is not None:
            candidates.append(group_deadline - now)
        return max(1e-4, min(candidates))

    # -- maintenance ---------------------------------------------------------------------------

    def run_maintenance(self, now: float) -> None:
        """Sweep for dead producers and free space, each at its interval."""
        self.flush()
        if self._upkeep.run(now, self._find, self.stash.table.leased_groups):
            self._retries.check_claimants()
            self._log_drops(now)

    def _find(self, stragglers: list[Straggler]) -> list[Trajectory]:
        return self.stash.waiting_of({make_key(*each[:3]) for each in stragglers})

    def _log_drops(self, now: float) -> None:
        """Log the reader's quarantined records, and the sums of recent drops."""
        corrupt = self.segment.released()[_core.DROP_CORRUPT]
        if corrupt > self._corrupt:
            self.drops.note_corrupt(corrupt - self._corrupt, now)
            self._corrupt = corrupt
        self.drops.flush()
        self.drops.sum_up(now)

    def flush(self) -> None:
        """Publish this process's holdings, for messages of other processes."""
        self.reader.note(self.stash.table)

    def is_stale(self, samples: list[Trajectory]) -> bool:
        """Tell if a group of these samples is now too old for training."""
        if split_of(samples[0].key) != _core.SPLIT_TRAIN:
            return False
        return self.stash.is_stale(samples, self.segment.policy_version)

    def release_discarded(self) -> None:
        """Release discarded samples, and raise the next pending duplicate."""
        self.release_discards()
        if self._errors:
            raise self._errors.pop(0)

    def next_error(self) -> errors.ProtocolError | None:
        """Return the next pending duplicate, once."""
        return self._errors.pop(0) if self._errors else None

    def release_discards(self) -> None:
        """Release discarded samples with their reasons."""
        discards = self.stash.take_discards()
        if not discards:
            return
        self._upkeep.doubt(discard.key for discard in discards)
        now = time.monotonic()
        useless, self.stash.useless = self.stash.useless, 0
        if useless:
            _core.note_useless(self.segment, useless)
        for discard in discards:
            self.drops.note(discard.reason, discard.samples, now, superseded=discard.superseded)
            self.reader.release(discard.samples, REASONS.index(discard.reason))
            if discard.reason == "duplicate" and self._duplicate == "error":
                self._errors.append(duplicate_error(discard.samples[0]))
        self.drops.flush()

    # -- ending leases --------------------------------------------------------------------------

    def is_leased(self, group: _core.GroupEntry[Trajectory]) -> bool:
        """Tell if this collector gave the lease, and the lease still runs."""
        return self.stash.table.is_leased(group)

    def end_groups(
        self, consumer: object, groups: list[_core.GroupBase], reason: int, state: str
    ) -> int:
        """End the leases of groups, up to the first not held by this collector."""
        # Ring, table and group change in one call of C: no exception comes between.
        if not (reason or self.stash.reports or self._requests.used or self._lead.in_versions):
            return _core.end_groups(self.reader, self.stash.table, consumer, groups, reason, state)

        def end() -> int:
            ended = _core.end_groups(self.reader, self.stash.table, consumer, groups, reason, state)
            for group in groups[:ended]:
                self._note_end(group._lease.samples, reason, group._lease)
            return ended

        ended = _core.uninterrupted(end)
        self.drops.flush()
        return ended

    def _note_end(
        self, samples: list[Trajectory], reason: int, group: _core.GroupEntry[Trajectory] | None
    ) -> None:
        """Finish the end of a lease: log a drop, end reports, request and lead."""
        if reason:
            self.drops.note(REASONS[reason], samples, time.monotonic())
            # As many more groups must be sampled.
            _core.note_useless(self.segment, split_of(samples[0].key) == _core.SPLIT_TRAIN)
        self._requests.ended(samples)
        if group is not None:
            self.stash.end_reports(group)
            self._lead.follow(self.stash.table.leased_groups, 1)
            self.release_discards()

    def recall(self) -> None:
        """Do nothing: no group is leased ahead of a take."""

    def give_back_group(self, consumer: object, group: _core.GroupBase, state: str) -> bool:
        """Put a leased group first in line for delivery; False for a group not held here."""
        ended = _core.give_back_group(self.reader, self.stash.table, consumer, group, state)
        if self.trained:
            self.end_trained_waiting(time.monotonic())
        return ended

    def end(self, group: _core.GroupEntry[Trajectory], reason: int) -> None:
        """Release a leased group: whole, or not at all if this process dies now."""
        self.release(group.samples, reason, group)

    def release(
        self,
        samples: list[Trajectory],
        reason: int,
        group: _core.GroupEntry[Trajectory] | None = None,
    ) -> None:
        """Release a group; this stash does not know a group leased by an earlier collector."""
        self.reader.release(samples, reason)
        if group is not None:
            self.stash.table.remove(group)
        self._note_end(samples, reason, group)
        self.drops.flush()

    def give_back(self, group: _core.GroupEntry[Trajectory]) -> None:
        """Put a leased group first in line for delivery, also to a thread that waits in `take`."""
        self.stash.table.give_back(group)
        if self.trained:
            self.end_trained_waiting(time.monotonic())
        self.reader.wake()

    # -- state ----------------------------------------------------------------------------------

    @property
    def deaths(self) -> int:
        """Number of dead producers reaped here."""
        return self._upkeep.deaths

    @property
    def lane_pause(self) -> LanePauseStatus | None:
        """The lane's pause, with single samples for workers; None while the lane is open."""
        return self._retries.lane_pause

    @property
    def policy_version(self) -> int:
        """The current policy version, as producers see it."""
        return self.segment.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.segment.policy_version = version
        self._lead.follow(self.stash.table.leased_groups)

    def stats(self, _timeout: float | None = None) -> Ledger:
        """Return the ledger: where every trajectory ever committed is now."""
        with self.lock:
            self._upkeep.sweep(time.monotonic())
            ledger = self._count()
            if ledger.committed < ledger.accounted:
                # A producer died between a record and its count; a sweep corrects the count.
                self._upkeep.sweep_all()
                ledger = self._count()
            return ledger

    def _count(self) -> Ledger:
        committed, in_ring = self.reader.count_unread()
        stash = self.stash
        segment = self.segment
        return Ledger.from_counts(
            segment.released(),
            committed=committed,
            in_ring=in_ring,
            leased=stash.table.leased_cells,
            stashed=stash.open_records + stash.table.ready_cells,
            ready=stash.table.ready_cells,
            groups_open=stash.open_groups,
            groups_ready=stash.table.ready_groups,
            groups_leased=stash.table.leased_groups,
            groups_timed_out=stash.timeouts,
            groups_given_up=stash.given_up,
            groups_dropped=_core.groups_dropped(segment),
            samples_wanted=len(stash.failures.requests),
            lane_pause=self.lane_pause,
            stash_overflows=stash.overflows,
            moved=self.reader.moves,
            policy_version=segment.policy_version,
            producers=segment.tally()[0],
            capacity=segment.capacity,
            free=segment.free_extents() * segment.extent_bytes,
            requests=RequestCounts(
                **dict(zip(_REQUEST_COUNTS, _core.request_totals(segment), strict=False))
            ),
            splits=self._splits(),
        )

    def _splits(self) -> dict[str, SplitCounts]:
        """Count read trajectories by split."""
        found = {}
        failing: dict[int, int] = {}
        for sample in self.stash.failures.samples():
            split = split_of(sample.key)
            failing[split] = failing.get(split, 0) + 1
        for number, label, acknowledged, dropped, *_ in _core.splits(self.segment):
            opened, cells, ready, waiting, leased, held = self.stash.table.counts(number)
            found[label] = SplitCounts(
                acknowledged=acknowledged,
                dropped=dropped,
                leased=held,
                stashed=cells + waiting + failing.get(number, 0),
                groups_open=opened,
                groups_ready=ready,
                groups_leased=leased,
            )
        return found

    def close(self) -> None:
        """Leave the bus. Unacknowledged groups stay for the next collector."""
        self.reader.wake()
        with self.lock:
            if not self.segment.closed:
                self.drops.sum_up()
            self.reader.close()
