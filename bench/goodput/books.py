"""The books of a run: each generated token has a number, and a trained token shows the number.

An answer's tokens are consecutive numbers. The engine writes them down before and after generation,
the worker after delivery, and the trainer, as read from the batch, in the checkpoint. One write
appends an entry, so a kill leaves whole entries.
"""

import os
import pickle
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Audit", "Book", "audit", "numbers_of", "read_checkpoint", "write_checkpoint"]

#: First number and tokens of an answer.
ENTRY: Final = struct.Struct("<qq")
Ranges = list[tuple[int, int]]


class Book:
    """A file of entries."""

    def __init__(self, root: Path, name: str) -> None:
        self._fd = os.open(root / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, first: int, count: int) -> None:
        """Append an answer."""
        if os.write(self._fd, entry := ENTRY.pack(first, count)) != len(entry):
            raise OSError("an entry of the books was cut off: the disk is full")

    def read(self) -> NDArray[np.int64]:
        """Return all entries, [answers, 2]."""
        size = os.fstat(self._fd).st_size
        return np.frombuffer(os.pread(self._fd, size, 0), "<i8").reshape(-1, 2)

    def end(self) -> int:
        """Return the number after the newest answer."""
        last = max(0, os.fstat(self._fd).st_size - ENTRY.size)
        entry = os.pread(self._fd, ENTRY.size, last)
        return sum(ENTRY.unpack(entry)) if entry else 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def numbers_of(tokens: NDArray[Any]) -> tuple[int, int]:
    """Return first number and length of a trained answer; (-1, length) for a torn answer."""
    first, count = int(tokens[0]) if len(tokens) else -1, len(tokens)
    whole = count and np.array_equal(tokens, np.arange(first, first + count))
    return (first if whole else -1), count


def merged(ranges: Ranges) -> Ranges:
    """Join adjacent ranges; overlaps, tokens trained twice, stay apart."""
    found: Ranges = []
    for first, count in sorted(ranges):
        if found and first >= 0 and first == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((first, count))
    return found


def write_checkpoint(root: Path, state: Any, trained: Ranges) -> None:
    """Replace the checkpoint: the contender's state and all trained ranges."""
    made = root / "checkpoint.new"
    made.write_bytes(pickle.dumps((state, trained)))
    made.rename(root / "checkpoint")


def read_checkpoint(root: Path) -> tuple[Any, Ranges]:
    """Return the newest checkpoint; an empty one before the first."""
    path = root / "checkpoint"
    state, trained = pickle.loads(path.read_bytes()) if path.exists() else (None, [])
    return state, trained


class Audit(NamedTuple):
    """Tokens of a run by fate.

    `cut` died with an engine in mid-answer, `held` with a worker or an engine before delivery: no
    contender can save these. `lost` were delivered and never trained, `torn` trained in pieces or
    with wrong values.
    """

    generated: int
    cut: int
    held: int
    once: int
    twice: int
    lost: int
    torn: int
    lost_answers: list[tuple[int, int]]

    @property
    def goodput(self) -> float:
        """Tokens trained exactly once, divided by delivered tokens."""
        taken = self.generated - self.cut - self.held
        return self.once / taken if taken else 0.0


def audit(root: Path) -> Audit:
    """Compare generated tokens with those of the surviving checkpoint."""
    begun, ended, handed = (Book(root, name) for name in ("begun", "ended", "handed"))
    times = np.zeros(begun.end() + 1, np.uint8)
    taken = np.zeros(len(times), bool)
    whole = np.zeros(len(times), bool)
    for book, marks in ((handed, taken), (ended, whole)):
        for first, count in book.read():
            marks[first : first + count] = True
    torn = 0
    for first, count in read_checkpoint(root)[1]:
        if first < 0 or first + count >= len(times):
            torn += count
        else:
            times[first : first + count] += 1
    missing = [
        (int(first), int(count))
        for first, count in np.unique(handed.read(), axis=0)
        if not times[first : first + count].all()
    ]
    generated = begun.end()
    for each in (begun, ended, handed):
        each.close()
    trained = times > 0
    return Audit(
        generated=generated,
        cut=generated - int((whole | trained | taken).sum()),
        held=int((whole & ~taken & ~trained).sum()),
        once=int((times == 1).sum()),
        twice=int((times > 1).sum()),
        lost=int((taken & ~trained).sum()),
        torn=torn,
        lost_answers=missing[:20],
    )
