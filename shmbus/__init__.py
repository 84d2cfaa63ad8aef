"""shmbus: trajectories from many rollout workers to one GRPO trainer, through shared memory.

Invariants:

- Importing shmbus loads no torch; importing `shmbus.tensors`, `shmbus.weights` or `shmbus.engines`
  does.
- A handle is imported at its first use, to spare a rollout worker the trainer's side and the
  daemon.
- `_HOMES` lists every public name once; `__all__` follows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Before numpy: the extension reports an unsupported environment, like a subinterpreter, better.
import shmbus_ext as _shmbus_ext  # noqa: F401

# isort: split
from shmbus._version import VERSION as _VERSION
from shmbus.segment import install as _install  # noqa: F401

if TYPE_CHECKING:  # "as" exports the name to type checkers
    from shmbus.base.ledger import Ledger as Ledger
    from shmbus.base.ledger import RequestCounts as RequestCounts
    from shmbus.data.prompts import Request as Request
    from shmbus.errors import BusBusyError as BusBusyError
    from shmbus.errors import BusClosedError as BusClosedError
    from shmbus.errors import BusExistsError as BusExistsError
    from shmbus.errors import BusFullError as BusFullError
    from shmbus.errors import BusNotFoundError as BusNotFoundError
    from shmbus.errors import BusRemovedError as BusRemovedError
    from shmbus.errors import CapacityError as CapacityError
    from shmbus.errors import DaemonUnavailableError as DaemonUnavailableError
    from shmbus.errors import DamagedError as DamagedError
    from shmbus.errors import DeviceMismatchError as DeviceMismatchError
    from shmbus.errors import LayoutMismatchError as LayoutMismatchError
    from shmbus.errors import PeerGoneError as PeerGoneError
    from shmbus.errors import ProtocolError as ProtocolError
    from shmbus.errors import RecorderUnavailableError as RecorderUnavailableError
    from shmbus.errors import RecordTooLargeError as RecordTooLargeError
    from shmbus.errors import ShmbusError as ShmbusError
    from shmbus.errors import StallError as StallError
    from shmbus.errors import UnscoredError as UnscoredError
    from shmbus.errors import UnservedGroupError as UnservedGroupError
    from shmbus.errors import VersionUnknownError as VersionUnknownError
    from shmbus.errors import WaitTimeoutError as WaitTimeoutError
    from shmbus.handles.annotator import Annotator as Annotator
    from shmbus.handles.annotator import Columns as Columns
    from shmbus.handles.annotator import UnannotatedGroup as UnannotatedGroup
    from shmbus.handles.consumer import Consumer as Consumer
    from shmbus.handles.feeder import Feeder as Feeder
    from shmbus.handles.group import Group as Group
    from shmbus.handles.producer import Producer as Producer
    from shmbus.handles.producer import ProducerStats as ProducerStats
    from shmbus.handles.producer_requests import ProducerRequests as ProducerRequests
    from shmbus.handles.session import Session as Session
    from shmbus.inspect.stall_report import StallReport as StallReport
    from shmbus.segment.bus import Bus as Bus
    from shmbus.segment.bus import BusStats as BusStats
    from shmbus.segment.bus import ProducerInfo as ProducerInfo
    from shmbus.segment.lifecycle import unlink as unlink
    from shmbus_ext._core import Reservation as Reservation
    from shmbus_ext._core import Trajectory as Trajectory

_HOMES = {
    "Annotator": "shmbus.handles.annotator",
    "Columns": "shmbus.handles.annotator",
    "UnannotatedGroup": "shmbus.handles.annotator",
    "Consumer": "shmbus.handles.consumer",
    "BusBusyError": "shmbus.errors",
    "BusClosedError": "shmbus.errors",
    "BusExistsError": "shmbus.errors",
    "BusFullError": "shmbus.errors",
    "BusNotFoundError": "shmbus.errors",
    "BusRemovedError": "shmbus.errors",
    "CapacityError": "shmbus.errors",
    "DaemonUnavailableError": "shmbus.errors",
    "DamagedError": "shmbus.errors",
    "DeviceMismatchError": "shmbus.errors",
    "LayoutMismatchError": "shmbus.errors",
    "PeerGoneError": "shmbus.errors",
    "ProtocolError": "shmbus.errors",
    "RecorderUnavailableError": "shmbus.errors",
    "RecordTooLargeError": "shmbus.errors",
    "ShmbusError": "shmbus.errors",
    "StallError": "shmbus.errors",
    "UnscoredError": "shmbus.errors",
    "UnservedGroupError": "shmbus.errors",
    "VersionUnknownError": "shmbus.errors",
    "WaitTimeoutError": "shmbus.errors",
    "Feeder": "shmbus.handles.feeder",
    "Group": "shmbus.handles.group",
    "StallReport": "shmbus.inspect.stall_report",
    "Ledger": "shmbus.base.ledger",
    "RequestCounts": "shmbus.base.ledger",
    "Producer": "shmbus.handles.producer",
    "ProducerStats": "shmbus.handles.producer",
    "ProducerRequests": "shmbus.handles.producer_requests",
    "Request": "shmbus.data.prompts",
    "Bus": "shmbus.segment.bus",
    "BusStats": "shmbus.segment.bus",
    "ProducerInfo": "shmbus.segment.bus",
    "unlink": "shmbus.segment.lifecycle",
    "Session": "shmbus.handles.session",
    "Reservation": "shmbus_ext._core",
    "Trajectory": "shmbus_ext._core",
}
_PACKAGES = ("engines", "relay", "tensors", "weights")
__all__ = sorted(["__version__", *_HOMES])
__version__ = _VERSION


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    # Python asks here only for names missing from the module: once for every name.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
