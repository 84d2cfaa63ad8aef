"""A handler's steps to a batch, as the thread that prefetches takes them.

Invariant: nothing here decides anything; each step is the handler's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import shmbus
from trainer_adapter.batches.batch import Batch
from trainer_adapter.handler.prefetch import TAKE_GROUPS, Take

if TYPE_CHECKING:
    from trainer_adapter.handler.handler import OnlineDataHandler

__all__ = ["HandlerMaker"]


class HandlerMaker:
    """A handler's steps to a batch, for the thread that prefetches.

    Parameters
    ----------
    handler : OnlineDataHandler
    """

    def __init__(self, handler: OnlineDataHandler) -> None:
        self._handler = handler

    def take(self) -> Take:
        """Return what waits for groups."""
        handler = self._handler
        if handler._sharded:
            return _take_step(handler._consumer, handler._step_options())
        return _take(handler._consumer)

    def hold(self, groups: list[shmbus.Group]) -> None:
        """Keep groups for the next batches."""
        self._handler._hold_all(groups)

    def holds_any(self) -> bool:
        """Tell whether a group is held."""
        return bool(self._handler._held)

    def holds_full(self) -> bool:
        """Tell whether the next batch is full."""
        return self._handler._held.full

    def make(self) -> Batch | None:
        """Make a batch of what is held."""
        return self._handler._make(self._handler._held.cut())

    def unmake(self, batch: Batch) -> None:
        """Hold the groups of a batch again, before all others."""
        self._handler._unmake(batch)


# Of neither may the handler be part: whoever waits would keep it alive.
def _take(consumer: shmbus.Consumer) -> Take:
    def take(seconds: float, awaited: bool) -> list[shmbus.Group]:
        return consumer.take(TAKE_GROUPS, seconds)

    return take


def _take_step(consumer: shmbus.Consumer, options: dict[str, Any]) -> Take:
    def take(seconds: float, awaited: bool) -> list[shmbus.Group]:
        return consumer.take_step(**options, timeout=seconds, only_full=not awaited)

    return take
