"""The ranks of a training job: steps formed once, and shards waiting for their rank.

Invariants:

- A step consists of whole groups, in the order of completion, for the ranks that have not taken it.
  Its shards are disjoint and never change.
- A step contains no group stale at its formation: the pool is judged again each time, and holds
  little beyond the next step's need. A shard is not judged again: another rank may already hold its
  part of the step.
- A shard is granted to its rank only. After a rank's death, its successor gets the unfinished
  groups first.
- No rank waits for another rank's request: the first request forms the step for every rank, at most
  MAX_STEPS_AHEAD steps before the slowest.
- Steps are formed in ascending order, also if a new daemon finds the ranks at different steps.
  Otherwise a rank ahead could hold the space needed for the step of a rank behind.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from shmbus.control import messages
from shmbus.daemon.leases import MAX_GRANT_TRAJECTORIES, Lease, LeaseTable

# -- groups to ranks -------------------------------------------------------------------------------
# Pure functions of the groups' weights, in order: the result does not depend on the asking rank.
# Bounds, each by an exchange argument: `balanced` gives each group, heaviest first, to the lightest
# rank so far, so the heaviest and the lightest rank differ by at most the heaviest group.
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
    """Split groups over ranks by weight, at least one group a rank if possible."""
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
    """Form a step of the first groups, or return None with too few groups."""
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
        """Return True if `balanced` gives a rank two or more groups above its tokens."""
        loads = [0] * ranks
        for i in order:
            if i < count:
                load = loads[0] + weights[i]
                if load > tokens and loads[0]:
                    return True
                heapq.heapreplace(loads, load)
        return False

    # Greedy loads are not monotone in the count; bisection may miss a longer fitting step.
    count = ranks + bisect_left(range(ranks + 1, most + 1), True, key=is_above)
    return balanced(weights[:count], ranks)


#: Steps between the fastest and the slowest rank, at most: steps formed for a slow rank hold space.
_MAX_STEPS_AHEAD = 64
#: Groups leased at a time to fill a step of a number of tokens: surplus groups wait for the next
#: step, and are weighed once.
_POOL_PORTION = 16

#: groups, tokens, max_wait and field: equal in every rank's request for a step.
StepRequest: TypeAlias = "tuple[int | None, int | None, float | None, str]"


def step_request(request: messages.TakeStep) -> StepRequest:
    """Return the part of a request equal in every rank."""
    return request.groups, request.tokens, request.max_wait_s, request.field


def patience_s(request: messages.TakeStep) -> float:
    """Return the seconds until a partial step; infinite for never."""
    if request.only_full or request.max_wait_s is None:
        return math.inf
    return request.max_wait_s


def weigh(lease: Lease, field: str) -> int:
    """Return a group's weight: the elements of a field, or its bytes without such a field."""
    weight = 0
    for sample in lease.samples:
        if field not in sample:
            return sum(each.nbytes for each in lease.samples)
        elements = 1
        for size in sample.shape(field):
            elements *= size
        weight += elements
    return max(weight, 1)


class StepPlanner:
    """The steps of ranks 0 to size - 1, and the groups for the next steps."""

    def __init__(self, size: int, source: LeaseTable) -> None:
        self.size = size
        #: Each rank's next step; absent for ranks without a taken or assigned step.
        self.next_steps: dict[int, int] = {}
        #: Groups here without a holder, and their trajectories.
        self.waiting_groups = 0
        self.waiting_records = 0
        #: By rank: the first step not formed yet.
        self._next_formed: dict[int, int] = {}
        #: Ranks with a next step inferred from other ranks' requests.
        self._provisional: set[int] = set()
        #: True after a rank reported the job's steps; until then they count from 0.
        self._located = False
        self._source = source
        #: Groups of no step yet, with their weights, the sum of these, and when the first came.
        self._pool: list[tuple[Lease, int]] = []
        self._pool_weight = 0
        self._pool_since_s = math.inf
        #: Grows when a waiting rank may get a step without any new group.
        self.changes = 0
        #: True if the last `take` returned None for lack of groups in the pool.
        self.lacks_groups = False
        #: The next step to form, and the ranks without a shard of that step.
        self._forming: tuple[int, list[int]] | None = None
        #: Shards waiting for their rank, by step and rank.
        self._shards: dict[int, dict[int, list[Lease]]] = {}
        #: The first rank's request for each step.
        self._agreed: dict[int, StepRequest] = {}
        #: Unfinished groups of each rank.
        self._returned: dict[int, deque[Lease]] = {rank: deque() for rank in range(size)}

    def join(self, rank: int, next_step: int, held: Iterable[Lease] = ()) -> None:
        """Continue with a rank at its process's next step, or without one at its predecessor's."""
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
        """Let ranks without a known step begin with the oldest unfinished step of any rank."""
        self._note_change()
        known = list(self.next_steps.values())
        known += [lease.step for lease in held if lease.step >= 0]
        known += [lease.step for returned in self._returned.values() for lease in returned]
        for rank in range(self.size):
            if rank not in self.next_steps:
                self._provisional.add(rank)
                self.next_steps[rank] = self._next_formed[rank] = min(known)

    def _locate(self, rank: int, next_step: int, held: Iterable[Lease]) -> None:
        """Renumber the steps of ranks counting from 0, after a late rank's known step."""
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
        """Assign a rank's waiting shards to its steps from `first` on."""
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
        """Keep a rank's unfinished group, delivered first to the same rank."""
        self._returned[lease.rank].append(lease)
        self._count([lease], 1)
        self._note_change()

    def disagreement(self, rank: int, request: messages.TakeStep) -> str | None:
        """Return a differing earlier request for this step, or None."""
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
            if shard:  # otherwise trained already
                self._count(shard, -1)
                return step, shard

    def waiting(self) -> list[Lease]:
        """Return the groups here without a holder."""
        found = [lease for lease, _ in self._pool]
        for shards in self._shards.values():
            for shard in shards.values():
                found += shard
        for returned in self._returned.values():
            found += returned
        return found

    def withdraw(self, leases: Iterable[Lease]) -> None:
        """Forget groups without a holder, excluded from delivery."""
        gone = set(leases)
        self._set_pool([entry for entry in self._pool if entry[0] not in gone])
        for shards in self._shards.values():
            for rank, shard in shards.items():
                shards[rank] = [lease for lease in shard if lease not in gone]
        for rank, returned in self._returned.items():
            self._returned[rank] = deque(lease for lease in returned if lease not in gone)
        self._count(gone, -1)

    def _fill_pool(self, ranks: int, request: messages.TakeStep, now: float) -> None:
        """Drop newly stale groups from the pool, and lease the next step's missing groups."""
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
        if request.groups is not None:
            return len(self._pool) >= ranks * request.groups
        return self._pool_weight >= ranks * (request.tokens or 0)

    def _form(self, wanted: int, request: messages.TakeStep, now: float) -> bool:
        """Form the next step on the way to `wanted`, for every rank without it."""
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
        """Keep each rank's shard, given as positions in the pool, until its request."""
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
        """Time of the next partial step; infinite for an empty pool."""
        return self._pool_since_s + patience_s

    def empty_pool(self) -> list[Lease]:
        """Return the groups outside steps, after the last rank left."""
        out = [lease for lease, _ in self._pool]
        self._set_pool([])
        self._pool_since_s = math.inf
        # The next job may ask for other numbers; formed shards stay.
        self._agreed.clear()
        self._count(out, -1)
        return out

    def dissolve(self) -> list[Lease]:
        """Return every group without a holder, after the end of the job."""
        out = self.waiting()
        self.empty_pool()
        for lease in out:
            lease.step = lease.rank = -1
        self.waiting_groups = self.waiting_records = 0
        return out
