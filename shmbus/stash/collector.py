"""Collector: reads the ring and stashes. One a bus, in a Consumer's process or in the daemon.

It joins three parts that do not know each other: the Reader (C: bytes and space), the Stash (pure:
which group is complete) and the clock. A lock serialises them; it is not held while sleeping, so
groups can be acknowledged from another thread while one waits for the next.

Invariants
----------
- A sample that the Reader handed out is in the stash, under lease, or released.
- What raises comes before a lease: nobody would know of a group leased then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, TypeAlias

from shmbus import errors, limits
from shmbus._arguments import process_label
from shmbus.ledger import REASONS, Ledger
from shmbus.segment import lifecycle
from shmbus.stall import Watch
from shmbus.stash.retries import Retries
from shmbus.stash.stash import Discard, Stash, StashPolicy
from shmbus_ext import _core

__all__ = ["Collector"]

#: Portions of `limits.POLL_RECORDS` that one `take` reads at the most, so that it returns under any
#: load.
_TAKE_POLLS = 16
#: Stragglers are moved when less than this fraction of the extents is free ...
_EVACUATE_FREE_FRACTION = 0.125
#: ... and at most this often, in seconds, since each attempt walks all stashed trajectories.
_EVACUATE_INTERVAL_S = 0.05

Trajectory = _core.Trajectory
#: What came, and is in no group: refused samples, and groups to be judged.
Left: TypeAlias = "list[_core.GroupEntry[Trajectory] | tuple[int, Trajectory]]"


class Collector:
    """Attaches to a bus as its only reader, and leases complete groups.

    Parameters
    ----------
    name : str
        The bus.
    policy : StashPolicy
        What becomes of groups that are late, stale, useless or too many.
    duplicate : "drop" | "error"
        Whether a second sample of an index is also raised, by the next `take`.
    label : str, optional
        How messages of other processes name this one.

    Raises
    ------
    BusNotFoundError, BusBusyError, LayoutMismatchError
        There is no such bus, somebody reads it already, or it is of another layout.
    """

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
        self._next_sweep_s = 0.0
        self._next_evacuation_s = 0.0
        #: Keeps some of what was read from the stash, and returns the rest; None keeps nothing.
        self.divert: Callable[[list[Trajectory]], list[Trajectory]] | None = None
        self.segment = lifecycle.open_segment(name)
        try:
            self.reader = _core.Reader(self.segment, label or process_label())
        except BaseException:
            self.segment.close()
            raise
        self._asking = Retries(self.segment, self.stash)

    def require(self) -> None:
        """Raise BusClosedError in a child of the process that attached."""
        if self.segment.closed:
            raise errors.BusClosedError(
                f"bus {self.segment.name!r}: this Consumer was made in another process, before a "
                "fork; make a new one in this process"
            )

    # -- from the ring to a lease ---------------------------------------------------------------

    def intake(self, kind: type[_core.GroupBase], watch: Watch) -> _core.Intake:
        """Return what leases complete groups as they come, in C but for what `attend` does.

        Parameters
        ----------
        kind : type
            What a group under lease is.
        watch : Watch
            Looks at the bus while somebody waits.
        """
        policy = self.stash.policy
        timeout_s = math.inf if policy.on_timeout == "wait" else policy.group_timeout_s
        # Nothing that it keeps refers to it, so the last reference to its Consumer ends all.
        look = functools.partial(watch.look, self.segment, "a complete group")
        return _core.Intake(
            self.reader,
            self.stash.rows,
            self.lock,
            kind,
            attend=self.attend,
            lease=None if policy.max_policy_lag is None else self.lease,
            watch=None if watch.slice_s is None else look,
            portion=limits.POLL_RECORDS,
            portions=_TAKE_POLLS,
            watch_s=watch.slice_s or math.inf,
            group_timeout_s=math.inf if timeout_s is None else timeout_s,
        )

    def attend(self, intake: _core.Intake, left: Left, wanted: int, now: float) -> bool:
        """Do what is due, decide on what the intake has left, and say when to be called next.

        Returns
        -------
        bool
            Whether the ring may have more at once.

        Raises
        ------
        ProtocolError
            A duplicate came, under ``duplicate="error"``; once for each, with nothing lost.
        """
        stash = self.stash
        stash.apply_policy(left, now)
        self.run_maintenance(now)
        more = self.pump(wanted, now)
        if stash.discards or self._errors:
            self.release_discarded()
        failures = stash.failures
        intake.delegate_all = bool(
            failures.groups or failures.dirty or self._errors or self._bounded
        )
        intake.due_s = min(self._next_sweep_s, self._next_evacuation_s)
        due_s = stash.next_deadline_s()
        intake.wake_s = self._next_sweep_s if due_s is None else min(self._next_sweep_s, due_s)
        return more

    def pump(self, wanted: int, now: float) -> bool:
        """Move what the ring has into the stash; True if there may be more at once."""
        for _ in range(_TAKE_POLLS):
            if self.stash.ready_groups >= wanted:
                return True
            if not self.pump_once(now):
                return False
        return True

    def pump_once(self, now: float) -> bool:
        """Move one portion of the ring into the stash; True if there may be more."""
        stash = self.stash
        if self.divert is None:
            left: Left = []
            count = self.reader.poll_into(stash.rows, limits.POLL_RECORDS, now, left)
            stash.apply_policy(left, now)
        else:
            samples = self.reader.poll(limits.POLL_RECORDS)
            count = len(samples)
            stash.add(self.divert(samples), now)
        if self._expires:
            stash.expire(now)
        more = count == limits.POLL_RECORDS
        if stash.failures.groups or stash.failures.dirty:
            self._attend(now, drained=not more)
        return more

    def expire(self, now: float) -> None:
        """Do what is due for groups that wait, where nothing may come that would have it done."""
        self.stash.expire(now)
        failures = self.stash.failures
        due_s = failures.next_deadline_s()
        if failures.dirty or (due_s is not None and now >= due_s):
            self.pump_once(now)

    def _attend(self, now: float, *, drained: bool) -> None:
        """Look after groups in which a sample failed, and ask for what is wanted."""
        if drained:
            self.stash.expire_apart(now)
        if self.stash.failures.dirty:
            self._asking.update(now, drained=drained)

    def lease(self, max_groups: int) -> list[_core.GroupEntry[Trajectory]]:
        """Lease what is ready; ProtocolError as for `take`."""
        stash = self.stash
        if stash.discards or self._errors:
            self.release_discarded()
        leased = stash.lease(max_groups, self.segment.policy_version)
        if stash.discards:
            self.release_discarded()
        if leased:
            # The caller may not come back before a producer asks who holds the space.
            self.flush()
        return leased

    def wait_s(self, now: float, left: float | None) -> float:
        """Until the caller's deadline, the stash's, or the next look for dead producers."""
        candidates = [self._next_sweep_s - now]
        if left is not None:
            candidates.append(left)
        group_deadline = self.stash.next_deadline_s()
        if group_deadline is not None:
            candidates.append(group_deadline - now)
        return max(1e-4, min(candidates))

    # -- house-keeping --------------------------------------------------------------------------

    def run_maintenance(self, now: float) -> None:
        """Look for the dead, and for space that can be won back, each at its interval."""
        self.flush()
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + limits.SWEEP_INTERVAL_S
            self.reader.sweep()
            self._asking.look_for_dead()
        if now >= self._next_evacuation_s:
            self._next_evacuation_s = now + _EVACUATE_INTERVAL_S
            self._free_space()

    def _free_space(self) -> None:
        """Housekeeping under pressure: make room where records that wait keep it."""
        reader = self.reader
        segment = self.segment
        reader.tidy()
        few = segment.extent_count * _EVACUATE_FREE_FRACTION
        if segment.space_wanted() or segment.free_extents() < few:
            reader.sweep()
            reader.evacuate(self.stash.waiting_samples())

    def flush(self) -> None:
        """Tell other processes what is held here, for their messages."""
        self.reader.note(self.stash.rows)

    def release_discarded(self) -> None:
        """Release what the stash discarded; raise the next duplicate that is to be raised."""
        self.release_discards()
        if self._errors:
            raise self._errors.pop(0)

    def next_error(self) -> errors.ProtocolError | None:
        """Hand out a duplicate that is to be raised, once."""
        return self._errors.pop(0) if self._errors else None

    def release_discards(self) -> None:
        """Release what the stash discarded, each with its reason."""
        for discard in self.stash.take_discards():
            self.reader.release(discard.samples, REASONS.index(discard.reason))
            if discard.reason == "duplicate" and self._duplicate == "error":
                self._errors.append(_duplicate_error(discard))

    # -- ending leases --------------------------------------------------------------------------

    def is_leased(self, group: _core.GroupEntry[Trajectory]) -> bool:
        """Whether this collector gave the lease, and it has not ended."""
        return self.stash.is_leased(group)

    def end(self, group: _core.GroupEntry[Trajectory], reason: int) -> None:
        """Release a leased group: all of its samples, or, if this process dies now, none."""
        self.reader.release(group.samples, reason)
        self.stash.end_lease(group)
        if self.stash.discards:
            self.release_discards()

    def end_groups(
        self, consumer: object, groups: list[_core.GroupBase], reason: int, state: str
    ) -> int:
        """Leave all to `end`: each is atomic by itself."""
        return 0

    def give_back(self, group: _core.GroupEntry[Trajectory]) -> None:
        """Make a leased group the next to be delivered, also to who waits in `take`."""
        self.stash.give_back(group)
        self.reader.wake()

    # -- state ----------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The current policy version, as producers see it."""
        return self.segment.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.segment.policy_version = version

    def stats(self) -> Ledger:
        """Return the ledger: where every trajectory ever committed is now."""
        with self.lock:
            self.reader.sweep()
            committed, in_ring = self.reader.count_unread()
            stash = self.stash
            segment = self.segment
            return Ledger.from_counts(
                segment.released(),
                committed=committed,
                in_ring=in_ring,
                leased=stash.leased_records,
                stashed=stash.open_records + stash.ready_records,
                groups_open=stash.open_groups,
                groups_ready=stash.ready_groups,
                groups_leased=stash.leased_groups,
                groups_timed_out=stash.timeouts,
                groups_given_up=stash.given_up,
                samples_wanted=len(stash.failures.requests),
                stash_overflows=stash.overflows,
                moved=self.reader.moves,
                policy_version=segment.policy_version,
                producers=sum(row[1] == _core.SLOT_ACTIVE for row in segment.producers()),
                capacity=segment.capacity,
                free=segment.free_extents() * segment.extent_bytes,
            )

    def close(self) -> None:
        """Leave the bus. What is not acknowledged stays in the ring for the next collector."""
        self.reader.wake()
        with self.lock:
            self.reader.close()


def _duplicate_error(discard: Discard[Trajectory]) -> errors.ProtocolError:
    sample = discard.samples[0]
    return errors.ProtocolError(
        f"trajectory {sample.instance_id!r}[{sample.index}] came twice, now from producer "
        f"{sample.producer_id}; the first was kept. Number the samples of a prompt once, or give "
        "each repetition its own epoch"
    )
