"""Open files whose locks end with this process, whoever it has forked.

A lock belongs to an open file, which a forked child has too: a worker that outlives its trainer
would go on as the trainer, and one that ends would give up what its parent holds.

Invariant: a forked child has none of these files open when its first line runs.
"""

from __future__ import annotations

import os
import weakref
from typing import Final

from shmbus.segment.own_file import open_own

__all__ = ["OwnedFile"]

_all: Final[weakref.WeakSet[OwnedFile]] = weakref.WeakSet()


class OwnedFile:
    """A descriptor for locks; nothing else of it is shared with a forked child either."""

    #: -1 before `open`, after `close`, and in a forked child.
    fd = -1
    #: Whether this process is a child of the one that opened it.
    forked = False

    def open(self, path: str, flags: int, what: str = "") -> None:
        """Open it; links are not followed.

        Parameters
        ----------
        path : str
            The file, made with mode 0600 where the flags say so.
        flags : int
            Of `os.open`.
        what : str
            Whose file it is, for messages, where others may write to its folder: then it has to be
            this user's (`shmbus.segment.own_file`).
        """
        _all.add(self)
        if what:
            self.fd = open_own(path, flags, what)
        else:
            self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self) -> None:
        """Give up its locks; may be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _forget() -> None:
    for file in list(_all):
        file.close()
        file.forked = True


os.register_at_fork(after_in_child=_forget)
