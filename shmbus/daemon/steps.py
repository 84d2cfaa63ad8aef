"""The ranks of one training job: steps that are formed once, and shards that wait for their rank.

Invariants:

- A step is formed of whole groups, in the order of completion, for the ranks that have not had it;
  its shards are disjoint and do not change any more.
- A shard is granted to its rank only. What a rank had and did not end comes to it again, before
  anything else, when it is back.
- No rank waits for another to ask: a step is formed for all by whoever asks first, at most
  MAX_STEPS_AHEAD steps before the slowest.
- Steps are formed in their order, also for ranks that a new daemon finds at different ones: what a
  rank ahead holds could else be the space that the step of one behind has to come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from shmbus import limits
from shmbus.control import messages
from shmbus.daemon.leases import Lease
from shmbus.daemon.sharding import plan_step

__all__ = ["StepPlanner", "weigh"]

Numbers = tuple[int | None, int | None, float | None, str]


def step_request(request: messages.TakeStep) -> Numbers:
    """Return what all ranks must agree on."""
    return request.groups, request.tokens, request.max_wait_s, request.field


def weigh(lease: Lease, field: str) -> int:
    """Return the elements of one field, or the group's bytes where it has no such field."""
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
    """Ranks 0 to size - 1, their steps, and the groups that wait to become one.

    Parameters
    ----------
    size : int
        2 or more.
    more : callable
        Leases what is ready in the stash.
    """

    def __init__(self, size: int, more: Callable[[], list[Lease]]) -> None:
        self.size = size
        #: What each rank takes next, of those that have a place among the steps.
        self.next_steps: dict[int, int] = {}
        self._next_formed: dict[int, int] = {}
        #: Ranks that have their place from a step that others asked for.
        self._provisional: set[int] = set()
        self._more = more
        self._pool: list[tuple[Lease, int]] = []
        self._pool_since_s: float | None = None
        self._shards: dict[int, dict[int, list[Lease]]] = {}
        self._numbers: dict[int, Numbers] = {}
        self._back: dict[int, deque[Lease]] = {rank: deque() for rank in range(size)}

    def join(self, rank: int, next_step: int, *, returns: bool) -> None:
        """Let a rank in; one that `returns` had a daemon before, which this one may not have been.

        A new process takes the place of the one before it, or else one beside the slowest rank.
        """
        if not returns:
            return
        if rank in self._provisional:
            self._provisional.discard(rank)
            self._renumber(rank, next_step)
        else:
            place = max(next_step, self.next_steps.get(rank, 0))
            self.next_steps[rank] = place
            self._next_formed[rank] = max(place, self._next_formed.get(rank, 0))

    def _renumber(self, rank: int, first: int) -> None:
        """Let the shards that wait for a rank be those of its steps from `first` on."""
        waiting = sorted(step for step, held in self._shards.items() if rank in held)
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
            self._numbers.pop(step, None)
        return shard

    def _place(self, rank: int) -> int:
        """Return the step that a rank takes next."""
        return self.next_steps.get(rank, min(self.next_steps.values(), default=0))

    def give_back(self, lease: Lease) -> None:
        """Keep what a rank did not end: it is the first that it gets again."""
        self._back[lease.rank].append(lease)

    def disagreement(self, rank: int, request: messages.TakeStep) -> str | None:
        """Say what another rank asked this step to be, where that differs."""
        step = self._place(rank)
        agreed = self._numbers.setdefault(step, step_request(request))
        if self._back[rank] or agreed == step_request(request):
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
        """Give this rank what it has to do next: a step and its shard; None to wait."""
        back = self._back[rank]
        if back:
            step = min(lease.step for lease in back)
            again = [lease for lease in back if lease.step == step]
            self._back[rank] = deque(lease for lease in back if lease.step != step)
            return step, sorted(again, key=lambda lease: lease.number)
        step = self._place(rank)
        while rank not in self._shards.get(step, {}):
            if not self._form(step, request, now):
                return None
        self._provisional.discard(rank)
        self.next_steps[rank] = step + 1
        return step, self._pop(step, rank)

    def _form(self, wanted: int, request: messages.TakeStep, now: float) -> bool:
        """Form the next step on the way to a wanted one, for all ranks that have not had it."""
        if wanted - min(self.next_steps.values(), default=0) >= limits.MAX_STEPS_AHEAD:
            return False
        fresh = self._more()
        if fresh:
            self._pool += [(lease, weigh(lease, request.field)) for lease in fresh]
            if self._pool_since_s is None:
                self._pool_since_s = now
        step = min(self._next_formed.values(), default=wanted)
        ranks = [rank for rank in range(self.size) if self._next_formed.get(rank, step) == step]
        due = self.due_s(request)
        shards = plan_step(
            [weight for _, weight in self._pool],
            len(ranks),
            groups=request.groups,
            tokens=request.tokens,
            hurry=due is not None and now >= due,
        )
        if shards is None:
            return False
        self._hold(step, ranks, shards)
        self._pool_since_s = now if self._pool else None
        return True

    def _hold(self, step: int, ranks: list[int], shards: list[list[int]]) -> None:
        """Keep each rank's shard, given as positions in the pool, until it asks."""
        held = self._shards.setdefault(step, {})
        used = set()
        for rank, positions in zip(ranks, shards, strict=True):
            held[rank] = [self._pool[i][0] for i in positions]
            for lease in held[rank]:
                lease.step, lease.rank = step, rank
            if rank not in self.next_steps:
                self.next_steps[rank] = step
                self._provisional.add(rank)
            self._next_formed[rank] = step + 1
            used.update(positions)
        self._pool = [entry for i, entry in enumerate(self._pool) if i not in used]

    def due_s(self, request: messages.TakeStep) -> float | None:
        """When a step is formed of what there is."""
        if request.only_full or request.max_wait_s is None or self._pool_since_s is None:
            return None
        return self._pool_since_s + request.max_wait_s

    def dissolve(self) -> list[Lease]:
        """All that no rank holds; the job is over."""
        out = [lease for lease, _ in self._pool]
        for shards in self._shards.values():
            for shard in shards.values():
                out += shard
        for back in self._back.values():
            out += back
        for lease in out:
            lease.step = lease.rank = -1
        return out

    @property
    def waiting_groups(self) -> int:
        """Groups that no rank holds yet."""
        return (
            len(self._pool)
            + sum(len(shard) for shards in self._shards.values() for shard in shards.values())
            + sum(len(back) for back in self._back.values())
        )
