"""shmbus: trajectories from many rollout workers to one GRPO trainer, through shared memory.

Invariants:

- Importing this loads no torch; importing `shmbus.tensors`, `shmbus.weights` or `shmbus.engines`
  does.
- A handle is imported when it is first used, so that a rollout worker does not pay for the
  trainer's side, nor for the daemon.
- Every public name is in `__all__`, sorted.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# First: what it cannot work in, such as a subinterpreter, it says better than numpy does.
import shmbus_ext as _shmbus_ext  # noqa: F401

# isort: split
from shmbus import _install as _install
from shmbus._version import VERSION as __version__
from shmbus.errors import (
    BusBusyError,
    BusClosedError,
    BusExistsError,
    BusFullError,
    BusNotFoundError,
    BusRemovedError,
    CapacityError,
    DaemonUnavailableError,
    DamagedError,
    DeviceMismatchError,
    LayoutMismatchError,
    PeerGoneError,
    ProtocolError,
    RecorderUnavailableError,
    RecordTooLargeError,
    ShmbusError,
    StallError,
    UnscoredError,
    UnservedGroupError,
    WaitTimeoutError,
)
from shmbus_ext._core import Reservation, Trajectory

if TYPE_CHECKING:
    from shmbus.annotator import Annotator, Columns, UnannotatedGroup
    from shmbus.consumer import Consumer
    from shmbus.feeder import Feeder
    from shmbus.group import Group
    from shmbus.inspect.stall_report import StallReport
    from shmbus.ledger import Ledger, RequestCounts
    from shmbus.producer import Producer, ProducerStats
    from shmbus.producer_requests import ProducerRequests, Request
    from shmbus.segment.bus import Bus, BusStats, ProducerInfo
    from shmbus.segment.lifecycle import unlink
    from shmbus.session import Session

__all__ = [
    "Annotator",
    "Bus",
    "BusBusyError",
    "BusClosedError",
    "BusExistsError",
    "BusFullError",
    "BusNotFoundError",
    "BusRemovedError",
    "BusStats",
    "CapacityError",
    "Columns",
    "Consumer",
    "DaemonUnavailableError",
    "DamagedError",
    "DeviceMismatchError",
    "Feeder",
    "Group",
    "LayoutMismatchError",
    "Ledger",
    "PeerGoneError",
    "Producer",
    "ProducerInfo",
    "ProducerRequests",
    "ProducerStats",
    "ProtocolError",
    "RecordTooLargeError",
    "RecorderUnavailableError",
    "Request",
    "RequestCounts",
    "Reservation",
    "Session",
    "ShmbusError",
    "StallError",
    "StallReport",
    "Trajectory",
    "UnannotatedGroup",
    "UnscoredError",
    "UnservedGroupError",
    "WaitTimeoutError",
    "__version__",
    "unlink",
]

_HOMES = {
    "Annotator": "shmbus.annotator",
    "Bus": "shmbus.segment.bus",
    "BusStats": "shmbus.segment.bus",
    "Columns": "shmbus.annotator",
    "Consumer": "shmbus.consumer",
    "Feeder": "shmbus.feeder",
    "Group": "shmbus.group",
    "Ledger": "shmbus.ledger",
    "Producer": "shmbus.producer",
    "ProducerInfo": "shmbus.segment.bus",
    "ProducerRequests": "shmbus.producer_requests",
    "ProducerStats": "shmbus.producer",
    "Request": "shmbus.producer_requests",
    "RequestCounts": "shmbus.ledger",
    "Session": "shmbus.session",
    "StallReport": "shmbus.inspect.stall_report",
    "UnannotatedGroup": "shmbus.annotator",
    "unlink": "shmbus.segment.lifecycle",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    # Python asks here only for names that the module lacks: once for each.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
