"""The producer an incomplete group waits for, told from the arrived samples.

Invariant: a producer is named only if no second producer qualifies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from shmbus.data.status_types import GroupCells, ProducerStatus

#: Minimum share of a custom: of groups with a single producer, or of an index from a single
#: producer.
_CUSTOM: Final = 0.8
#: Minimum share of the busiest producer's samples that makes a producer a regular worker.
_WORKERS_SHARE: Final = 0.05


def waiting_for(
    groups: Sequence[GroupCells], producers: Sequence[ProducerStatus] = ()
) -> list[int | None]:
    """Name for each group the only producer in question, or None."""
    # Four kinds of evidence: the producer claimed the sample again, or began it; the producer
    # always sends that index; by custom a group's samples come from a single producer; only that
    # producer sent nothing to these groups.
    sends: defaultdict[int, Counter[int]] = defaultdict(Counter)
    alone = several = 0
    for group in groups:
        senders = _senders(group)
        if sum(cell.state != "begun" for cell in group.cells) > 1:
            alone += len(senders) == 1
            several += len(senders) > 1
        for cell in group.cells:
            if cell.producer is not None and cell.state == "there":
                sends[cell.index][cell.producer] += 1
    whole = alone > 0 and alone >= _CUSTOM * (alone + several)
    habits = {index: _usual(senders) for index, senders in sends.items()}
    most = max((p.committed for p in producers), default=0)
    silent = {
        p.producer_id
        for p in producers
        if p.state != "closed" and p.committed >= _WORKERS_SHARE * most
    } - set(habits.values())
    # If every known index belongs to a producer, the missing index belongs to the silent producer.
    clear = several and None not in habits.values() and len(silent) == 1
    return [_waits_for(group, habits, silent if clear else set(), whole=whole) for group in groups]


def _usual(senders: Counter[int]) -> int | None:
    """Return the usual sender of an index; retries may come from other producers."""
    ((number, most),) = senders.most_common(1)
    return number if most >= _CUSTOM * senders.total() else None


def _senders(group: GroupCells) -> set[int]:
    return {c.producer for c in group.cells if c.producer is not None and c.state != "begun"}


def _waits_for(
    group: GroupCells, habits: dict[int, int | None], only: set[int], *, whole: bool
) -> int | None:
    if group.cells_omitted or not group.size or 0 < group.need < group.size:
        return None  # several of the missing samples may complete it
    known = {cell.index: cell for cell in group.cells}
    senders = _senders(group)
    found: set[int | None] = set()
    for index in range(group.size):
        cell = known.get(index)
        if cell is not None and cell.state == "there":
            continue
        if cell is not None and cell.state == "failed":
            return None  # no producer makes it again
        if cell is not None:
            found.add(cell.taken_by if cell.state == "asked" else cell.producer)
        elif whole and len(senders) == 1:
            found |= senders
        elif index in habits:
            found.add(habits[index])
        elif only:
            found |= only
        else:
            found.add(None)
        if len(found) > 1:
            return None
    return found.pop() if found else None
