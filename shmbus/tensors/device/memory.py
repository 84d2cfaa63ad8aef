"""Device memory that one process allocates and others map: by file descriptor, or by handle.

Invariants:

- The memory is ours, not torch's: its caching allocator, its reference counts over processes and
  its expandable segments have no part in it. It is exported once, for its life.
- A mapping lives as long as a tensor that looks into it, whatever is closed first, and in the
  process that made it only.
- With "vmm" the physical memory lives until the last process has unmapped it, so a dead exporter
  leaves its readers whole. With "ipc" it ends with the process that allocated it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from typing import Any, Literal

import torch
from torch import Tensor

from shmbus.errors import DeviceMismatchError
from shmbus.tensors.device import driver
from shmbus.tensors.device.driver import CudaDriverError, call, in_context
from shmbus.tensors.device.handles import DeviceHandle, device_of, uuid_of

Kind = Literal["vmm", "ipc"]


def refusals(device: int) -> dict[str, str]:
    """Say for each kind why a device cannot have it; empty where it can have both."""
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
    """Addresses of this process that lead to device memory; unmapped with the last reference."""

    def __init__(self, device: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.address = 0
        self.handle = 0  # of VMM: what the driver calls the physical memory
        self.reserved = 0
        self.kind: Kind = "vmm"
        self.opened = False  # of "ipc": whether it was opened here, not allocated
        self._pid = os.getpid()

    def map_vmm(self, handle: int, *, writable: bool) -> None:
        """Give physical memory an address here."""
        self.handle = handle
        address = ctypes.c_uint64()
        call("cuMemAddressReserve", ctypes.byref(address), self.nbytes, 0, 0, 0)
        self.reserved = address.value
        call("cuMemMap", self.reserved, self.nbytes, 0, handle, 0)
        self.address = self.reserved
        # A copy between devices runs on the source's: whoever has tensors on several devices writes
        # from each of them.
        devices = [self.device, *(_peers_of(self.device) if writable else ())]
        access = (driver.AccessDescription * len(devices))(
            *(driver.AccessDescription.of(device, writable=writable) for device in devices)
        )
        call("cuMemSetAccess", self.address, self.nbytes, ctypes.byref(access), len(devices))

    def __del__(self) -> None:
        # A forked child has no context, and its parent has the mapping.
        if os.getpid() == self._pid and (self.reserved or self.address or self.handle):
            try:
                self._free()
            except (CudaDriverError, RuntimeError):
                # The process ends, and its context with it: the driver frees all of it.
                if not sys.is_finalizing():
                    raise

    def _free(self) -> None:
        with in_context(self.device):  # waits for the device, where work may still read it
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
    """Return the devices of this process that can reach a device's memory by themselves."""
    others = (other for other in range(torch.cuda.device_count()) if other != device)
    return [other for other in others if torch.cuda.can_device_access_peer(other, device)]


#: Memory of kind "ipc" that this process has allocated, by its handle: the driver opens a handle in
#: other processes only.
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
    """Bytes on a CUDA device that other processes can map; made by `allocate` or `open`."""

    def __init__(self, mapping: _Mapping, handle: DeviceHandle) -> None:
        self._mapping: _Mapping | None = mapping
        self.handle = handle
        self.nbytes = handle.nbytes
        self.device = torch.device("cuda", mapping.device)

    @classmethod
    def allocate(cls, nbytes: int, device: int, kind: Kind = "vmm") -> DeviceMemory:
        """Allocate memory that can be exported; its content is arbitrary."""
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
        """Map what another process has allocated."""
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
        """Return a new file descriptor of it, for another process; the caller closes it."""
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
        """Return all its bytes: uint8 [nbytes], on `device`. No copy."""
        return self.lend()[0]

    def lend(self) -> tuple[Tensor, weakref.ref[Any]]:
        """Return `tensor()`, and what tells whether a tensor of that memory is still there."""
        span: Any = _Span(self._open_mapping(), self.nbytes)
        return torch.as_tensor(span, device=self.device), weakref.ref(span)

    def close(self) -> None:
        """Let go of it; may be called twice. Tensors that look into it stay valid."""
        self._mapping = None

    def _open_mapping(self) -> _Mapping:
        if self._mapping is None:
            raise ValueError("this device memory is closed")
        return self._mapping

    def __repr__(self) -> str:
        state = " closed" if self._mapping is None else ""
        return f"<DeviceMemory {self.handle.kind} {self.nbytes} B on {self.device}{state}>"
