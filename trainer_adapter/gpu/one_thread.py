"""An object that one thread at a time may use, and an error for a second thread.

Invariant: a second thread never waits; it gets an error that names the first one.
"""

from __future__ import annotations

import threading

__all__ = ["OneThread"]


class OneThread:
    """Guards an object that one thread at a time may use; to enter by ``with``."""

    def __init__(self, name: str, remedy: str) -> None:
        self._name = name
        self._remedy = remedy
        self._lock = threading.Lock()
        self._inside = ""

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{self._name}: expected one thread at a time, got {_this_thread()} while "
                f"{self._inside} is in it; {self._remedy}, or let them take turns"
            )
        self._inside = _this_thread()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def _this_thread() -> str:
    return f"thread {threading.current_thread().name!r}"
