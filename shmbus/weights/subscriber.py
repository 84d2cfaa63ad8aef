"""Reader of weights: leased views of the newest version, and whole loads into a model.

Invariants:

- A version is checked whole before handing out its tensors.
- The reader's row names the running version, and the reason against the newest: `applied` is
  recorded after the copy of the last byte, `refused` before the error.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch

from shmbus import BusClosedError
from shmbus.base.arguments import check_flag, check_int, check_int64, check_text, check_timeout
from shmbus.base.closing import ClosedByWith
from shmbus.batch.uninterrupted import ClosedByBlock
from shmbus.errors import WaitTimeoutError
from shmbus.tensors.copy_table import prepare_copies
from shmbus.tensors.views import count_writes, is_sharded
from shmbus.weights.carriers.interface import ReaderOptions
from shmbus.weights.errors import (
    LOAD_CODE,
    MANIFEST_CODE,
    TORN_CODE,
    UNUSABLE,
    ManifestError,
)
from shmbus.weights.loading import (
    Fit,
    LoadCache,
    Loading,
    Targets,
    named_of,
    paired,
    targets_of,
)
from shmbus.weights.manifest import Slice, require_slices, view_of
from shmbus.weights.probe import CARRIERS, CarriedVersion, choose

#: Versions with an arrival remembered by a subscriber, above any lag behind the newest.
MET: Final = 64


class Place(NamedTuple):
    """Place of a version in the order of publications."""

    origin: object
    sequence: int


def _is_newer(
    version: int,
    place: Place,
    newer_than: int,
    known: Place | None,
    before: tuple[int, Place] | None,
) -> bool:
    """Return whether the newest version follows the version with a known number."""
    if known is not None:
        return place.origin != known.origin or place.sequence > known.sequence
    if version > newer_than:
        return True
    # Within a life numbers rise.
    return before is not None and (place.origin != before[1].origin or version <= before[0])


class WeightSubscriber(ClosedByWith):
    """Read the weights of a bus, published now or later.

    Parameters
    ----------
    bus : str
        Bus of the weights.
    device : str | torch.device
        Target device; shown in this process's row.
    carrier : "auto" | "shm" | "cuda_vmm" | "cuda_ipc" | "memfd" | "checkpoint"
        As the publisher's; "auto" takes any carrier of the publisher, "checkpoint" by `directory`.
    directory : path, optional
        Carrier "checkpoint": directory of the files.
    label : str
        Name in messages and in `shmbus weights`.

    Raises
    ------
    DeviceMismatchError, WeightsError
        The device is missing, or the carrier cannot serve on this machine.
    TypeError, ValueError
        An option is invalid, or belongs to another carrier.

    Examples
    --------
    >>> with WeightSubscriber("run1") as subscriber:
    ...     with subscriber.latest(timeout=5.0) as weights:
    ...         weights.load_into(model)
    """

    def __init__(
        self,
        bus: str,
        *,
        device: str | torch.device = "cpu",
        carrier: str = "auto",
        directory: Path | str | None = None,
        label: str = "",
    ) -> None:
        check_text("label", label)
        self.bus: Final = bus
        self.carrier: Final = choose(carrier, device, directory=directory)
        prepare_copies(torch.device(device))
        #: Places of this subscriber's last versions, by number.
        self._met: dict[int, Place] = {}
        self._closed = False
        self._reader = CARRIERS[self.carrier.name].reader(
            ReaderOptions(bus, torch.device(device), label, directory)
        )

    def latest(self, *, timeout: float | None = None) -> Weights:
        """Lease the newest version.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the first version; None waits for ever.

        Returns
        -------
        Weights
            For a ``with`` block.

        Raises
        ------
        WaitTimeoutError
            No version came.
        ManifestError, DamagedError
            The manifest is unusable, or the bytes differ from the published bytes.
        BusBusyError, BusClosedError
            The reader table is full, or this subscriber is closed.
        """
        check_timeout(timeout, "timeout")
        return self._open(0, timeout)

    def wait(self, *, newer_than: int | None = None, timeout: float | None = None) -> int:
        """Wait for a version.

        Parameters
        ----------
        newer_than : int, optional
            The caller's number: any version received by this subscriber after the number counts,
            even a lower number, because training may have gone back. For a number never received,
            a larger number counts, or a new life begun during the wait. None takes any.
        timeout : float, optional
            Seconds; None waits for ever.

        Returns
        -------
        int
            The newest version, leased by `latest`.

        Raises
        ------
        WaitTimeoutError, ManifestError, DamagedError, BusBusyError, BusClosedError
            No version came, or as for `latest`.
        """
        check_timeout(timeout, "timeout")
        if newer_than is not None:
            newer_than = check_int64("newer_than", newer_than)
        deadline = None if timeout is None else time.monotonic() + timeout
        after = 0
        known = None if newer_than is None else self._met.get(newer_than)
        before: tuple[int, Place] | None = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with self._open(after, left) as found:
                version, place = found.version, found.place
            if newer_than is None or _is_newer(version, place, newer_than, known, before):
                return version
            before, after = (version, place), place.sequence
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"weights of bus {self.bus!r}: no version newer than {newer_than} in "
                    f"{timeout:g} s; the newest is {version}"
                )

    def at(self, version: int) -> Weights:
        """Lease a version by number: the way back after a failed update.

        Parameters
        ----------
        version : int
            Its number. An old version lasts while a reader leases it.

        Returns
        -------
        Weights
            For a ``with`` block.

        Raises
        ------
        WaitTimeoutError, ManifestError, DamagedError, BusBusyError, BusClosedError
            The version is gone, or as for `latest`.
        """
        version = check_int64("version", version)
        self._require_open()
        return self._met_now(self._reader.at(version))

    @property
    def removed(self) -> bool:
        """Return whether the weights were removed and end here."""
        return self._reader.removed()

    def _require_open(self) -> None:
        if self._closed:
            raise BusClosedError(f"the subscriber of bus {self.bus!r} is closed; make a new one")

    def _open(self, after: int, timeout: float | None) -> Weights:
        self._require_open()
        return self._met_now(self._reader.latest(after, timeout))

    def _met_now(self, version: CarriedVersion) -> Weights:
        """Remember the version's place."""
        weights = Weights(version)
        self._met[weights.version] = weights.place
        for number in list(self._met)[:-MET]:
            self._met.pop(number, None)
        return weights

    def close(self) -> None:
        """Leave; open weights keep their memory."""
        self._closed = True
        self._reader.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<WeightSubscriber {self.bus!r} {state}>"


class Weights(Mapping[str, torch.Tensor], ClosedByBlock):
    """A whole version: tensors by name, views of shared memory.

    A view is read-only, a property unknown to torch: a store into it ends the process. A view keeps
    its slot from the publisher for its whole life; copy lasting data.

    Attributes
    ----------
    version, sequence : int
        The publisher's number; the count of publications up to and including this version.
    text : str
        The publisher's name for it.
    manifest : Manifest
        Its tensors.
    """

    def __init__(self, version: CarriedVersion) -> None:
        self._carried: CarriedVersion | None = version
        self._pid = os.getpid()
        self._tensors: dict[str, torch.Tensor] | None = None
        self.version = version.version
        self.sequence = version.sequence
        self.place = Place(version.origin, version.sequence)
        self.text: Final = version.text
        self.manifest = version.manifest

    def __repr__(self) -> str:
        state = " closed" if self._carried is None else f", {len(self.manifest.tensors)} tensors"
        return f"<Weights version {self.version}{state}>"

    def _open(self) -> CarriedVersion:
        if self._carried is None:
            raise BusClosedError(f"version {self.version} is closed; take the latest again")
        if os.getpid() != self._pid:
            raise BusClosedError(
                f"version {self.version} was leased in process {self._pid}, before a fork; "
                "subscribe in this process"
            )
        return self._carried

    def _views(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            self._tensors = self._open().tensors()
        return self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return view_of(self._views(), self.manifest, name, f"weights of version {self.version}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.names())

    def __len__(self) -> int:
        return len(self.manifest.names())

    def load_into(
        self,
        model: Targets,
        *,
        strict: bool = True,
        cast: bool = False,
        slices: Mapping[str, Slice] | None = None,
    ) -> int:
        """Copy this version into parameters in place; check everything before the first byte.

        Parameters
        ----------
        model : torch.nn.Module | mapping of Tensor
            Of a DTensor, the local shard is written, and only its part is read.
        strict : bool
            Whether the tensors of both sides must match completely; at least one always must.
        cast : bool
            Whether dtypes may differ; a lost fraction, or an overflow of a float, is refused.
        slices : mapping of Slice, optional
            Places of published tensors within fused tensors of the model: name -> part.

        Returns
        -------
        int
            Bytes written.

        Raises
        ------
        ManifestError
            Lists every misfit; nothing was changed.
        DamagedError
            A copy failed: the model holds a part of this version.
        BusClosedError, TypeError
            These weights are closed, or an option is invalid.
        """
        check_flag("strict", strict)
        check_flag("cast", cast)
        require_slices(slices)
        carried = self._open()
        named, fit = named_of(model), Fit(strict, cast, slices)
        try:
            prepared = self._prepared(carried, named, fit)
            carried.report_loading()
            written = prepared.copy(self.version)
        except UNUSABLE as error:
            code = MANIFEST_CODE if isinstance(error, ManifestError) else TORN_CODE
            carried.report_refused(code, str(error))
            # Reports of errors print locals, and borrowed views outlive their memory there.
            traceback.clear_frames(error.__traceback__)
            raise
        # The copies counted writes of the local shards.
        count_writes(value for value in targets_of(named).values() if is_sharded(value))
        carried.report_applied()
        return written

    def prepare(self, device: torch.device) -> None:
        """Speed up copies to a device, in advance.

        Parameters
        ----------
        device : torch.device
            Target device. For a CUDA device the slot's memory is registered, once.
        """
        self._open().prepare([device])

    def lasting(self) -> tuple[LoadCache, dict[str, torch.Tensor]] | None:
        """Return checks reusable for the next version in this memory, and lease-free views."""
        carried = self._open()
        cache = carried.cache
        return None if cache is None else (cache, carried.borrow())

    def report_loading(self) -> None:
        """Report a load by other code: no whole version runs until `report_applied`."""
        self._open().report_loading()

    def _prepared(self, carried: CarriedVersion, named: Mapping[str, object], fit: Fit) -> Loading:
        cache = None if fit.slices else carried.cache
        found = None if cache is None else cache.get(named, fit[:2])
        if found is None:
            targets = targets_of(named)
            views = self._views() if cache is None else carried.borrow()
            found = Loading(paired(self.version, self.manifest, views, targets, fit))
            if cache is not None:
                cache.put(targets, fit[:2], found)
        carried.prepare(found.devices)
        found.require_range()
        return found

    def report_applied(self) -> None:
        """Report this version as running, after a load by other code."""
        self._open().report_applied()

    def report_refused(self, reason: str, *, code: int = LOAD_CODE) -> None:
        """Report this version as refused; the running version stays.

        Parameters
        ----------
        reason : str
            For people.
        code : int
            For programs; 1 or more.
        """
        check_text("reason", reason)
        self._open().report_refused(check_int("code", code, 1, (1 << 31) - 1), reason)

    def close(self) -> None:
        """Release the version; surviving views keep the slot."""
        # A second call after an interrupt here must still find the slot's holder.
        if self._carried is not None:
            self._carried.close()
        self._carried = self._tensors = None
