"""Waiting for another process: by a bell, in slices, since a death rings no bell.

Invariant: a wait ends with the awaited event, with the peer's end, or at its deadline, each
reported in the caller's own words.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

#: Longest seconds of a sleep: deaths ring no bell.
SLICE_S: Final = 0.05

_T = TypeVar("_T")


def wait_for(
    ready: Callable[[], _T | None],
    *,
    announce: Callable[[], int],
    sleep: Callable[[int, float], object],
    gone: Callable[[], Exception | None],
    late: Callable[[], Exception],
    deadline: float | None,
    slice_s: float = SLICE_S,
) -> _T:
    """Poll `ready` for a value; raise the error from `gone`, or `late` at the deadline."""
    while True:
        # Before the look: a later event ends the sleep.
        ticket = announce()
        got = ready()
        if got is not None:
            return got
        end = gone()
        if end is not None:
            # The peer may have done its last deed between the two looks.
            got = ready()
            if got is not None:
                return got
            try:
                raise end
            finally:
                del end  # which refers to this frame
        left = slice_s if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise late()
        sleep(ticket, min(left, slice_s))
