"""The exception tree.

::

    ShmbusError
     +-- BusNotFoundError        no segment of that name
     +-- BusExistsError          create() found a bus of that name
     +-- BusFullError            no space within the timeout; names the processes that hold it
     +-- BusRemovedError         the bus was removed; names the time and a possible successor
     +-- BusBusyError            a second collector or publisher, or no place left; names the holder
     +-- BusClosedError          a closed handle, a handle from before a fork, a released trajectory
     +-- LayoutMismatchError     not a segment of this layout, or damaged
     +-- CapacityError           does not fit /dev/shm (also a ValueError)
     +-- RecordTooLargeError     larger than the bus's record limit (also a ValueError)
     +-- ProtocolError           a producer broke the rules, as by a duplicate
     +-- DaemonUnavailableError  the daemon that serves the bus does not answer
     +-- RecorderUnavailableError  no recorder takes a session
     +-- VersionUnknownError     the weights version of an inference server is unknown
     +-- UnscoredError           score of a sample without a score (also a ValueError)
     +-- UnservedGroupError      no helper can score or annotate a group, which a handler drops
     +-- StallError              nothing moves on the bus; its report has leases and producers
     +-- PeerGoneError           the process at the other side has ended
     +-- WaitTimeoutError        a deadline passed; names the awaited process (also a TimeoutError)
     +-- DamagedError            bytes read differ from bytes written, or are incomplete
     +-- DeviceMismatchError     a device missing from this process
     +-- WeightsError            base of errors only weights raise (`shmbus.weights`)
     +-- ChannelError            base of errors only channels raise (`shmbus.tensors`)

Wrong argument types and values are ``TypeError`` and ``ValueError``. A message names the failure,
the expected value, the given value, and the next step.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Final, Protocol

#: A path in the repository, and on the site.
_PAGE: Final = "docs/errors.md"


class ShmbusError(Exception):
    """Base class of shmbus errors.

    Attributes
    ----------
    page : str
        The documentation of the class; tracebacks of Python 3.11 and newer end with the page.
    """

    page: ClassVar[str] = _PAGE

    def __init_subclass__(cls, *, documented: bool = True) -> None:
        if documented:
            cls.page = f"{_PAGE}#{cls.__name__.lower()}"

    @cached_property
    def __notes__(self) -> list[str]:
        return [f"see {self.page}"]


class BusNotFoundError(ShmbusError):
    """The bus does not exist."""


class BusExistsError(ShmbusError):
    """The bus exists already."""


class BusFullError(ShmbusError):
    """The ring had no space for the record within the timeout; the message names the holders.

    Attributes
    ----------
    accepted : int
        Items of ``put_many`` committed before the error; 0 for ``put``.
    """

    accepted: int = 0


class BusBusyError(ShmbusError):
    """A different process has the only place, or every place is taken.

    A bus has one reader (a Consumer or a daemon) and `max_producers` producers. The message has the
    pid of the holder: end the holder, lease from the daemon, or create a larger bus.
    """


class BusClosedError(ShmbusError):
    """The handle is closed or from before a fork, or the trajectory was released."""


class BusRemovedError(ShmbusError):
    """The handle's bus was removed: no commit enters the bus any more.

    The message names the time, and a new bus of that name if present. Records committed before the
    removal go to the Consumer that holds the old bus, if attached.
    """


class LayoutMismatchError(ShmbusError):
    """Another version of shmbus wrote the segment, or the segment is damaged."""


class CapacityError(ShmbusError, ValueError):
    """The segment does not fit into /dev/shm."""


class RecordTooLargeError(ShmbusError, ValueError):
    """The trajectory exceeds the record limit of this bus."""


class UnscoredError(ShmbusError, ValueError):
    """The trajectory was put with ``score=None``, and its score was not set since."""


class UnservedGroupError(ShmbusError):
    """No helper can score or annotate a group; a single rank's handler drops the group."""


class ProtocolError(ShmbusError):
    """A producer, consumer or peer broke a rule.

    As by a second sample of an index under ``duplicate="error"``: the first sample is kept, nothing
    is lost, call again.
    """


class DaemonUnavailableError(ShmbusError):
    """The daemon of this bus does not answer."""


class RecorderUnavailableError(ShmbusError):
    """No recorder of the bus takes a session (`Producer.session`); the request was given back."""


class VersionUnknownError(ShmbusError):
    """The weights version of an inference server is unknown, so the server's samples lack a label.

    The server restarted and holds no version yet, or the rows of its ranks prove no published
    version.

    Attributes
    ----------
    servers : list of str
        The addresses, as in the rows of the weights.
    """

    def __init__(self, message: str, servers: list[str]) -> None:
        super().__init__(message)
        self.servers = servers

    def __reduce__(self) -> tuple[type[VersionUnknownError], tuple[str, list[str]]]:
        return VersionUnknownError, (str(self), self.servers)


class Report(Protocol):
    """Interface of StallError's report; `shmbus.StallReport` implements it."""

    @property
    def bus(self) -> str:
        """The bus."""

    @property
    def waits_for(self) -> str:
        """Event the process waited for."""

    @property
    def stalled_s(self) -> float:
        """Seconds without movement."""

    @property
    def status(self) -> Any:
        """The status of the bus (BusStatus); None if unreadable."""

    @property
    def problem(self) -> str:
        """Reason for an unreadable status."""


class StallError(ShmbusError):
    """A wait without movement for `stall_timeout` seconds, under ``on_stall="raise"``.

    Nothing is lost: the caller can wait again.

    Attributes
    ----------
    report : StallReport
        Leases, producers and missing samples; also the text of this error.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[StallError], tuple[Report]]:
        return StallError, (self.report,)


class PeerGoneError(ShmbusError):
    """The peer process ended: the kernel dropped its lock.

    Attributes
    ----------
    rank : int | None
        Rank of a publisher.
    side : str
        Side of a channel, "sender" or "receiver".
    pid : int
        Of the ended process; 0 if unknown.
    """

    def __init__(self, message: str, rank: int | None = None, side: str = "", pid: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.side = side
        self.pid = pid

    def __reduce__(self) -> tuple[type[PeerGoneError], tuple[str, int | None, str, int]]:
        return type(self), (str(self), self.rank, self.side, self.pid)


class WaitTimeoutError(ShmbusError, TimeoutError):
    """The awaited event did not happen by the deadline; the message names the obstacle."""


class DamagedError(ShmbusError):
    """Bytes read differ from bytes written, or a model holds only part of a version."""


class DeviceMismatchError(ShmbusError):
    """The device is missing from this process."""


class WeightsError(ShmbusError):
    """Base class of weights errors; by itself, an abandoned version."""


class ChannelError(ShmbusError):
    """Base class of channel errors; by itself, a call in the wrong state of the channel."""
