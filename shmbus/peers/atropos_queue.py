"""The choice of groups for the next batch, and the queue sizes reported to environments.

Groups of differing sizes make batches of an exact number of sequences, as in the API server of
Atropos 0.4.0: groups of a size are taken in packs as large as the largest waiting group, so sizes
must divide each other. A group of another size than its environment registered waits until it
completes this size together with more groups of the environment. No clock, no socket, no thread.

Invariant: a group is in the queue or in a single buffer, until `take` or `clear` returns it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

#: Groups of an environment buffered at most to complete its group size; above, the oldest go on
#: alone. The search for a sum is linear in this number, and an environment without fitting sums
#: must not hold the bus.
MAX_BUFFERED: Final = 1024


class Waiting(NamedTuple):
    """A group waiting for its batch."""

    #: Sequences.
    size: int
    #: The group's environment.
    env_id: int | None
    #: The caller's handle of the group.
    group: Any


def fitting(sizes: Sequence[int], target: int) -> list[int]:
    """Return the indices of items with this sum of sizes, earlier items first."""
    total, chosen = 0, []
    for at, size in enumerate(sizes):
        if total + size <= target:
            total += size
            chosen.append(at)
            if total == target:
                return chosen
    if sum(sizes) < target:
        return []
    # Bit s of reach[i]: a subset of the first i items sums to s.
    reach = [1]
    for size in sizes:
        reach.append((reach[-1] | reach[-1] << size) & ((2 << target) - 1))
    if not reach[-1] >> target & 1:
        return []
    chosen, left = [], target
    for at in range(len(sizes) - 1, -1, -1):
        if left >= sizes[at] and reach[at] >> (left - sizes[at]) & 1:
            chosen.append(at)
            left -= sizes[at]
    return chosen[::-1]


def _packs(waiting: Iterable[Waiting], largest: int) -> list[Waiting]:
    """Return the groups in whole packs, pack by pack."""
    open_packs: dict[int, list[Waiting]] = {}
    packed = []
    for each in waiting:
        pack = open_packs.setdefault(each.size, [])
        pack.append(each)
        if len(pack) * each.size == largest:
            packed += open_packs.pop(each.size)
    return packed


def choose(waiting: Sequence[Waiting], batch_size: int) -> list[Waiting] | None:
    """Choose groups for a batch, the oldest packs first."""
    if sum(each.size for each in waiting) < batch_size or not waiting or batch_size < 1:
        return None
    chosen, total = [], 0
    for each in _packs(waiting, max(each.size for each in waiting)):
        chosen.append(each)
        total += each.size
        if total >= batch_size:
            break
    return chosen if total == batch_size else None


def _quotas(
    packed: Mapping[int, list[Waiting]], batch_size: int, minimums: Mapping[int, float]
) -> dict[int, int] | None:
    """Return each environment's least number of sequences; None if an environment lacks a pack."""
    quotas = {env: int(batch_size * share) for env, share in minimums.items()}
    quotas = {env: quota for env, quota in quotas.items() if quota > 0}
    if any(not packed.get(env) for env in quotas):
        return None
    total = sum(quotas.values())
    if total > batch_size:
        for env, quota in quotas.items():
            smallest = min(each.size for each in packed[env])
            quotas[env] = max(smallest, int(quota * (batch_size / total)))
    return quotas


def choose_with_minimums(
    waiting: Sequence[Waiting], batch_size: int, minimums: Mapping[int, float]
) -> list[Waiting] | None:
    """Choose groups for a batch with guaranteed shares of some environments."""
    if not minimums:
        return choose(waiting, batch_size)
    if not waiting or batch_size < 1:
        return None
    largest = max(each.size for each in waiting)
    by_env: dict[int, list[Waiting]] = {}
    for each in waiting:
        if each.env_id is not None:
            by_env.setdefault(each.env_id, []).append(each)
    packed = {env: _packs(groups, largest) for env, groups in by_env.items()}
    quotas = _quotas(packed, batch_size, minimums)
    if quotas is None:
        return None
    chosen: dict[int, Waiting] = {}
    total = 0
    for env, quota in quotas.items():
        taken = 0
        for each in packed[env]:
            if taken >= quota:
                break
            if total + each.size <= batch_size:
                chosen[id(each)] = each
                taken += each.size
                total += each.size
    packable = {id(each) for groups in packed.values() for each in groups}
    for each in waiting:
        if total == batch_size:
            break
        fits = id(each) in packable and id(each) not in chosen
        if fits and total + each.size <= batch_size:
            chosen[id(each)] = each
            total += each.size
    return list(chosen.values()) if total == batch_size else None


class GroupQueue:
    """Groups waiting for a trainer, in the order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}
        self._buffers: dict[int, list[Waiting]] = {}
        #: Waiting groups by (env_id, size), without buffered groups.
        self.counts: Counter[tuple[int | None, int]] = Counter()
        #: Number of changes of the counts.
        self.changes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting, expected_size: int | None) -> None:
        """Add a group."""
        env = waiting.env_id
        if env is None or expected_size is None or waiting.size == expected_size:
            self._append(waiting)
            return
        buffer = self._buffers.setdefault(env, [])
        buffer.append(waiting)
        found = fitting([each.size for each in buffer], expected_size)
        for each in [buffer[at] for at in found]:
            self._append(each)
        for at in reversed(found):
            del buffer[at]
        if len(buffer) > MAX_BUFFERED:
            self._append(buffer.pop(0))

    def _append(self, waiting: Waiting) -> None:
        self._waiting[id(waiting)] = waiting
        self.counts[waiting.env_id, waiting.size] += 1
        self.changes += 1

    def buffered(self, env_id: int) -> int:
        """Return the number of an environment's buffered sequences."""
        return sum(each.size for each in self._buffers.get(env_id, ()))

    def take(self, batch_size: int, minimums: Mapping[int, float]) -> list[Waiting] | None:
        """Take the groups of the next batch out of the queue."""
        chosen = choose_with_minimums(list(self._waiting.values()), batch_size, minimums)
        self.changes += chosen is not None
        for each in chosen or ():
            del self._waiting[id(each)]
            key = (each.env_id, each.size)
            self.counts[key] -= 1
            if not self.counts[key]:
                del self.counts[key]
        return chosen

    def put_back(self, chosen: list[Waiting]) -> None:
        """Return taken groups to the front of the queue."""
        others, self._waiting = self._waiting, {}
        for each in chosen:
            self._append(each)
        self._waiting |= others
        self.changes += 1

    def clear(self) -> list[Waiting]:
        """Forget and return every group."""
        found = [*self._waiting.values()]
        for buffer in self._buffers.values():
            found += buffer
        self._waiting.clear()
        self._buffers.clear()
        self.counts.clear()
        self.changes += 1
        return found


class Availability:
    """Queue sizes for environments, from a state of the queue."""

    def __init__(
        self, counts: Mapping[tuple[int | None, int], int], quotas: Mapping[int, int]
    ) -> None:
        #: The size of the largest group, at least 1.
        self.largest = max([1, *(size for _, size in counts)])
        self._sequences: Counter[int | None] = Counter()
        self._own_largest: dict[int | None, int] = {}
        for (env, size), groups in counts.items():
            self._sequences[env] += size * groups
            self._own_largest[env] = max(size, self._own_largest.get(env, 0))
        #: By environment: sequences in whole packs above its quota; and the sum.
        self._packed: dict[int | None, int] = {}
        if self.largest > 1:
            for env, count in self._sequences.items():
                quota = 0 if env is None else quotas.get(env, 0)
                whole = math.ceil(count / self.largest) * self.largest
                self._packed[env] = max(0, whole - quota)
        self._all_packed = sum(self._packed.values())

    def of(self, env_id: int, group_size: int) -> tuple[int, int, int]:
        """Return an environment's report: queue, its own part, its group size."""
        size = max(group_size, self._own_largest.get(env_id, 0))
        own = self._sequences.get(env_id, 0)
        others = self._all_packed - self._packed.get(env_id, 0)
        divisor = max(1, size)
        return (own + others) // divisor, own // divisor, size
