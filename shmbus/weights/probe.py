"""Which carrier serves: questions about this machine, and nothing else.

Invariant: nothing is allocated, shared or mapped here, and no device gets a context. A probe that
shares a tensor can wedge a device that several processes use.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
import torch

from shmbus._arguments import check_choice, check_int64, check_path, known_device
from shmbus.errors import DeviceMismatchError, WeightsError
from shmbus.tensors.device.memory import refusals

__all__ = ["CARRIERS", "CarrierName", "Choice", "checked_device", "choose", "probe_carriers"]

CarrierName: TypeAlias = Literal["auto", "shm", "cuda_vmm", "cuda_ipc", "memfd", "checkpoint"]

#: In the order of preference.
CARRIERS: Final = ("shm", "checkpoint")

#: Those that take a device's memory, or end with their publisher: chosen by name only.
BY_NAME: Final = ("cuda_vmm", "cuda_ipc", "memfd")

_SHM: Final = Path("/dev/shm")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A carrier, and the reasons.

    Attributes
    ----------
    name : str
        The carrier.
    why : tuple of str
        What speaks for it.
    refused : dict of str
        Each carrier that cannot serve here, and why.
    """

    name: str
    why: tuple[str, ...]
    refused: dict[str, str]


def checked_device(device: str | torch.device) -> torch.device:
    """Return a device that this process has.

    Parameters
    ----------
    device : str | torch.device
        Such as "cpu" or "cuda:0".

    Returns
    -------
    torch.device

    Raises
    ------
    DeviceMismatchError
        It is not here.
    """
    wanted = known_device(device)
    count = torch.cuda.device_count() if wanted.type == "cuda" else 0
    known = wanted.type == "cpu" or (wanted.type == "cuda" and (wanted.index or 0) < count)
    if not known:
        have = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise DeviceMismatchError(
            f"device {str(wanted)!r} is not here; this process has {have}. The weights that it "
            "runs stay as they are; check CUDA_VISIBLE_DEVICES"
        )
    return wanted


def probe_carriers(
    device: str | torch.device = "cpu", *, size: int = 0, directory: Path | str | None = None
) -> Choice:
    """Say which carrier would be chosen, and why not the others.

    Parameters
    ----------
    device : str | torch.device
        Where the weights go.
    size : int
        Bytes that all slots need together; 0 where that is not known, or they are there.
    directory : path, optional
        For the carrier "checkpoint".

    Returns
    -------
    Choice

    Raises
    ------
    WeightsError
        None can serve; the message has each reason.
    DeviceMismatchError
        The device is not here.
    TypeError, ValueError
        An argument is none.
    """
    checked_device(device)
    size = check_int64("size", size)
    if directory is not None:
        check_path("directory", directory)
    why, refused = {}, {}
    if problem := _shm_problem(size):
        refused["shm"] = problem
    else:
        why["shm"] = ("/dev/shm is there", "whole versions, views without a copy, any death")
    if problem := _checkpoint_problem(directory):
        refused["checkpoint"] = problem
    else:
        why["checkpoint"] = ("a directory was given", "whole versions, which outlive a reboot")
    for name in BY_NAME:
        refused[name] = _exported_problem(name, checked_device(device)) or _ASK[name]
    for name in CARRIERS:
        if name in why:
            return Choice(name=name, why=why[name], refused=refused)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise WeightsError(f"no carrier can serve here: {reasons}")


def _shm_problem(size: int) -> str:
    if not os.access(_SHM, os.W_OK):
        return f"{_SHM} is not writable"
    room = os.statvfs(_SHM)
    free = room.f_bavail * room.f_frsize
    if size > free:
        return (
            f"{_SHM} has {free} bytes free, the slots need {size}; enlarge it (docker run "
            "--shm-size=..., mount -o remount,size=...), or remove old segments (`shmbus gc`)"
        )
    return ""


#: What a carrier that could serve would take.
_ASK: Final = {
    "cuda_vmm": "it takes `slots` times the model on the device; ask for it by name",
    "cuda_ipc": "it takes `slots` times the model on the device; ask for it by name",
    "memfd": "its versions end with their publisher; ask for it by name",
}


def _exported_problem(name: str, device: torch.device) -> str:
    if name == "memfd":
        return "" if device.type == "cpu" else f"its memory is the host's, not that of {device}"
    if device.type != "cuda":
        return f"it needs a CUDA device, got {str(device)!r}"
    return refusals(device.index or 0).get(name.removeprefix("cuda_"), "")


def _checkpoint_problem(directory: Path | str | None) -> str:
    if directory is None:
        return "no directory was given (directory=...)"
    if importlib.util.find_spec("safetensors") is None:
        return "safetensors is not installed (pip install safetensors)"
    return ""


def choose(
    carrier: CarrierName,
    device: str | torch.device,
    *,
    size: int = 0,
    directory: Path | str | None = None,
) -> Choice:
    """Choose a carrier, or check the one that was asked for.

    Parameters
    ----------
    carrier : "auto" | "shm" | "cuda_vmm" | "cuda_ipc" | "memfd" | "checkpoint"
        What the user asked for.
    device, size, directory
        As for `probe_carriers`.

    Returns
    -------
    Choice

    Raises
    ------
    TypeError, ValueError
        There is no such carrier, or an option belongs to another one.
    WeightsError
        It cannot serve here.
    """
    check_choice("carrier", carrier, ("auto", *CARRIERS, *BY_NAME))
    if directory is not None:
        check_path("directory", directory)
    if carrier not in ("auto", "checkpoint") and directory is not None:
        raise ValueError(
            f"directory: an option of the carrier 'checkpoint', and carrier={carrier!r}"
        )
    if carrier == "auto":
        return probe_carriers(device, size=size, directory=directory)
    wanted = checked_device(device)
    if carrier in BY_NAME:
        problem = _exported_problem(carrier, wanted)
    else:
        problem = _shm_problem(size) if carrier == "shm" else _checkpoint_problem(directory)
    if problem:
        raise WeightsError(f"carrier {carrier!r} cannot serve here: {problem}")
    return Choice(name=carrier, why=("it was asked for",), refused={})
