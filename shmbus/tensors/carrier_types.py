"""Carriers of tensors: a tagged type for every kind of memory, with only its own options.

Invariant: this machine supports every constructed carrier; the check allocates, shares and maps
nothing.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec
import torch

from shmbus.base.arguments import check_choice, check_flag, check_int, known_device
from shmbus.channel.sender import DEFAULT_MAX_BYTES
from shmbus.errors import DeviceMismatchError
from shmbus.tensors.device.memory import refusals

#: Of a channel's layout.
MAX_SLOTS: Final = 8


class _Carrier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slots: int = 2
    max_bytes: int | str = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        check_int("slots", self.slots, 1, MAX_SLOTS)


class HostCarrier(_Carrier, frozen=True, kw_only=True, tag="host"):
    """CPU tensors in /dev/shm: one copy in, zero-copy views out.

    Attributes
    ----------
    slots : int
        Steps in flight, 1 to 8.
    max_bytes : int | str
        Limit of a step's bytes: address space, and no memory before its use.
    """


class MemfdCarrier(_Carrier, frozen=True, kw_only=True, tag="memfd"):
    """CPU tensors in memory outside of /dev/shm: one copy in, one out.

    For a container with a small /dev/shm. Steps in flight are lost with the sender's process.

    Attributes
    ----------
    slots, max_bytes : int, int | str
        As of `HostCarrier`.
    """


class CudaCarrier(_Carrier, frozen=True, kw_only=True, tag="cuda"):
    """CUDA tensors in device memory allocated by shmbus and exported once.

    One copy in and one out, or views. Steps in flight are lost with the sender's process.

    Attributes
    ----------
    device : str
        Device of the sender's tensors, for example "cuda:0". The receiver uses the same device, or
        a device with peer access to it.
    slots, max_bytes : int, int | str
        As of `HostCarrier`.
    kind : "auto" | "vmm" | "ipc"
        Export by file descriptor, or by a handle of 64 bytes; "auto" asks the device's support.
    colocated : bool
        Whether both processes use devices of one machine.
    """

    device: str
    kind: Literal["auto", "vmm", "ipc"] = "auto"
    colocated: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("colocated", self.colocated)
        if not self.colocated:
            raise ValueError(
                "carrier 'cuda': expected colocated=True, since it shares memory of one machine's "
                "devices, got False"
            )
        check_choice("kind", self.kind, ("auto", "vmm", "ipc"))
        wanted = known_device(self.device)
        if wanted.type != "cuda":
            raise ValueError(
                f"device: expected a CUDA device for carrier 'cuda', got {self.device!r}; use "
                "HostCarrier for tensors of the CPU"
            )
        seen = torch.cuda.device_count()
        if (wanted.index or 0) >= seen:
            raise DeviceMismatchError(
                f"device: expected one of the {seen} CUDA devices that this process sees, got "
                f"{self.device!r}; check CUDA_VISIBLE_DEVICES, or use HostCarrier and copy to the "
                "host first (tensor.cpu())"
            )

    @property
    def index(self) -> int:
        """Return the device's number in this process."""
        return torch.device(self.device).index or 0

    def memory_kind(self) -> Literal["vmm", "ipc"]:
        """Return the supported kind of memory of the device, without an allocation.

        Raises
        ------
        ValueError
            The device does not support the requested kind; the message lists every reason.
        """
        refused = refusals(self.index)
        kinds: tuple[Literal["vmm", "ipc"], ...] = ("vmm", "ipc")
        for kind in kinds:
            if self.kind in ("auto", kind) and kind not in refused:
                return kind
        reasons = "; ".join(f"{kind}: {why}" for kind, why in refused.items())
        raise ValueError(
            f"carrier 'cuda', kind {self.kind!r}: {self.device} cannot export memory: {reasons}; "
            "use HostCarrier, and copy to the host first (tensor.cpu())"
        )


Carrier: TypeAlias = HostCarrier | MemfdCarrier | CudaCarrier

_TYPES: Final[dict[str, type[HostCarrier] | type[MemfdCarrier] | type[CudaCarrier]]] = {
    "host": HostCarrier,
    "memfd": MemfdCarrier,
    "cuda": CudaCarrier,
}


def choose_carrier(carrier: str | Carrier, **options: Any) -> Carrier:
    """Return a carrier from a name and options, or the given instance."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(carrier, (HostCarrier, MemfdCarrier, CudaCarrier)):
        if given:
            raise ValueError(
                f"{', '.join(given)}: options of the carrier, which was given as {carrier!r}; say "
                "them there"
            )
        return carrier
    check_choice("carrier", carrier, ("auto", *_TYPES))
    if carrier == "auto":
        on_cpu = known_device(given.get("device", "cpu")).type == "cpu"
        carrier = "host" if on_cpu else "cuda"
        if on_cpu:
            given.pop("device", None)
    made = _TYPES[carrier]
    if made is CudaCarrier and "device" not in given:
        raise ValueError("device: expected one such as 'cuda:0' with carrier 'cuda', got none")
    for name in given:
        if name not in made.__struct_fields__:
            fields = ", ".join(made.__struct_fields__)
            raise ValueError(
                f"{name}: expected an option of carrier {carrier!r} ({fields}); it belongs to "
                "another carrier"
            )
    return made(**given)
