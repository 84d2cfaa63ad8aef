"""Base classes of handles for ``with`` and ``async with`` blocks, and the handles still alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")


class ClosedByWith:
    """Handle returned by its own ``with`` block, and closed at the block's end."""

    __slots__ = ()

    def close(self) -> None:
        """Close the handle."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()


class ClosedForReason(ClosedByWith):
    """Handle told at the end of the exception that left its block; "" without exception."""

    def close(self, reason: str = "") -> None:
        """Close the handle."""
        raise NotImplementedError

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")


class ClosedByAsyncWith:
    """Handle closed only by an ``async with`` block, because closing waits."""

    async def close(self) -> None:
        """Close the handle."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self.close()


class ClosedByAnyWith(ClosedByWith):
    """Handle closed by ``with`` and ``async with`` blocks."""

    __slots__ = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # In this thread: `close` never waits, and no cancellation can come first.
        self.close()


class LiveObjects(Generic[_T]):
    """A set of weak references whose callbacks run no Python code.

    The callback of a `weakref.WeakSet` is a Python function: the interpreter prints an exception of
    a signal handler raised there, for example Ctrl-C, and goes on.
    """

    def __init__(self) -> None:
        self._references: set[weakref.ref[_T]] = set()

    def add(self, added: _T) -> None:
        """Keep the object until its last reference ends."""
        self._references.add(weakref.ref(added, self._references.discard))

    def __iter__(self) -> Iterator[_T]:
        found = (reference() for reference in list(self._references))
        return (each for each in found if each is not None)
