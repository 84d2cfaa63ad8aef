"""Which memory carries the tensors: a tagged type for each, so that no option is for another one.

Invariant: a carrier that was constructed is one that this machine may use; nothing is allocated,
shared or mapped to find out.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec
import torch

from shmbus.channel import DEFAULT_MAX_BYTES

__all__ = ["Carrier", "CudaCarrier", "HostCarrier", "choose_carrier"]


class HostCarrier(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="host"
):
    """Tensors of the CPU in /dev/shm: one copy in, and views in place of one out.

    Attributes
    ----------
    slots : int
        Steps that may be on their way, 1 to 8.
    max_bytes : int | str
        Bytes that a step may have; address space, and no memory before it is used.
    """

    slots: int = 2
    max_bytes: int | str = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots: expected 1 to {MAX_SLOTS}, got {self.slots}")


class CudaCarrier(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cuda"
):
    """Device memory of shmbus's own, exported once. It cannot be constructed yet.

    Attributes
    ----------
    device : str
        Such as "cuda:0"; both processes must be on it.
    slots : int
        Steps that may be on their way.
    colocated : bool
        Whether both processes are on one device.
    """

    device: str
    slots: int = 2
    colocated: bool = True

    def __post_init__(self) -> None:
        if not self.colocated:
            raise ValueError(
                "carrier 'cuda': expected colocated=True, since it shares memory of one device, "
                "got False; use HostCarrier for processes on two devices"
            )
        raise NotImplementedError(
            "carrier 'cuda': this version has no channel over device memory; use HostCarrier, and "
            "copy to the host first (tensor.cpu())"
        )


Carrier: TypeAlias = HostCarrier | CudaCarrier

#: Of a channel's layout.
MAX_SLOTS: Final = 8


def choose_carrier(carrier: str | Carrier, **options: Any) -> Carrier:
    """Take a carrier by its name and options, or as it was made.

    Parameters
    ----------
    carrier : "auto" | "host" | "cuda" | Carrier
        What the user asked for.
    **options
        Fields of that carrier; None where nothing was said.

    Returns
    -------
    HostCarrier | CudaCarrier

    Raises
    ------
    TypeError, ValueError
        There is no such carrier, or a field belongs to another one.
    NotImplementedError
        The carrier is not there yet.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(carrier, (HostCarrier, CudaCarrier)):
        if given:
            raise ValueError(
                f"{', '.join(given)}: options of the carrier, which was given as {carrier!r}; say "
                "them there"
            )
        return carrier
    types: dict[str, type[HostCarrier] | type[CudaCarrier]] = {
        "auto": HostCarrier,
        "host": HostCarrier,
        "cuda": CudaCarrier,
    }
    if carrier not in types:
        raise ValueError(f"carrier: expected 'auto', 'host' or 'cuda', got {carrier!r}")
    made = types[carrier]
    for name in given:
        if name not in made.__struct_fields__:
            fields = ", ".join(made.__struct_fields__)
            raise ValueError(
                f"{name}: expected an option of carrier {carrier!r} ({fields}); it belongs to "
                "another carrier"
            )
    return made(**given)


def wrong_device(tensor: torch.Tensor) -> str:
    """Say what is wrong with a tensor's device for the host carrier; "" for nothing."""
    return "" if tensor.device.type == "cpu" else str(tensor.device)
