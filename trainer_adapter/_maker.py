"""A handler's steps to a batch, as the thread that prefetches takes them.

Invariant: nothing here decides anything; each step is the handler's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import shmbus
from trainer_adapter.packing import Batch

if TYPE_CHECKING:
    from trainer_adapter.handler import OnlineDataHandler

__all__ = ["HandlerMaker"]


class HandlerMaker:
    """A handler's steps to a batch, for the thread that prefetches.

    Parameters
    ----------
    handler : OnlineDataHandler
    """

    def __init__(self, handler: OnlineDataHandler) -> None:
        self._handler = handler

    def consumer(self) -> shmbus.Consumer:
        """Return where groups come from."""
        return self._handler._consumer

    def hold(self, groups: list[shmbus.Group]) -> None:
        """Keep groups for the next batches."""
        self._handler._hold_all(groups)

    def holds_any(self) -> bool:
        """Tell whether a group is held."""
        return bool(self._handler._held)

    def holds_full(self) -> bool:
        """Tell whether the next batch is full."""
        return self._handler._full()

    def make(self) -> Batch | None:
        """Make a batch of what is held."""
        return self._handler._make(self._handler._cut())

    def unmake(self, batch: Batch) -> None:
        """Hold the groups of a batch again, before all others."""
        self._handler._unmake(batch)
