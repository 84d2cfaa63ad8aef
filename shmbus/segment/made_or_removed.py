"""Creating what has a file of its own, so that an interrupt leaves none behind.

Invariant: what was made is returned, or removed; an exception comes out as itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shmbus_ext import _core

__all__ = ["made_or_removed"]

_T = TypeVar("_T")


def made_or_removed(
    create: Callable[..., None], remove: Callable[[_T], None], *arguments: Any
) -> _T:
    """Create something; remove it where an exception comes before it is in the caller's hands.

    Parameters
    ----------
    create : callable
        Called with an empty list and the arguments; puts what it has made into the list, or raises
        and leaves nothing. To allocate takes as long as the memory is large, and a Ctrl-C waits for
        its end.
    remove : callable
        Called with what was made.
    *arguments
        For `create`.

    Returns
    -------
    object
        What was made.
    """
    made: list[_T] = []
    try:
        _core.uninterrupted(create, made, *arguments)
        return made[0]
    except BaseException:
        for each in made:
            remove(each)
        raise
