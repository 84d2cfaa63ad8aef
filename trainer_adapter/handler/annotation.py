"""Columns that a callable adds to complete groups, before these go into a batch.

Invariants:

- A group that is given to a batch has its columns, or it waits here, leased, for the next attempt.
- A column is added once: what has columns is not given to the callable again in this process. After
  a death the group is delivered as its producers put it, and annotated anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import shmbus
from trainer_adapter.batches.columns import check_columns
from trainer_adapter.batches.extra_fields import ExtraFields
from trainer_adapter.handler.group_calls import GroupCalls

__all__ = ["AnnotateGroup", "GroupAnnotation"]

#: Returns, by name, an array of each sample of a group. It may be a coroutine function.
AnnotateGroup: TypeAlias = Callable[[shmbus.Group], Any]


class GroupAnnotation:
    """Has a callable add columns to groups that have none."""

    def __init__(
        self,
        annotate_group: AnnotateGroup | Sequence[AnnotateGroup],
        tokens: str,
        extra_fields: ExtraFields | None,
    ) -> None:
        given: Any = annotate_group
        passes = given if isinstance(given, Sequence) else [given]
        self._passes = [GroupCalls("annotate_group", one) for one in passes]
        #: Groups on their way, by identity, each with the passes that it has.
        self._begun: dict[int, tuple[shmbus.Group, int]] = {}
        self._tokens = tokens
        self._extra_fields = extra_fields

    def annotate(self, groups: list[shmbus.Group]) -> list[shmbus.Group]:
        """Add the columns of groups that have none yet."""
        leased = [group for group in groups if group.state == "leased"]
        for number, calls in enumerate(self._passes):
            due = [group for group in leased if self._count(group) == number]
            calls.run(due, self._settle)
        for group in leased:
            self._begun.pop(id(group), None)
        return leased

    def _count(self, group: shmbus.Group) -> int:
        """Return how many passes a group has had; all, where it has columns and none is due."""
        found = self._begun.get(id(group))
        return (len(self._passes) if group.annotated else 0) if found is None else found[1]

    def _settle(self, group: shmbus.Group, given: Any) -> None:
        count = self._count(group)
        columns = check_columns(group, given, self._tokens, self._extra_fields)
        self._begun[id(group)] = group, count + 1
        group.columns.update(columns)

    def close(self) -> None:
        """End what is under way; who waits for it gets BusClosedError."""
        for calls in self._passes:
            calls.close()
