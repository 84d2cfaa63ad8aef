"""shmbus: trajectories from many rollout workers to one GRPO trainer, through shared memory.

Importing this loads no torch; what a trainer needs of it is in ``trainer_adapter``.
"""

from shmbus import _encoding, errors
from shmbus.consumer import Consumer
from shmbus.errors import (
    BusBusyError,
    BusClosedError,
    BusExistsError,
    BusFullError,
    BusNotFoundError,
    CapacityError,
    DaemonUnavailableError,
    LayoutMismatchError,
    ProtocolError,
    RecordTooLargeError,
    ShmbusError,
    StallError,
)
from shmbus.group import Group
from shmbus.ledger import Ledger
from shmbus.producer import Producer, ProducerStats, WantedSample
from shmbus.segment import lifecycle
from shmbus.segment.bus import Bus, BusStats, ProducerInfo
from shmbus.segment.lifecycle import unlink
from shmbus.stall import StallReport
from shmbus_ext import _core
from shmbus_ext._core import Slot, Trajectory

__all__ = [
    "Bus",
    "BusBusyError",
    "BusClosedError",
    "BusExistsError",
    "BusFullError",
    "BusNotFoundError",
    "BusStats",
    "CapacityError",
    "Consumer",
    "DaemonUnavailableError",
    "Group",
    "LayoutMismatchError",
    "Ledger",
    "Producer",
    "ProducerInfo",
    "ProducerStats",
    "ProtocolError",
    "RecordTooLargeError",
    "ShmbusError",
    "Slot",
    "StallError",
    "StallReport",
    "Trajectory",
    "WantedSample",
    "__version__",
    "unlink",
]

__version__ = "0.1.0"

_core.install(
    closed_error=errors.BusClosedError,
    too_large_error=errors.RecordTooLargeError,
    full_error=lifecycle.full_error,
    busy_error=lifecycle.busy_error,
    layout_error=lifecycle.layout_error,
    space_error=lifecycle.space_error,
    encode_meta=_encoding.encode_meta,
    decode_meta=_encoding.decode_meta,
    encode_dtype=_encoding.encode_dtype,
    decode_dtype=_encoding.decode_dtype,
    as_array=_encoding.as_array,
)
