"""Short changes that no signal's handler can interrupt, such as the one of Ctrl-C.

Most changes need no such thing: they build a new state and assign it, which is one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shmbus_ext import _core
from shmbus_ext._core import ClosedByBlock

__all__ = ["ClosedByBlock", "call_uninterrupted"]

_T = TypeVar("_T")


def call_uninterrupted(change: Callable[..., _T], *arguments: object) -> _T:
    """Call it in a thread where no signal's handler runs, and wait for it.

    Parameters
    ----------
    change : callable
        Neither waits for long nor calls the user's code; needs no lock that the caller holds.
    *arguments : object
        For it.

    Returns
    -------
    object
        What it returned; what it raised is raised here.
    """
    return _core.uninterrupted(change, *arguments)
