"""A head as the stash asks for it: a sample without its payload, and which bus has that."""

from __future__ import annotations

from shmbus import RecordHead
from shmbus.relay.messages import Origin

__all__ = ["OriginHead"]


class OriginHead:
    """A head as the stash asks for it, with the bus that it is on.

    Parameters
    ----------
    bus : str
        The bus's identity.
    head : RecordHead
        As its source announced it.
    clock_ns : int
        The clock of its machine minus that of the coordinator's.
    """

    __slots__ = ("_clock_ns", "head", "key", "origin")

    def __init__(self, bus: str, head: RecordHead, clock_ns: int = 0) -> None:
        self._clock_ns = clock_ns
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
        """When it was committed, by the coordinator's clock: heads of two machines compare."""
        return self.head.committed_ns - self._clock_ns
