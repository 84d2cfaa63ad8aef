"""Measurements of shmbus and of other ways to move a trajectory; `bench.suite` runs them all."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from bench.failures import sentence

__all__: list[str] = []


def _told(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """Say in a sentence what ends a program while it still imports, where it is no mistake."""
    said = "interrupted" if issubclass(kind, KeyboardInterrupt) else sentence(error)
    if said:
        print(f"{Path(sys.argv[0]).stem}: {said}", file=sys.stderr)
        # numpy's C prints what it met by this hook, and raises an ImportError that says less.
        sys.excepthook = lambda *_: None
    else:
        sys.__excepthook__(kind, error, at)


# So it stands while ``python -m bench.NAME`` imports this, and in no other program.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _told
