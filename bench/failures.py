"""What went wrong beyond a program's reach, in a sentence that names the cause and what to do.

A limit that was reached, a full disk, a bus that does not fit: who reads of it changes the machine,
and a traceback says less. A mistake of the benchmark's own keeps its traceback.

Invariant: imports nothing beside the standard library, since every process of a measurement does.
"""

from __future__ import annotations

import errno
import resource
import sys
from typing import Final

__all__ = ["MeasurementError", "sentence"]

#: What torch and threading say of limits, by errors that are RuntimeErrors.
NO_MEMORY: Final = ("can't allocate memory", "failed to map segment")
NO_THREAD: Final = "can't start new thread"


class MeasurementError(Exception):
    """A process failed, or was not done in time; the message says which, and what it said."""


def sentence(error: BaseException) -> str:
    """Say what went wrong and what to do; nothing where it is a mistake of the benchmark."""
    said = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{said}: this process may have {soft} open at once; allow more by ulimit -n"
    if number == errno.EAGAIN or NO_THREAD in said:
        return (
            f"{said}: no further process or thread may be started; allow more by ulimit -u, or in "
            "the control group (pids.max)"
        )
    if (
        isinstance(error, MemoryError)
        or number == errno.ENOMEM
        or any(words in said for words in NO_MEMORY)
    ):
        return (
            f"{said or type(error).__name__}: there is no more memory; end other programs, or "
            "allow more by ulimit -v, or in the control group"
        )
    if isinstance(error, (OSError, MeasurementError)):
        return said or type(error).__name__
    # Without an import of shmbus: what has not imported it raises none of its errors.
    shmbus = sys.modules.get("shmbus")
    return said if shmbus is not None and isinstance(error, shmbus.ShmbusError) else ""
