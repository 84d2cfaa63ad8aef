"""CUDA driver calls for memory between processes, by ctypes: torch exposes none of them.

Invariants: the driver is loaded on first use; every call's status is checked, and an error carries
the driver's own name.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any, Final

import torch

from shmbus import ShmbusError

#: Constants of `cuda.h`.
MEMORY_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
HANDLE_POSIX_FD: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
LOCATION_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
ACCESS_READ: Final = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ
ACCESS_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
GRANULARITY_MINIMUM: Final = 0
IPC_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
IPC_HANDLE_BYTES: Final = 64
ATTRIBUTE_VMM: Final = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
ATTRIBUTE_POSIX_FD: Final = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
ATTRIBUTE_UNIFIED: Final = 41  # CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING


class CudaDriverError(ShmbusError, documented=False):
    """Failed call of the CUDA driver; the message names the call and the driver's error."""


class Location(ctypes.Structure):
    """``CUmemLocation``: a kind of place, and the number within the kind."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationFlags(ctypes.Structure):
    """``CUmemAllocationProp.allocFlags``."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``: properties of a `cuMemCreate` allocation."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_meta_data", ctypes.c_void_p),
        ("flags", AllocationFlags),
    )

    @classmethod
    def exportable(cls, device: int) -> AllocationProperties:
        """Return properties of device memory exportable by file descriptor."""
        return cls(MEMORY_PINNED, HANDLE_POSIX_FD, Location(LOCATION_DEVICE, device))


class AccessDescription(ctypes.Structure):
    """``CUmemAccessDesc``: access rights of a mapping."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))

    @classmethod
    def of(cls, device: int, *, writable: bool) -> AccessDescription:
        """Return the access right of a device: reading, or reading and writing."""
        return cls(
            Location(LOCATION_DEVICE, device), ACCESS_READ_WRITE if writable else ACCESS_READ
        )


assert ctypes.sizeof(AllocationProperties) == 32, "cuda.h's CUmemAllocationProp"
assert ctypes.sizeof(AccessDescription) == 12, "cuda.h's CUmemAccessDesc"


class IpcMemoryHandle(ctypes.Structure):
    """``CUipcMemHandle``; passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


# Without these, ctypes would pass an address or a size as an int of 32 bits.
_ADDRESS = ctypes.c_uint64
_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_void_p
_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_POINTER, ctypes.c_int),
    "cuDeviceGetAttribute": (_POINTER, ctypes.c_int, ctypes.c_int),
    "cuMemGetAllocationGranularity": (_POINTER, _POINTER, ctypes.c_int),
    "cuMemCreate": (_POINTER, _SIZE, _POINTER, ctypes.c_uint64),
    "cuMemRelease": (ctypes.c_uint64,),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _ADDRESS, ctypes.c_uint64),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, ctypes.c_uint64, ctypes.c_uint64),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemSetAccess": (_ADDRESS, _SIZE, _POINTER, _SIZE),
    "cuMemExportToShareableHandle": (_POINTER, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64),
    "cuMemImportFromShareableHandle": (_POINTER, _POINTER, ctypes.c_int),
    "cuMemAlloc_v2": (_POINTER, _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_POINTER, IpcMemoryHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuGetErrorName": (ctypes.c_int, _POINTER),
}


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the driver's library, initialised."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaDriverError(f"no CUDA driver on this machine: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name, None)
        if function is None:
            raise CudaDriverError(f"this CUDA driver has no {name}; expected one of CUDA 11.3 on")
        function.argtypes, function.restype = arguments, ctypes.c_int
    status = library.cuInit(0)
    if status:
        raise CudaDriverError(f"cuInit: {_name_of(library, status)}")
    return library


def missing() -> str | None:
    """Return the reason for a missing driver, or None; create no context."""
    try:
        driver()
    except CudaDriverError as error:
        return str(error)
    return None


def call(name: str, *arguments: Any) -> None:
    """Call the driver."""
    library = driver()
    status = getattr(library, name)(*arguments)
    if status:
        raise CudaDriverError(f"{name}: {_name_of(library, status)}")


@functools.cache
def attribute(device: int, number: int) -> int:
    """Return an attribute of a device. A question only: it makes no context."""
    ordinal, value = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(ordinal), device)
    call("cuDeviceGetAttribute", ctypes.byref(value), number, ordinal)
    return value.value


@contextlib.contextmanager
def in_context(device: int) -> Iterator[None]:
    """Make torch's context of a device current in this thread, after the device's pending work."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # creates a missing context
        yield


def _name_of(library: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName(status, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} ({status})"
