"""Where a Consumer's groups come from: the Collector in its own process, or a daemon's client.

A lease ends once: by `end` with a reason, or by `give_back`. What several calls of `end` did may
leave this process with `flush` only. Whoever calls more than one of them holds `lock` meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from shmbus.ledger import Ledger
from shmbus_ext import _core

__all__ = ["Lease", "Lock", "Source"]

Lock: TypeAlias = "AbstractContextManager[Any]"


class Lease(Protocol):
    """A group under lease, as its source knows it."""

    @property
    def key(self) -> Hashable: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def samples(self) -> list[_core.Trajectory]: ...  # noqa: D102


class Source(Protocol):
    """What Consumer asks of either."""

    @property
    def lock(self) -> Lock:
        """What serialises it; not held while it sleeps."""

    @property
    def segment(self) -> _core.Segment:
        """The bus's, as this process has it mapped."""

    def require(self) -> None:
        """Raise BusClosedError where it cannot be used in this process."""

    def is_leased(self, lease: Any) -> bool:
        """Whether it gave this lease, and it has not ended."""

    def end(self, lease: Any, reason: int) -> None:
        """Release a leased group for a reason of the core."""

    def end_groups(
        self, consumer: object, groups: list[_core.GroupBase], reason: int, state: str
    ) -> int:
        """End the leases of a consumer's groups, from the first on, as far as it can in one go.

        It checks each as the consumer does, and gives it its new state. What it returns is how
        many; the rest is ended one by one.
        """

    def give_back(self, lease: Any) -> None:
        """Make a leased group the next to be delivered."""

    def flush(self) -> None:
        """After the last of several calls: tell others."""

    @property
    def policy_version(self) -> int:
        """The current policy version."""

    @policy_version.setter
    def policy_version(self, version: int) -> None: ...

    def stats(self) -> Ledger:
        """Return the ledger."""

    def close(self) -> None:
        """Leave the bus; wakes who waits in `take`."""
