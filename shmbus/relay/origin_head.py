"""A head as the stash asks for it: a sample without its payload, and which bus has that."""

from __future__ import annotations

from shmbus import RecordHead
from shmbus.relay.messages import Origin

__all__ = ["OriginHead"]


class OriginHead:
    """A head as the stash asks for it, with the bus that it is on."""

    __slots__ = ("head", "key", "origin")

    def __init__(self, bus: str, head: RecordHead) -> None:
        self.origin: Origin = (bus, *head.id)
        self.head = head
        self.key = head.key

    @property
    def group_size(self) -> int:
        """Samples of its group; 0 where a failure does not know."""
        return self.head.group_size

    @property
    def need(self) -> int:
        """How many samples complete its group."""
        return self.head.need

    @property
    def index(self) -> int:
        """Its place in its group."""
        return self.head.index

    @property
    def score(self) -> float:
        """Its reward."""
        return self.head.score

    @property
    def policy_version(self) -> int:
        """The oldest version that sampled it."""
        return self.head.policy_version

    @property
    def nbytes(self) -> int:
        """Bytes of its record."""
        return self.head.nbytes

    @property
    def failed(self) -> bool:
        """Whether it reports a failure."""
        return self.head.failed

    @property
    def meta(self) -> str | None:
        """Why it failed."""
        return self.head.reason

    @property
    def committed_ns(self) -> int:
        """When it was committed, by the clock of its own machine."""
        return self.head.committed_ns
