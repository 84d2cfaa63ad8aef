"""The queue that TRL's trainer takes rows from; behind it are the groups of a bus."""

from __future__ import annotations

import queue
import time
from collections import deque
from typing import Any, Protocol

from trainer_adapter.adapters.trl.progress import RowMetrics

__all__ = ["RolloutBuffer"]


class GivesRows(Protocol):
    """Whoever takes groups and makes rows of them."""

    def _next_rows(self, timeout_s: float | None) -> list[Any]: ...
    def _hand_out(self, sample: Any) -> None: ...


class RolloutBuffer:
    """What TRL takes rows from: a queue whose other end is the bus."""

    def __init__(self, worker: GivesRows) -> None:
        self._worker = worker
        self._ready: deque[Any] = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next row; takes the next group when the rows of the last are gone."""
        ready = self._ready
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready.extend(self._worker._next_rows(left_s if block else 0.0))
            if not ready and (not block or (left_s is not None and left_s == 0)):
                raise queue.Empty
        sample = ready.popleft()
        self._worker._hand_out(sample)
        return sample

    def get_nowait(self) -> Any:
        """Return the next row, as ``get(block=False)``."""
        return self.get(block=False)

    def put_nowait(self, sample: Any) -> None:
        """Give a row back that `get` gave: it is the next one again."""
        if not isinstance(getattr(sample, "metrics", None), RowMetrics):
            raise TypeError(
                f"put_nowait: expected a row that get() gave, got {type(sample).__name__}; put "
                "samples into the bus by shmbus.Producer.put"
            )
        self._ready.appendleft(sample)

    def qsize(self) -> int:
        """Return the rows that are here; complete groups on the bus are not counted."""
        return len(self._ready)

    def empty(self) -> bool:
        """Whether no row is here."""
        return not self._ready
