"""The exception tree.

::

    ShmbusError
     +-- BusNotFoundError        no segment of that name
     +-- BusExistsError          create() found one
     +-- BusFullError            no space within the timeout; names the processes that hold it
     +-- BusRemovedError         the bus was removed; says when, and whether it has a successor
     +-- BusBusyError            a second collector or publisher, or no place left; names the holder
     +-- BusClosedError          a closed handle, one from before a fork, a released trajectory
     +-- LayoutMismatchError     not a segment of this layout, or a damaged one
     +-- CapacityError           does not fit /dev/shm (also a ValueError)
     +-- RecordTooLargeError     larger than any record of this bus (also a ValueError)
     +-- ProtocolError           a producer broke the rules, as by a duplicate
     +-- DaemonUnavailableError  the daemon that serves the bus does not answer
     +-- RecorderUnavailableError  no recorder takes a session
     +-- VersionUnknownError     the weights version of an inference server is unknown
     +-- UnscoredError           a sample without a score is asked for it (also a ValueError)
     +-- UnservedGroupError      no helper can score or annotate a group, which a handler drops
     +-- StallError              nothing moves on the bus; its report has leases and producers
     +-- PeerGoneError           the process at the other side has ended
     +-- WaitTimeoutError        a deadline passed; names who was waited for (also a TimeoutError)
     +-- DamagedError            what is read is not what was written, or not all of it
     +-- DeviceMismatchError     a device that this process does not have
     +-- WeightsError            base of what only weights raise (`shmbus.weights`)
     +-- ChannelError            base of what only channels raise (`shmbus.tensors`)

Wrong argument types and values are ``TypeError`` and ``ValueError``. Each message says what failed,
what was expected, what was given, and what to do next.
"""

from __future__ import annotations

from typing import Any, Protocol


class ShmbusError(Exception):
    """Base class of all shmbus errors."""


class BusNotFoundError(ShmbusError):
    """There is no bus of that name."""


class BusExistsError(ShmbusError):
    """A bus of that name exists already."""


class BusFullError(ShmbusError):
    """The ring had no space for the record within the timeout; the message names the holders.

    Attributes
    ----------
    accepted : int
        How many items of ``put_many`` were committed before this; 0 for ``put``.
    """

    accepted: int = 0


class BusBusyError(ShmbusError):
    """Another living process has this part, such as the collector's; or all places are taken."""


class BusClosedError(ShmbusError):
    """The handle is closed or from before a fork, or the trajectory has been released."""


class BusRemovedError(ShmbusError):
    """The bus that this handle holds was removed: nothing is committed into it any more.

    The message says when, and whether a new bus of that name exists. What was committed before is
    delivered by the Consumer that holds the old bus, if there is one.
    """


class LayoutMismatchError(ShmbusError):
    """The segment is not of this layout, or its header is damaged."""


class CapacityError(ShmbusError, ValueError):
    """The segment does not fit into /dev/shm."""


class RecordTooLargeError(ShmbusError, ValueError):
    """The trajectory is larger than the largest record of this bus."""


class UnscoredError(ShmbusError, ValueError):
    """The trajectory was put with ``score=None``, and nobody has set its score since."""


class UnservedGroupError(ShmbusError):
    """No helper can score or annotate a group; a handler of one rank drops the group for it."""


class ProtocolError(ShmbusError):
    """A producer broke the rules of grouping."""


class DaemonUnavailableError(ShmbusError):
    """The daemon that serves this bus does not answer."""


class RecorderUnavailableError(ShmbusError):
    """No recorder of the bus takes a session (`Producer.session`); the request was given back."""


class VersionUnknownError(ShmbusError):
    """The weights version of an inference server is unknown, so the server's samples have no label.

    The server restarted and has loaded no version yet, or the rows of its ranks prove no published
    version.

    Attributes
    ----------
    servers : list of str
        The addresses, as rows of the weights have them.
    """

    def __init__(self, message: str, servers: list[str]) -> None:
        super().__init__(message)
        self.servers = servers

    def __reduce__(self) -> tuple[type[VersionUnknownError], tuple[str, list[str]]]:
        return VersionUnknownError, (str(self), self.servers)


class Report(Protocol):
    """What StallError needs of its report; `shmbus.StallReport` is one."""

    @property
    def bus(self) -> str:
        """The bus."""

    @property
    def waits_for(self) -> str:
        """What the process waited for."""

    @property
    def stalled_s(self) -> float:
        """Seconds for which nothing had moved."""

    @property
    def status(self) -> Any:
        """The status of the bus (BusStatus); None where it could not be read."""

    @property
    def problem(self) -> str:
        """Why the status could not be read."""


class StallError(ShmbusError):
    """A wait in which nothing moved for `stall_timeout` seconds, under ``on_stall="raise"``.

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
    """The process at the other side has ended: the kernel has dropped its lock.

    Attributes
    ----------
    rank : int | None
        Which rank of a publisher.
    side : str
        Which side of a channel, "sender" or "receiver".
    pid : int
        Of the process that ended; 0 where that is not known.
    """

    def __init__(self, message: str, rank: int | None = None, side: str = "", pid: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.side = side
        self.pid = pid

    def __reduce__(self) -> tuple[type[PeerGoneError], tuple[str, int | None, str, int]]:
        return type(self), (str(self), self.rank, self.side, self.pid)


class WaitTimeoutError(ShmbusError, TimeoutError):
    """What was waited for did not happen by the deadline; the message says what keeps it."""


class DamagedError(ShmbusError):
    """What is read is not what was written, or a model has only some of a version."""


class DeviceMismatchError(ShmbusError):
    """A device that this process does not have."""


class WeightsError(ShmbusError):
    """Base class of what only weights raise; by itself, a version that was given up."""


class ChannelError(ShmbusError):
    """Base class of what only channels raise; by itself, a message that cannot be used so."""
