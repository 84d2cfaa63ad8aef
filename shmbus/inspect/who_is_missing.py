"""Which producer an incomplete group waits for, told from who has sent what.

Invariant: a producer is named only where no other one could be meant.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from shmbus.inspect.types import GroupCells, ProducerStatus

#: The part from which something is the custom: groups of one producer, an index of one.
_CUSTOM: Final = 0.8
#: The part of the busiest producer's samples from which one counts as a worker like the others.
_WORKERS_SHARE: Final = 0.05


def waiting_for(
    groups: Sequence[GroupCells], producers: Sequence[ProducerStatus] = ()
) -> list[int | None]:
    """Tell for each group the one producer that it waits for, where that can be told."""
    # It can of a sample that a producer took to make again, or says that it has begun; of an index
    # that one producer always sends; of a group whose samples all come from one producer, where
    # that is the custom; and where one producer alone has sent nothing to any of these groups.
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
    # Where each index has a sender of its own, the missing one belongs to who sent nothing.
    clear = several and None not in habits.values() and len(silent) == 1
    return [_waits_for(group, habits, silent if clear else set(), whole=whole) for group in groups]


def _usual(senders: Counter[int]) -> int | None:
    """Tell who sends an index as a rule: others make failed samples again."""
    ((number, most),) = senders.most_common(1)
    return number if most >= _CUSTOM * senders.total() else None


def _senders(group: GroupCells) -> set[int]:
    return {c.producer for c in group.cells if c.producer is not None and c.state != "begun"}


def _waits_for(
    group: GroupCells, habits: dict[int, int | None], only: set[int], *, whole: bool
) -> int | None:
    if group.cells_omitted or not group.size or 0 < group.need < group.size:
        return None  # any of the missing samples may complete it
    known = {cell.index: cell for cell in group.cells}
    senders = _senders(group)
    found: set[int | None] = set()
    for index in range(group.size):
        cell = known.get(index)
        if cell is not None and cell.state == "there":
            continue
        if cell is not None and cell.state == "failed":
            return None  # nobody makes it again
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
