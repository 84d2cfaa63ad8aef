"""How long to wait before something that failed is tried again: longer each time, up to a cap."""

from __future__ import annotations

import zlib


def backoff_s(backoff: tuple[float, float], attempt: int, of: object) -> float:
    """Return the seconds before an attempt, 1 for the first that follows a failure."""
    first_s, most_s = backoff
    longest_s = min(most_s, first_s * 2.0 ** min(max(attempt - 1, 0), 64))
    return longest_s * (0.5 + zlib.crc32(repr(of).encode()) / 2**33)
