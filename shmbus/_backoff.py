"""How long to wait before something that failed is tried again: longer each time, up to a cap."""

from __future__ import annotations

import zlib

__all__ = ["backoff_s"]


def backoff_s(backoff: tuple[float, float], attempt: int, of: object) -> float:
    """Return the seconds before an attempt, 1 for the first that follows a failure.

    They double from attempt to attempt, from the first of `backoff` to at most the second. What is
    returned is between half of that and all of it, by a hash of `of`: those that failed together
    do not come again together.
    """
    first_s, most_s = backoff
    longest_s = min(most_s, first_s * 2.0 ** min(max(attempt - 1, 0), 64))
    return longest_s * (0.5 + zlib.crc32(repr(of).encode()) / 2**33)
