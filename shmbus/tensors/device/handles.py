"""What one process tells another of device memory: a typed message, never a pickle.

Invariants: the device is named by its UUID, never by a number, which means another device in a
process that sees others; nothing of a message is used before its bounds are checked.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import torch

from shmbus.errors import DeviceMismatchError

UUID_BYTES: Final = 16
#: Of memory that no device has.
NO_UUID: Final = bytes(UUID_BYTES)
#: Above every device of this decade; a larger number is a damaged message.
MAX_BYTES: Final = 1 << 44
#: Of one message, with its largest handle.
MAX_MESSAGE_BYTES: Final = 512


class DeviceHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="device-memory/1"):
    """What another process needs in order to map memory that this one allocated."""

    kind: Literal["vmm", "ipc", "memfd"]
    uuid: bytes
    nbytes: int
    mapped_nbytes: int
    handle: bytes = b""

    def encode(self) -> bytes:
        """Return it as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, message: bytes) -> DeviceHandle:
        """Check and return what another process sent."""
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
    """Return the 16 bytes that name a CUDA device on all its host's processes."""
    return bytes.fromhex(str(torch.cuda.get_device_properties(device).uuid).replace("-", ""))


def device_of(uuid: bytes) -> int:
    """Return the number that this process has for a device."""
    seen = [uuid_of(number) for number in range(torch.cuda.device_count())]
    if uuid in seen:
        return seen.index(uuid)
    raise DeviceMismatchError(
        f"memory of the CUDA device {uuid.hex()}, which this process does not see: it sees "
        f"{', '.join(each.hex() for each in seen) or 'none'}; start it with that device in "
        "CUDA_VISIBLE_DEVICES, or choose the carrier 'shm'"
    )
