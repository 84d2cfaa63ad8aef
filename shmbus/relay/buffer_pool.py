"""Memory for blocks, used again once nobody reads it: a new room each time costs as much as a copy.

Invariant: a room that anybody still has a view of is not given out.
"""

from __future__ import annotations

__all__ = ["BufferPool"]

#: How many are kept: as many blocks as are under way, with one to spare.
_MOST_KEPT = 4
#: A room is this much larger than was asked for, so that blocks of about one size share it.
_SPARE_SHARE = 8


class BufferPool:
    """BufferPool of one thread; views of them may be dropped in any thread."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def take(self, nbytes: int) -> memoryview:
        """Return a room of so many bytes, with whatever was in it before.

        Parameters
        ----------
        nbytes : int
            Its size.
        """
        for room in self._kept:
            if len(room) >= nbytes and self._is_free(room):
                return memoryview(room)[:nbytes]
        room = bytearray(nbytes + nbytes // _SPARE_SHARE)
        if len(self._kept) >= _MOST_KEPT:
            # One that is read now goes with its last view.
            del self._kept[0]
        self._kept.append(room)
        return memoryview(room)[:nbytes]

    @staticmethod
    def _is_free(room: bytearray) -> bool:
        try:
            # A bytearray refuses to change its size while there is a view of it.
            room.append(0)
        except BufferError:
            return False
        room.pop()
        return True
