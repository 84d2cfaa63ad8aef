"""Columns that a callable adds to complete groups, before these go into a batch.

Invariants:

- A group that is given to a batch has its columns, or it waits here, leased, for the next attempt.
- A column is added once: what has columns is not given to the callable again in this process. After
  a death the group is delivered as its producers put it, and annotated anew.
"""

from __future__ import annotations

from collections.abc import Callable
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
        self, annotate_group: AnnotateGroup, tokens: str, extra_fields: ExtraFields | None
    ) -> None:
        self._calls = GroupCalls("annotate_group", annotate_group)
        self._tokens = tokens
        self._extra_fields = extra_fields

    def annotate(self, groups: list[shmbus.Group]) -> list[shmbus.Group]:
        """Add the columns of groups that have none yet."""
        leased = [group for group in groups if group.state == "leased"]
        self._calls.run([group for group in leased if not group.columns], self._settle)
        return leased

    def _settle(self, group: shmbus.Group, given: Any) -> None:
        group.columns.update(check_columns(group, given, self._tokens, self._extra_fields))

    def close(self) -> None:
        """End what is under way; who waits for it gets BusClosedError."""
        self._calls.close()
