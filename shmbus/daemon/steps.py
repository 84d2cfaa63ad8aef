"""The ranks of one training job: steps that are formed once, and shards that wait for their rank.

Invariants:

- A step is formed of whole groups, in the order of completion, for the ranks that have not taken
  it. Its shards are disjoint and never change.
- No group that is stale at that moment is in a step: the pool is judged again each time, and holds
  little more than the next step needs. A shard is not judged again: it belongs to a step of which
  another rank may have had its part.
- A shard is granted to its rank only. After a rank's death, its unfinished groups are the first
  that its successor gets.
- No rank waits for another to ask: the rank that asks first has the step formed for all, at most
  MAX_STEPS_AHEAD steps before the slowest.
- Steps are formed in ascending order, also for ranks that a new daemon finds at different steps.
  Otherwise a rank ahead could hold the space that the step of a rank behind needs.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from shmbus.control import messages
from shmbus.daemon.leases import MAX_GRANT_TRAJECTORIES, Lease

__all__ = ["StepPlanner", "balanced", "balanced_counts", "plan_step", "weigh"]

# -- which rank gets which group -------------------------------------------------------------------
# Pure functions of the groups' weights, in their order: all ranks agree, whichever asks first.
# Bounds, each by an exchange argument: `balanced` gives each group, heaviest first, to the rank
# with the least so far, so the heaviest and the lightest differ by at most the heaviest group.
# `balanced_counts` deals rounds of one group a rank, heaviest first, the heaviest of a round to the
# lightest rank: a round turns a difference d into at most max(d, its heaviest - its lightest).


Shards = list[list[int]]


def _heaviest_first(weights: Sequence[int]) -> list[int]:
    return sorted(range(len(weights)), key=lambda i: (-weights[i], i))


def _in_order(shards: Shards) -> Shards:
    for shard in shards:
        shard.sort()
    return shards


def balanced(weights: Sequence[int], ranks: int) -> Shards:
    """Split groups over ranks by weight; each rank gets at least one if there are enough."""
    shards: Shards = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for i in _heaviest_first(weights):
        load, rank = loads[0]
        shards[rank].append(i)
        heapq.heapreplace(loads, (load + weights[i], rank))
    return _in_order(shards)


def balanced_counts(weights: Sequence[int], ranks: int) -> Shards:
    """Split groups over ranks by weight, the same number to each."""
    shards: Shards = [[] for _ in range(ranks)]
    loads = [0] * ranks
    order = _heaviest_first(weights)
    for start in range(0, len(order), ranks):
        lightest_first = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for i, rank in zip(order[start : start + ranks], lightest_first, strict=True):
            shards[rank].append(i)
            loads[rank] += weights[i]
    return _in_order(shards)


def plan_step(
    weights: Sequence[int],
    ranks: int,
    *,
    groups: int | None = None,
    tokens: int | None = None,
    hurry: bool = False,
) -> Shards | None:
    """Form a step of the first groups, or return None while there are too few."""
    ready = len(weights)
    if ready < ranks:
        return None
    if groups is not None:
        count = min(groups, ready // ranks)
        if count < groups and not hurry:
            return None
        return balanced_counts(weights[: count * ranks], ranks)
    assert tokens is not None
    total, most = 0, 0
    for most, weight in enumerate(weights):  # noqa: B007
        total += weight
        if total > tokens * ranks:
            break
    else:
        most = ready
    if most == ready and total < tokens * ranks and not hurry:
        return None
    order = _heaviest_first(weights[:most])

    def is_above(count: int) -> bool:
        """Whether `balanced` gives a rank two groups or more that exceed its tokens."""
        loads = [0] * ranks
        for i in order:
            if i < count:
                load = loads[0] + weights[i]
                if load > tokens and loads[0]:
                    return True
                heapq.heapreplace(loads, load)
        return False

    # Greedy loads are not monotone in the count; bisection may miss a longer step that fits too.
    count = ranks + bisect_left(range(ranks + 1, most + 1), True, key=is_above)
    return balanced(weights[:count], ranks)


#: Steps that the fastest rank may be ahead of the slowest: steps formed for a slow rank hold space.
_MAX_STEPS_AHEAD = 64
#: Groups leased at a time for a step of a number of tokens, until it is full: groups beyond that
#: wait for the next step, and are weighed once.
_POOL_PORTION = 16

#: groups, tokens, max_wait and field: what all ranks must ask of a step alike.
StepRequest: TypeAlias = "tuple[int | None, int | None, float | None, str]"


def step_request(request: messages.TakeStep) -> StepRequest:
    """Return the part of a request that all ranks must agree on."""
    return request.groups, request.tokens, request.max_wait_s, request.field


def patience_s(request: messages.TakeStep) -> float:
    """Seconds after which a partial step is formed; infinite for never."""
    if request.only_full or request.max_wait_s is None:
        return math.inf
    return request.max_wait_s


def weigh(lease: Lease, field: str) -> int:
    """Return a group's weight: the elements of one field, or its bytes without such a field."""
    weight = 0
    for sample in lease.samples:
        if field not in sample:
            return sum(each.nbytes for each in lease.samples)
        elements = 1
        for size in sample.shape(field):
            elements *= size
        weight += elements
    return max(weight, 1)


class GroupSource(Protocol):
    """Where the groups of the next steps come from."""

    @property
    def ready_groups(self) -> int: ...
    def take(self, max_groups: int, max_trajectories: int) -> list[Lease]: ...
    def drop_stale(self, leases: Iterable[Lease]) -> set[Lease]: ...


class StepPlanner:
    """The steps of ranks 0 to size - 1, and the groups of which the next steps are formed."""

    def __init__(self, size: int, source: GroupSource) -> None:
        self.size = size
        #: The step that each rank takes next; ranks that have not taken or been given one are
        #: absent.
        self.next_steps: dict[int, int] = {}
        #: Groups here that no rank holds, and their trajectories.
        self.waiting_groups = 0
        self.waiting_records = 0
        #: The first step that was not formed yet for each rank.
        self._next_formed: dict[int, int] = {}
        #: Ranks whose next step was inferred from other ranks' requests.
        self._provisional: set[int] = set()
        #: Whether a rank has said where the job's steps are; until then they count from 0.
        self._located = False
        self._source = source
        #: Groups of no step yet, with their weights, the sum of these, and when the first came.
        self._pool: list[tuple[Lease, int]] = []
        self._pool_weight = 0
        self._pool_since_s = math.inf
        #: Grows when a waiting rank may get a step without any new group.
        self.changes = 0
        #: Whether the last `take` returned None because the pool has too few groups.
        self.lacks_groups = False
        #: The next step to form, and the ranks without a shard of that step.
        self._forming: tuple[int, list[int]] | None = None
        #: Shards that wait for their rank, by step and rank.
        self._shards: dict[int, dict[int, list[Lease]]] = {}
        #: How the first rank asked for each step.
        self._agreed: dict[int, StepRequest] = {}
        #: Groups that each rank had and did not finish.
        self._returned: dict[int, deque[Lease]] = {rank: deque() for rank in range(size)}

    def join(self, rank: int, next_step: int, held: Iterable[Lease] = ()) -> None:
        """Go on with a rank whose process knows its next step, or 0 where it has taken none.

        One that has taken none continues its predecessor's steps, or begins as `begin` says.
        """
        if not next_step:
            return
        self._note_change()
        if rank in self._provisional and not self._located:
            self._locate(rank, next_step, held)
        self._located = True
        if rank in self._provisional:
            self._provisional.discard(rank)
            self._renumber(rank, next_step)
        else:
            step = max(next_step, self.next_steps.get(rank, 0))
            self.next_steps[rank] = step
            self._next_formed[rank] = max(step, self._next_formed.get(rank, 0))

    def begin(self, held: Iterable[Lease]) -> None:
        """Have ranks whose step is unknown begin with the oldest that another rank has to do.

        Ranks train in step: what one of them holds is not done by the others either.
        """
        self._note_change()
        known = list(self.next_steps.values())
        known += [lease.step for lease in held if lease.step >= 0]
        known += [lease.step for returned in self._returned.values() for lease in returned]
        for rank in range(self.size):
            if rank not in self.next_steps:
                self._provisional.add(rank)
                self.next_steps[rank] = self._next_formed[rank] = min(known)

    def _locate(self, rank: int, next_step: int, held: Iterable[Lease]) -> None:
        """Renumber the steps of ranks that counted from 0, beside one that comes late and knows.

        Ranks train in step, so the first that they took meanwhile is the oldest that it has to do.
        """
        own = {lease for lease in held if lease.rank == rank and lease.step >= 0}
        by = min([next_step, *(lease.step for lease in own)]) - self.next_steps[rank]
        for by_rank in (self.next_steps, self._next_formed):
            by_rank.update({rank: step + by for rank, step in by_rank.items()})
        self._shards = {step + by: shards for step, shards in self._shards.items()}
        self._agreed = {step + by: request for step, request in self._agreed.items()}
        for lease in {*held, *self.waiting()} - own:
            if lease.step >= 0:
                lease.step += by

    def _renumber(self, rank: int, first: int) -> None:
        """Make the shards that wait for a rank those of its steps from `first` on."""
        waiting = sorted(step for step, by_rank in self._shards.items() if rank in by_rank)
        shards = [self._pop(step, rank) for step in waiting]
        for step, shard in enumerate(shards, first):
            self._shards.setdefault(step, {})[rank] = shard
            for lease in shard:
                lease.step = step
        self.next_steps[rank] = first
        self._next_formed[rank] = first + len(shards)

    def _pop(self, step: int, rank: int) -> list[Lease]:
        shards = self._shards[step]
        shard = shards.pop(rank)
        if not shards:
            del self._shards[step]
            self._agreed.pop(step, None)
        return shard

    def _next_step(self, rank: int) -> int:
        """Return the step that a rank takes next."""
        step = self.next_steps.get(rank)
        return min(self.next_steps.values(), default=0) if step is None else step

    def _note_change(self) -> None:
        self.changes += 1
        self._forming = None

    def _set_pool(self, entries: list[tuple[Lease, int]]) -> None:
        self._pool = entries
        self._pool_weight = sum(weight for _, weight in entries)

    def _count(self, leases: Iterable[Lease], sign: int) -> None:
        for lease in leases:
            self.waiting_groups += sign
            self.waiting_records += sign * len(lease.samples)

    def give_back(self, lease: Lease) -> None:
        """Keep a group that a rank did not finish: it is delivered to that rank first."""
        self._returned[lease.rank].append(lease)
        self._count([lease], 1)
        self._note_change()

    def disagreement(self, rank: int, request: messages.TakeStep) -> str | None:
        """Return how another rank asked for this step, if that differs from this request."""
        step = self._next_step(rank)
        agreed = self._agreed.setdefault(step, step_request(request))
        if self._returned[rank] or agreed == step_request(request):
            return None
        names = ("groups", "tokens", "max_wait", "field")
        ours = ", ".join(f"{n}={v!r}" for n, v in zip(names, agreed, strict=True))
        theirs = ", ".join(f"{n}={v!r}" for n, v in zip(names, step_request(request), strict=True))
        return (
            f"rank {rank} asks for step {step} with {theirs}; another rank asked with {ours}: all "
            "ranks must ask for a step alike"
        )

    def take(
        self, rank: int, request: messages.TakeStep, now: float
    ) -> tuple[int, list[Lease]] | None:
        """Return a rank's next step and its shard, or None to wait."""
        self.lacks_groups = False
        returned = self._returned[rank]
        if returned:
            step = min(lease.step for lease in returned)
            again = [lease for lease in returned if lease.step == step]
            self._count(again, -1)
            self._returned[rank] = deque(lease for lease in returned if lease.step != step)
            return step, sorted(again, key=lambda lease: lease.number)
        while True:
            step = self._next_step(rank)
            while rank not in self._shards.get(step, {}):
                if not self._form(step, request, now):
                    return None
            self._provisional.discard(rank)
            self.next_steps[rank] = step + 1
            shard = self._pop(step, rank)
            if shard:  # else all of it was trained already
                self._count(shard, -1)
                return step, shard

    def waiting(self) -> list[Lease]:
        """Return the groups here that no rank holds."""
        found = [lease for lease, _ in self._pool]
        for shards in self._shards.values():
            for shard in shards.values():
                found += shard
        for returned in self._returned.values():
            found += returned
        return found

    def withdraw(self, leases: Iterable[Lease]) -> None:
        """Forget groups that no rank holds, and that are not to be delivered."""
        gone = set(leases)
        self._set_pool([entry for entry in self._pool if entry[0] not in gone])
        for shards in self._shards.values():
            for rank, shard in shards.items():
                shards[rank] = [lease for lease in shard if lease not in gone]
        for rank, returned in self._returned.items():
            self._returned[rank] = deque(lease for lease in returned if lease not in gone)
        self._count(gone, -1)

    def _fill_pool(self, ranks: int, request: messages.TakeStep, now: float) -> None:
        """Drop what became stale in the pool, and lease what the next step still needs."""
        stale = self._source.drop_stale(lease for lease, _ in self._pool)
        if stale:
            self._set_pool([entry for entry in self._pool if entry[0] not in stale])
            self._count(stale, -1)
        while True:
            count = ranks - len(self._pool)
            if request.groups is not None:
                count = ranks * request.groups - len(self._pool)
            elif self._pool_weight < ranks * (request.tokens or 0):
                count = max(count, _POOL_PORTION)
            ready = []
            if count > 0:
                most = min(count, MAX_GRANT_TRAJECTORIES)
                ready = self._source.take(most, MAX_GRANT_TRAJECTORIES)
            if not ready:
                break
            entries = [(lease, weigh(lease, request.field)) for lease in ready]
            self._pool += entries
            self._pool_weight += sum(weight for _, weight in entries)
            self._count(ready, 1)
        self._pool_since_s = min(self._pool_since_s, now) if self._pool else math.inf

    def _is_full(self, ranks: int, request: messages.TakeStep) -> bool:
        """Whether the pool has all groups of a full step."""
        if request.groups is not None:
            return len(self._pool) >= ranks * request.groups
        return self._pool_weight >= ranks * (request.tokens or 0)

    def _form(self, wanted: int, request: messages.TakeStep, now: float) -> bool:
        """Form the next step on the way to `wanted`, for all ranks that have not had it."""
        if wanted - min(self.next_steps.values(), default=0) >= _MAX_STEPS_AHEAD:
            return False
        if self._forming is None:
            step = min(self._next_formed.values(), default=wanted)
            ranks = [rank for rank in range(self.size) if self._next_formed.get(rank, step) == step]
            self._forming = step, ranks
        step, ranks = self._forming
        self._fill_pool(len(ranks), request, now)
        hurry = now >= self.due_s(patience_s(request))
        shards = None
        if hurry or self._is_full(len(ranks), request):
            weights = [weight for _, weight in self._pool]
            shards = plan_step(
                weights, len(ranks), groups=request.groups, tokens=request.tokens, hurry=hurry
            )
        if shards is None:
            self.lacks_groups = True
            return False
        self._keep_shards(step, ranks, shards)
        self._pool_since_s = now if self._pool or self._source.ready_groups else math.inf
        return True

    def _keep_shards(self, step: int, ranks: list[int], shards: list[list[int]]) -> None:
        """Keep each rank's shard, given as positions in the pool, until it asks."""
        by_rank = self._shards.setdefault(step, {})
        used = set()
        for rank, positions in zip(ranks, shards, strict=True):
            by_rank[rank] = [self._pool[i][0] for i in positions]
            for lease in by_rank[rank]:
                lease.step, lease.rank = step, rank
            if rank not in self.next_steps:
                self.next_steps[rank] = step
                self._provisional.add(rank)
            self._next_formed[rank] = step + 1
            used.update(positions)
        self._set_pool([entry for i, entry in enumerate(self._pool) if i not in used])
        self._note_change()

    def due_s(self, patience_s: float) -> float:
        """Time at which a partial step is formed; infinite while the pool is empty."""
        return self._pool_since_s + patience_s

    def empty_pool(self) -> list[Lease]:
        """Return the groups of no step, since nobody is there to take one."""
        out = [lease for lease, _ in self._pool]
        self._set_pool([])
        self._pool_since_s = math.inf
        self._count(out, -1)
        return out

    def dissolve(self) -> list[Lease]:
        """Return all groups that no rank holds, after the end of the job."""
        out = self.empty_pool()
        for shards in self._shards.values():
            for shard in shards.values():
                out += shard
        for returned in self._returned.values():
            out += returned
        for lease in out:
            lease.step = lease.rank = -1
        self.waiting_groups = self.waiting_records = 0
        return out
