"""Choice of a carrier, by read-only questions about this machine.

Invariant: a probe allocates, shares and maps nothing, and creates no device context: a probe that
shares a tensor can wedge a device used by several processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec
import torch

from shmbus.base.arguments import check_choice, check_int64, check_path, known_device
from shmbus.errors import DeviceMismatchError, WeightsError
from shmbus.segment.room import shortage, tightest
from shmbus.tensors.device.arena import MemoryKind
from shmbus.tensors.device.memory import refusals
from shmbus.weights.carriers.checkpoint import (
    CheckpointReader,
    CheckpointVersion,
    CheckpointWriter,
    checkpoint_problem,
    checkpoint_reader,
    checkpoint_writer,
)
from shmbus.weights.carriers.exported import ExportedWriter
from shmbus.weights.carriers.interface import ReaderOptions, WriterOptions
from shmbus.weights.carriers.pool_reader import PooledReader, PooledVersion
from shmbus.weights.carriers.pool_writer import PoolWriter, SlotWriter

_SHM: Final = Path("/dev/shm")

#: A publisher's side, a subscriber's side, and a reader's version.
WriterCarrier: TypeAlias = PoolWriter | CheckpointWriter
ReaderCarrier: TypeAlias = PooledReader | CheckpointReader
CarriedVersion: TypeAlias = PooledVersion | CheckpointVersion


class Carrier(NamedTuple):
    """Carrier of weights: a check of this machine, and two sides."""

    #: From a device, bytes of every slot and a directory: the reason against the carrier on this
    #: machine, or ""; allocates nothing.
    problem: Callable[[torch.device, int, Path | str | None], str]
    #: Raises for another carrier's option.
    writer: Callable[[WriterOptions], WriterCarrier]
    reader: Callable[[ReaderOptions], ReaderCarrier]
    #: Advantages, shown with the choice.
    why: tuple[str, ...] = ()
    #: Reason against a choice by "auto"; empty if "auto" may choose the carrier.
    by_name_only: str = ""
    takes_directory: bool = False
    #: Versions lie in the slots of a pool, which have room for patches and digests.
    in_slots: bool = False


def _shm_problem(device: torch.device, size: int, directory: Path | str | None) -> str:
    del device, directory
    if not os.access(_SHM, os.W_OK):
        return f"{_SHM} is not writable"
    return shortage(size) if size > tightest().left else ""


def _exported(kind: MemoryKind) -> Carrier:
    """Return the carrier of versions in exported memory of the publisher's own."""

    def problem(device: torch.device, size: int, directory: Path | str | None) -> str:
        del size, directory
        if kind == "memfd":
            return "" if device.type == "cpu" else f"its memory is the host's, not that of {device}"
        if device.type != "cuda":
            return f"it needs a CUDA device, got {str(device)!r}"
        return refusals(device.index or 0).get(kind, "")

    takes = "its versions end with their publisher"
    if kind != "memfd":
        takes = "it takes `slots` times the model on the device"
    return Carrier(
        problem,
        lambda options: PoolWriter(options, ExportedWriter(options, kind)),
        PooledReader,
        by_name_only=f"{takes}; ask for it by name",
    )


#: Carriers by name. "auto" takes a given directory's, or the first that permits the choice.
CARRIERS: Final = {
    "shm": Carrier(
        _shm_problem,
        lambda options: PoolWriter(options, SlotWriter(options)),
        PooledReader,
        why=("/dev/shm is there", "whole versions, views without a copy, any death"),
        in_slots=True,
    ),
    "checkpoint": Carrier(
        checkpoint_problem,
        checkpoint_writer,
        checkpoint_reader,
        why=("a directory was given", "whole versions, which outlive a reboot"),
        takes_directory=True,
    ),
    "cuda_vmm": _exported("vmm"),
    "cuda_ipc": _exported("ipc"),
    "memfd": _exported("memfd"),
}


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A carrier, and the reasons."""

    name: str
    why: tuple[str, ...]
    refused: dict[str, str]


def checked_device(device: str | torch.device) -> torch.device:
    """Return a device visible to this process."""
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
    """Return the carrier that would be chosen, with the reasons against the rest.

    Parameters
    ----------
    device : str | torch.device
        Target device of the weights.
    size : int
        Bytes of every slot together; 0 if unknown or already allocated.
    directory : path, optional
        For the carrier "checkpoint".

    Returns
    -------
    Choice

    Raises
    ------
    WeightsError
        No carrier can serve; the message lists every reason.
    DeviceMismatchError
        The device is missing.
    TypeError, ValueError
        An argument is invalid.
    """
    checked = checked_device(device)
    size = check_int64("size", size)
    if directory is not None:
        check_path("directory", directory)
    refused = {}
    chosen = None
    for name, carrier in CARRIERS.items():
        problem = carrier.problem(checked, size, directory) or carrier.by_name_only
        if problem:
            refused[name] = problem
        elif chosen is None or carrier.takes_directory:
            chosen = name, carrier.why
    if chosen is not None:
        return Choice(name=chosen[0], why=chosen[1], refused=refused)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise WeightsError(f"no carrier can serve here: {reasons}")


def choose(
    carrier: str, device: str | torch.device, *, directory: Path | str | None = None
) -> Choice:
    """Choose a carrier, or check the requested one."""
    check_choice("carrier", carrier, ("auto", *CARRIERS))
    if directory is not None:
        check_path("directory", directory)
    if carrier == "auto":
        return probe_carriers(device, directory=directory)
    chosen = CARRIERS[carrier]
    if directory is not None and not chosen.takes_directory:
        raise ValueError(
            f"directory: an option of the carrier 'checkpoint', and carrier={carrier!r}"
        )
    problem = chosen.problem(checked_device(device), 0, directory)
    if problem:
        raise WeightsError(f"carrier {carrier!r} cannot serve here: {problem}")
    return Choice(name=carrier, why=("it was asked for",), refused={})
