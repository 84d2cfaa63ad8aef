"""Memory shared between processes: by file descriptor, or by a device's handle.

Host memory is a memfd, independent of /dev/shm and of any device.

Invariants:

- shmbus owns the memory, not torch: torch's caching allocator, reference counts across processes
  and expandable segments play no part. The memory is exported once, for its life.
- A mapping lives as long as a tensor of its memory, in any order of closing, and only in the
  process of its creation; memory opened for reading is mapped read-only.
- A message names a device by UUID, because numbers differ between processes with different visible
  devices; a message's fields are used only after their bounds were checked.
- With "vmm" the physical memory lives until the last process unmapped it: readers survive a dead
  exporter. With "ipc" the memory ends with the allocating process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from typing import Any, Final, Literal

import msgspec
import torch
from torch import Tensor

from shmbus.batch.uninterrupted import finalizer
from shmbus.data.encoding import decodable
from shmbus.errors import DeviceMismatchError
from shmbus.tensors.device import driver
from shmbus.tensors.device.driver import CudaDriverError, call, in_context

UUID_BYTES: Final = 16
#: UUID of host memory.
NO_UUID: Final = bytes(UUID_BYTES)
#: Above every device of this decade; a larger number means a damaged message.
MAX_BYTES: Final = 1 << 44
#: Limit of one message, with its largest handle.
MAX_MESSAGE_BYTES: Final = 512
_FAILED: Final = ctypes.c_void_p(-1).value
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class _HostMapping:
    """Mapped addresses of host memory; unmapped with the last reference."""

    #: None until mapped, for example after an interrupted constructor.
    address: int | None = None

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool) -> None:
        how = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.nbytes = nbytes
        self.address = _libc.mmap(None, nbytes, how, mmap.MAP_SHARED, descriptor, 0)
        if self.address == _FAILED:
            self.address = None
            number = ctypes.get_errno()
            raise OSError(number, f"mmap of {nbytes} bytes: {os.strerror(number)}")

    @finalizer
    def __del__(self) -> None:
        address, self.address = self.address, None
        if address:
            _libc.munmap(address, self.nbytes)


class HostMemory:
    """Host memory mappable by any process; created by `allocate` or `open`."""

    #: None until set, for example after an interrupted constructor.
    _mapping: _HostMapping | None = None
    _descriptor = -1

    def __init__(self, mapping: _HostMapping, handle: DeviceHandle, descriptor: int) -> None:
        self._mapping = mapping
        self._descriptor = descriptor
        self.handle = handle
        self.nbytes = handle.nbytes
        self.device = torch.device("cpu")

    @classmethod
    def allocate(cls, nbytes: int) -> HostMemory:
        """Allocate exportable memory: zeroed, and fully backed."""
        if nbytes <= 0:
            raise ValueError(f"host memory: expected more than 0 bytes, got {nbytes}")
        descriptor = os.memfd_create("shmbus", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            mapping = _HostMapping(descriptor, nbytes, writable=True)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(mapping, DeviceHandle("memfd", NO_UUID, nbytes, nbytes), descriptor)

    @classmethod
    def open(
        cls, handle: DeviceHandle, descriptor: int | None, *, writable: bool = False
    ) -> HostMemory:
        """Map memory of a foreign process."""
        if descriptor is None:
            raise ValueError("host memory: expected a file descriptor")
        found = os.fstat(descriptor).st_size
        if found < handle.mapped_nbytes:
            raise ValueError(
                f"host memory: expected a file of {handle.mapped_nbytes} bytes, got one of {found}"
            )
        return cls(_HostMapping(descriptor, handle.mapped_nbytes, writable=writable), handle, -1)

    def descriptor(self) -> int:
        """Return a new file descriptor for another process; the caller closes it."""
        if self._descriptor < 0:
            raise ValueError("this host memory is closed, or another process's")
        return os.dup(self._descriptor)

    def tensor(self) -> Tensor:
        """Return the whole memory: uint8 [nbytes], on the CPU, zero-copy."""
        return self.lend()[0]

    def lend(self) -> tuple[Tensor, weakref.ref[Any]]:
        """Return `tensor()` and a weak reference, dead once no tensor of the memory survives."""
        if self._mapping is None:
            raise ValueError("this host memory is closed")
        # A ctypes array can carry its mapping along, and torch keeps the array behind a tensor
        # alive.
        span: Any = (ctypes.c_uint8 * self.nbytes).from_address(self._mapping.address or 0)
        span.mapping = self._mapping
        return torch.frombuffer(span, dtype=torch.uint8), weakref.ref(span)

    def close(self) -> None:
        """Release the memory; idempotent. Existing tensors stay valid."""
        self._mapping = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @finalizer
    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._mapping is None else ""
        return f"<HostMemory {self.nbytes} B{state}>"


@decodable
class DeviceHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="device-memory/1"):
    """Handle by which a second process maps this process's memory."""

    kind: Literal["vmm", "ipc", "memfd"]
    uuid: bytes
    nbytes: int
    mapped_nbytes: int
    handle: bytes = b""

    def encode(self) -> bytes:
        """Encode the handle as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, message: bytes) -> DeviceHandle:
        """Decode and check a foreign process's handle."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"device memory: expected a message of at most {MAX_MESSAGE_BYTES} bytes, got "
                f"{len(message)}"
            )
        try:
            found = msgspec.msgpack.decode(message, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"device memory: not a message of this version: {error}") from error
        expected = 64 if found.kind == "ipc" else 0
        if len(found.handle) != expected or len(found.uuid) != UUID_BYTES:
            raise ValueError(
                f"device memory of kind {found.kind!r}: expected a handle of {expected} bytes and "
                f"a UUID of {UUID_BYTES}, got {len(found.handle)} and {len(found.uuid)}"
            )
        if not 0 < found.nbytes <= found.mapped_nbytes <= MAX_BYTES:
            raise ValueError(
                f"device memory: expected 0 < bytes <= mapped bytes <= {MAX_BYTES}, got "
                f"{found.nbytes} and {found.mapped_nbytes}"
            )
        return found


def uuid_of(device: torch.device | int) -> bytes:
    """Return the 16 bytes that name a CUDA device in every process of its host."""
    return bytes.fromhex(str(torch.cuda.get_device_properties(device).uuid).replace("-", ""))


def device_of(uuid: bytes) -> int:
    """Return this process's number of a device."""
    seen = [uuid_of(number) for number in range(torch.cuda.device_count())]
    if uuid in seen:
        return seen.index(uuid)
    raise DeviceMismatchError(
        f"memory of the CUDA device {uuid.hex()}, which this process does not see: it sees "
        f"{', '.join(each.hex() for each in seen) or 'none'}; start it with that device in "
        "CUDA_VISIBLE_DEVICES, or choose the carrier 'shm'"
    )


Kind = Literal["vmm", "ipc"]


def refusals(device: int) -> dict[str, str]:
    """Return the reasons against unsupported kinds of memory, by kind."""
    why = driver.missing()
    if why is not None:
        return {"vmm": why, "ipc": why}
    found = {}
    if not driver.attribute(device, driver.ATTRIBUTE_VMM):
        found["vmm"] = "the device has no virtual memory management"
    elif not driver.attribute(device, driver.ATTRIBUTE_POSIX_FD):
        found["vmm"] = "the driver exports no file descriptors (a container may forbid them)"
    if not driver.attribute(device, driver.ATTRIBUTE_UNIFIED):
        found["ipc"] = "the device has no unified addressing"
    return found


class _Mapping:
    """Mapped addresses of device memory; unmapped with the last reference."""

    def __init__(self, device: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.address = 0
        self.handle = 0  # VMM: the driver's handle of the physical memory
        self.reserved = 0
        self.kind: Kind = "vmm"
        self.opened = False  # "ipc": True for opened memory, False for allocated memory
        self._pid = os.getpid()

    def map_vmm(self, handle: int, *, writable: bool) -> None:
        """Give physical memory an address here."""
        self.handle = handle
        address = ctypes.c_uint64()
        call("cuMemAddressReserve", ctypes.byref(address), self.nbytes, 0, 0, 0)
        self.reserved = address.value
        call("cuMemMap", self.reserved, self.nbytes, 0, handle, 0)
        self.address = self.reserved
        # A device copy runs on the source's device: every peer with tensors needs write access.
        devices = [self.device, *(_peers_of(self.device) if writable else ())]
        access = (driver.AccessDescription * len(devices))(
            *(driver.AccessDescription.of(device, writable=writable) for device in devices)
        )
        call("cuMemSetAccess", self.address, self.nbytes, ctypes.byref(access), len(devices))

    @finalizer
    def __del__(self) -> None:
        # A forked child lacks the context; the parent owns the mapping.
        if os.getpid() == self._pid and (self.reserved or self.address or self.handle):
            try:
                self._free()
            except (CudaDriverError, RuntimeError):
                # At the process's end the driver frees the whole context.
                if not sys.is_finalizing():
                    raise

    def _free(self) -> None:
        with in_context(self.device):  # waits for device work that may still read the memory
            address, self.address = self.address, 0
            if self.kind == "ipc":
                if address:
                    call("cuIpcCloseMemHandle" if self.opened else "cuMemFree_v2", address)
                return
            if address:
                call("cuMemUnmap", address, self.nbytes)
            reserved, self.reserved = self.reserved, 0
            if reserved:
                call("cuMemAddressFree", reserved, self.nbytes)
            handle, self.handle = self.handle, 0
            if handle:
                call("cuMemRelease", handle)


def _peers_of(device: int) -> list[int]:
    """Return this process's devices with peer access to a device's memory."""
    others = (other for other in range(torch.cuda.device_count()) if other != device)
    return [other for other in others if torch.cuda.can_device_access_peer(other, device)]


#: This process's own "ipc" memory by handle: the driver opens a handle only in foreign processes.
_own: weakref.WeakValueDictionary[bytes, _Mapping] = weakref.WeakValueDictionary()


class _Span:
    """Bytes of a mapping as torch takes them; a tensor of it keeps the mapping."""

    def __init__(self, mapping: _Mapping, nbytes: int) -> None:
        self.mapping = mapping
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (mapping.address, False),
            "strides": None,
            "version": 3,
        }


class DeviceMemory:
    """Device memory mappable by any process; created by `allocate` or `open`."""

    def __init__(self, mapping: _Mapping, handle: DeviceHandle) -> None:
        self._mapping: _Mapping | None = mapping
        self.handle = handle
        self.nbytes = handle.nbytes
        self.device = torch.device("cuda", mapping.device)

    @classmethod
    def allocate(cls, nbytes: int, device: int, kind: Kind = "vmm") -> DeviceMemory:
        """Allocate exportable memory with arbitrary content."""
        if nbytes <= 0:
            raise ValueError(f"device memory: expected more than 0 bytes, got {nbytes}")
        uuid = uuid_of(device)
        with in_context(device):
            if kind == "ipc":
                return cls._allocate_ipc(nbytes, device, uuid)
            properties = driver.AllocationProperties.exportable(device)
            granularity = ctypes.c_size_t()
            call(
                "cuMemGetAllocationGranularity",
                ctypes.byref(granularity), ctypes.byref(properties), driver.GRANULARITY_MINIMUM,
            )  # fmt: skip
            mapped = -(-nbytes // granularity.value) * granularity.value
            handle = ctypes.c_uint64()
            call("cuMemCreate", ctypes.byref(handle), mapped, ctypes.byref(properties), 0)
            mapping = _Mapping(device, mapped)
            mapping.map_vmm(handle.value, writable=True)
        return cls(mapping, DeviceHandle("vmm", uuid, nbytes, mapped))

    @classmethod
    def _allocate_ipc(cls, nbytes: int, device: int, uuid: bytes) -> DeviceMemory:
        mapping = _Mapping(device, nbytes)
        mapping.kind = "ipc"
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        mapping.address = address.value
        handle = driver.IpcMemoryHandle()
        call("cuIpcGetMemHandle", ctypes.byref(handle), mapping.address)
        raw = bytes(handle.reserved)
        _own[raw] = mapping
        return cls(mapping, DeviceHandle("ipc", uuid, nbytes, nbytes, raw))

    @classmethod
    def open(
        cls,
        handle: DeviceHandle,
        descriptor: int | None = None,
        *,
        device: int | None = None,
        writable: bool = False,
    ) -> DeviceMemory:
        """Map memory of a foreign process."""
        if handle.kind == "memfd":
            raise ValueError("device memory: expected kind 'vmm' or 'ipc', got 'memfd'")
        if (descriptor is None) != (handle.kind == "ipc"):
            raise ValueError(
                f"device memory of kind {handle.kind!r}: expected "
                f"{'no' if handle.kind == 'ipc' else 'a'} file descriptor"
            )
        owner = device_of(handle.uuid)
        reader = owner if device is None else device
        if reader != owner and not torch.cuda.can_device_access_peer(reader, owner):
            raise DeviceMismatchError(
                f"memory of cuda:{owner} for cuda:{reader}: the two have no peer access; choose "
                "the carrier 'shm'"
            )
        own = _own.get(handle.handle) if handle.kind == "ipc" else None
        if own is not None:
            return cls(own, handle)
        mapping = _Mapping(reader, handle.mapped_nbytes)
        with in_context(reader):
            if handle.kind == "ipc":
                mapping.kind, mapping.opened = "ipc", True
                address = ctypes.c_uint64()
                raw = driver.IpcMemoryHandle((ctypes.c_ubyte * 64)(*handle.handle))
                call(
                    "cuIpcOpenMemHandle_v2",
                    ctypes.byref(address), raw, driver.IPC_LAZY_PEER_ACCESS,
                )  # fmt: skip
                mapping.address = address.value
            else:
                physical = ctypes.c_uint64()
                call(
                    "cuMemImportFromShareableHandle",
                    ctypes.byref(physical), ctypes.c_void_p(descriptor), driver.HANDLE_POSIX_FD,
                )  # fmt: skip
                mapping.map_vmm(physical.value, writable=writable)
        return cls(mapping, handle)

    def descriptor(self) -> int:
        """Return a new file descriptor for another process; the caller closes it."""
        mapping = self._open_mapping()
        if self.handle.kind != "vmm":
            raise ValueError("device memory of kind 'ipc' has a handle, and no file descriptor")
        found = ctypes.c_int(-1)
        call(
            "cuMemExportToShareableHandle",
            ctypes.byref(found), mapping.handle, driver.HANDLE_POSIX_FD, 0,
        )  # fmt: skip
        os.set_inheritable(found.value, False)
        return found.value

    def tensor(self) -> Tensor:
        """Return the whole memory: uint8 [nbytes], on `device`, zero-copy."""
        return self.lend()[0]

    def lend(self) -> tuple[Tensor, weakref.ref[Any]]:
        """Return `tensor()` and a weak reference, dead once no tensor of the memory survives."""
        span: Any = _Span(self._open_mapping(), self.nbytes)
        return torch.as_tensor(span, device=self.device), weakref.ref(span)

    def close(self) -> None:
        """Release the memory; idempotent. Existing tensors stay valid."""
        self._mapping = None

    def _open_mapping(self) -> _Mapping:
        if self._mapping is None:
            raise ValueError("this device memory is closed")
        return self._mapping

    def __repr__(self) -> str:
        state = " closed" if self._mapping is None else ""
        return f"<DeviceMemory {self.handle.kind} {self.nbytes} B on {self.device}{state}>"
