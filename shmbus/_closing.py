"""Handles that a ``with`` or ``async with`` block closes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class ClosedByWith:
    """Is entered as itself, and closed when the block is left."""

    __slots__ = ()

    def close(self) -> None:
        """Close it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()


class ClosedForReason(ClosedByWith):
    """Is told at its end what exception has left the block; empty for none."""

    def close(self, reason: str = "") -> None:
        """Close it."""
        raise NotImplementedError

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")


class ClosedByAsyncWith:
    """Is closed by an ``async with`` block alone, since its end waits."""

    async def close(self) -> None:
        """Close it."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self.close()


class ClosedByAnyWith(ClosedByWith):
    """Is so by an ``async with`` too."""

    __slots__ = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # In this thread: it waits for nobody, and no cancellation can come before it.
        self.close()
