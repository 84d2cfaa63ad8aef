"""Buffers for blocks, used again once nobody reads them: a new one each time costs as a copy does.

Invariant: a buffer that anybody still has a view of is not given out.
"""

from __future__ import annotations

__all__ = ["BufferPool"]

#: How many are kept: as many blocks as are under way, with one to spare.
_MOST_KEPT = 4
#: A buffer is this much larger than was asked for, so that blocks of about one size share it.
_SPARE_SHARE = 8


class BufferPool:
    """Buffers of one thread; views of them may be dropped in any thread."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def take(self, nbytes: int) -> memoryview:
        """Return a buffer of so many bytes, with whatever was in it before."""
        for buffer in self._kept:
            if len(buffer) >= nbytes and self._is_free(buffer):
                return memoryview(buffer)[:nbytes]
        buffer = bytearray(nbytes + nbytes // _SPARE_SHARE)
        if len(self._kept) >= _MOST_KEPT:
            # One that is read now goes with its last view.
            del self._kept[0]
        self._kept.append(buffer)
        return memoryview(buffer)[:nbytes]

    @staticmethod
    def _is_free(buffer: bytearray) -> bool:
        try:
            # A bytearray refuses to change its size while there is a view of it.
            buffer.append(0)
        except BufferError:
            return False
        buffer.pop()
        return True
