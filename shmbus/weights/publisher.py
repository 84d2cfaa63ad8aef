"""Publication of weights: each rank writes its own pieces, and readers get whole versions.

Invariants:

- A version is published whole or not at all: an error names the failure and the version in force.
- `publish` returns after the copy: the parameters may change from then on.
- One version at a time: a second call waits for the first.
- Numbers rise within a life; a life begins with a publisher, or with a call of `new_life`. Readers
  follow the order of publications, and a life may begin with any number.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
import torch

from shmbus import Bus, BusClosedError
from shmbus.base.arguments import (
    check_flag,
    check_int,
    check_int64,
    check_seconds,
    check_text,
    check_timeout,
)
from shmbus.errors import ShmbusError, WaitTimeoutError
from shmbus.pool import WhenHeld
from shmbus.tensors.copy_table import prepare_copies
from shmbus.weights.carriers.checkpoint import CheckpointSink
from shmbus.weights.carriers.interface import DEFAULT_SLOTS, WriterOptions
from shmbus.weights.carriers.pool_writer import PoolSink
from shmbus.weights.errors import ManifestError, VersionOrderError
from shmbus.weights.manifest import Manifest
from shmbus.weights.patch_policy import patch_share
from shmbus.weights.probe import CARRIERS, choose
from shmbus.weights.rounding import loses_bits, peak_of, require_range, round_stochastically
from shmbus.weights.weight_source import LocalPiece, WeightSource, require_source

logger = logging.getLogger(__name__)

#: Default for `timeout`, in seconds: ranks and readers with a slower copy have stopped.
PUBLISH_TIMEOUT_S: Final = 60.0


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a publication.

    Attributes
    ----------
    version : int
        As given.
    skipped : bool
        Whether ``when_held="skip"`` dropped the version because readers held every slot.
    copied_bytes : int
        Bytes written by this rank.
    copied_s, seconds : float
        Seconds until the parameters were copied, and until the version was whole.
    changed : int | None
        Elements of this rank changed since the previous version, from the patch; None without a
        patch.
    """

    version: int
    skipped: bool
    copied_bytes: int
    copied_s: float
    seconds: float
    changed: int | None = None


class Publication:
    """Version in publication by a thread.

    The parameters must not change until `wait_copied` returned.
    """

    def __init__(self, version: int) -> None:
        self.version: Final = version
        self._copied = threading.Event()
        self._ended = threading.Event()
        self._result: Published | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Return whether the publication ended, in success or failure."""
        return self._ended.is_set()

    def wait_copied(self, timeout: float | None = None) -> None:
        """Wait until the parameters may change.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits for the end.

        Raises
        ------
        WaitTimeoutError
            The copy still runs.
        """
        check_timeout(timeout, "timeout")
        if not self._copied.wait(timeout):
            raise WaitTimeoutError(
                f"version {self.version}: still being copied after {timeout:g} s; do not change "
                "the parameters before wait_copied() returns"
            )
        if self._error is not None:
            raise self._error

    def wait(self, timeout: float | None = None) -> Published:
        """Wait until readers get the version.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits for the end, bounded by the publisher's own deadlines.

        Returns
        -------
        Published

        Raises
        ------
        WaitTimeoutError, WeightsError
            The publication still runs, and continues; or it failed, and the previous version stays
            in force.
        """
        check_timeout(timeout, "timeout")
        if not self._ended.wait(timeout):
            raise WaitTimeoutError(
                f"version {self.version}: still being published after {timeout:g} s; it goes on"
            )
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _end(self, result: Published | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._copied.set()
        self._ended.set()


class WeightPublisher:
    """Publish the weights of a bus.

    Parameters
    ----------
    bus : str
        Bus of the weights; it need not exist.
    source : WeightSource
        For example ``ModuleSource(model)``. Its names, dtypes and shapes are read now.
    carrier : "auto" | "shm" | "cuda_vmm" | "cuda_ipc" | "memfd" | "checkpoint"
        Transport of the weights; "auto" asks `probe_carriers`.
    device : str | torch.device
        Carriers "cuda_vmm" and "cuda_ipc": the CUDA device of the versions; in ranks above 0
        the device of the writes.
    slots, max_slots : int, int | None
        Versions with memory, and the limit of their growth; not of a checkpoint.
    rank, world_size : int
        This process among the joint writers of a version. Every rank publishes each version.
    when_held : "wait" | "skip" | "grow"
        Reaction to slow readers that hold every slot but the newest.
    timeout : float
        Seconds to wait for readers and for other ranks.
    digests : bool
        Carrier "shm": compute a digest of each block, at the cost of another pass over memory, for
        `shmbus weights --verify`.
    patches : bool | float
        Carrier "shm": publish the changed elements with a version; a number limits their share of
        the elements, True means 0.05.
    directory : path, optional
        Carrier "checkpoint", which "auto" then takes: directory of the files.
    keep : bool
        Carrier "shm": whether the weights survive `close`, as they survive a death, and an
        exception in the ``with`` block.
    label : str
        Name in messages and in `shmbus weights`.

    Raises
    ------
    ManifestError
        The source contradicts itself.
    BusBusyError
        Another process publishes these weights.
    WeightsError, DeviceMismatchError
        The carrier cannot serve on this machine, or the device is missing.
    TypeError, ValueError
        An option is invalid, or belongs to another carrier.
    CapacityError
        The slots do not fit /dev/shm, or the device.

    Examples
    --------
    >>> with WeightPublisher("run1", ModuleSource(model)) as publisher:
    ...     publisher.publish(version=7)
    """

    def __init__(
        self,
        bus: str,
        source: WeightSource,
        *,
        carrier: str = "auto",
        device: str | torch.device = "cpu",
        slots: int = DEFAULT_SLOTS,
        max_slots: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        when_held: WhenHeld = "wait",
        timeout: float = PUBLISH_TIMEOUT_S,
        digests: bool = False,
        patches: bool | float = False,
        directory: Path | str | None = None,
        keep: bool = False,
        label: str = "",
    ) -> None:
        check_text("bus", bus)
        require_source(source)
        check_seconds("timeout", timeout)
        check_text("label", label)
        check_flag("digests", digests)
        check_flag("keep", keep)
        self.bus: Final = bus
        rank, world_size = check_int("rank", rank), check_int("world_size", world_size)
        self.rank, self.world_size = rank, world_size
        self._source = source
        self._keep = keep
        self._lock = threading.Lock()
        #: Publication by the newest thread.
        self._newest: Publication | None = None
        self._closed, self._pid = False, os.getpid()
        #: Last published number of this life; None before the first.
        self.version: int | None = None
        self.manifest: Final = Manifest.plan(
            source.params(), aliases=source.aliases(), slices=source.slices(), model=bus
        )
        self._whole = sum(tensor.size for tensor in self.manifest.tensors)
        self._dtypes: Final = {each.name: each.dtype for each in self.manifest.tensors}
        self.carrier: Final = choose(carrier, device, directory=directory)
        chosen = CARRIERS[self.carrier.name]
        kept = keep and not chosen.takes_directory  # files stay in any case
        for option, given in (
            ("patches", patch_share(patches)), ("digests", digests), ("keep", kept),
        ):  # fmt: skip
            if given and not chosen.in_slots:
                raise ValueError(
                    f"carrier {self.carrier.name!r}: expected {option}=False, got {given}; only "
                    f"the carrier 'shm' has {option}"
                )
        prepare_copies(torch.device(device))
        self._writer = chosen.writer(
            WriterOptions(
                bus=bus,
                manifest=self.manifest,
                device=torch.device(device),
                slots=slots,
                max_slots=max_slots,
                rank=rank,
                world_size=world_size,
                when_held=when_held,
                timeout=timeout,
                digests=digests,
                patches=patches,
                directory=directory,
                label=label,
            )
        )

    def publish(self, version: int, *, text: str = "") -> Published:
        """Publish the parameters as they are now; return when readers get them.

        Parameters
        ----------
        version : int
            An int64 above the previous one; free for a publisher's first, and after `new_life`.
        text : str
            Name of the version.

        Returns
        -------
        Published

        Raises
        ------
        PeerGoneError, WaitTimeoutError
            A peer rank ended; or the named readers or ranks took too long.
        ManifestError
            The model changed its names, shapes or dtypes since the publisher's start.
        VersionOrderError
            The version is not above the previous one.
        WeightsError
            A cast overflows, or a peer rank could not write its pieces.
        BusClosedError, BusRemovedError
            This publisher is closed, or the weights were removed meanwhile.
        TypeError, ValueError
            The version is no int64.
        """
        check_text("text", text)
        version = check_int64("version", version)
        self._require_open()
        if self._newest is not None:
            self._newest._ended.wait()
        return self._publish(version, text, threading.Event())

    def new_life(self) -> None:
        """Announce a return to an earlier state, for example a checkpoint.

        The next version may carry any number. Waiting readers get it all the same. Each rank calls
        `new_life`; a new publisher begins a life by itself. A closed publisher raises
        BusClosedError.
        """
        self._require_open()
        self.version = None

    def publish_async(self, version: int, *, text: str = "") -> Publication:
        """Publish in a thread, beside the next step's forward pass, after all earlier calls.

        Parameters
        ----------
        version, text
            As for `publish`.

        Returns
        -------
        Publication
            Call its `wait_copied` before the optimizer changes the parameters.

        Raises
        ------
        BusClosedError
            This publisher is closed.
        """
        publication = Publication(check_int64("version", version))
        check_text("text", text)
        self._require_open()

        uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream() if uses_cuda else None
        before, self._newest = self._newest, publication

        def run() -> None:
            try:
                if before is not None:
                    before._ended.wait()
                # The caller's queued device work comes before the copies.
                with torch.cuda.stream(stream):
                    result = self._publish(publication.version, text, publication._copied)
            except BaseException as error:  # raised by the waits
                publication._end(None, error)
            else:
                publication._end(result, None)

        # No daemon: the interpreter waits for it at exit, because device work cannot be cancelled.
        threading.Thread(target=run, name=f"publish {version}").start()
        return publication

    def _require_open(self) -> None:
        # Checked before the lock: in a forked child a thread of the parent may have held the lock.
        if os.getpid() != self._pid:
            raise BusClosedError(
                f"the publisher of bus {self.bus!r} was made in process {self._pid}, before a "
                "fork; make a new one in this process"
            )
        if self._closed:
            raise BusClosedError(f"the publisher of bus {self.bus!r} is closed; make a new one")

    def _publish(self, version: int, text: str, copied: threading.Event) -> Published:
        self._require_open()
        with self._lock:
            self._require_open()
            if self.version is not None and version <= self.version:
                raise VersionOrderError(
                    f"weights of bus {self.bus!r}: expected a version above {self.version}, which "
                    f"this publisher has published, got {version}; nothing was published. Number "
                    "each version higher, or call new_life() where training went back"
                )
            if self.version is None and self.rank == 0:
                self._warn_of_earlier_run(version)
            began = time.monotonic()
            sink = self._writer.begin(version, text)
            if sink is None:
                took = time.monotonic() - began
                return Published(
                    version=version, skipped=True, copied_bytes=0, copied_s=took, seconds=took
                )
            try:
                size = self._copy(sink, version)
                copied_s = time.monotonic() - began
                copied.set()
                sink.finish()
            except BaseException as error:
                sink.give_up(f"{type(error).__name__}: {error}")
                raise
            self.version = version
            return Published(
                version=version,
                skipped=False,
                copied_bytes=size,
                copied_s=copied_s,
                seconds=time.monotonic() - began,
                changed=sink.changed,
            )

    def _warn_of_earlier_run(self, version: int) -> None:
        """Warn before weights older than the bus's samples."""
        try:
            with Bus.open(self.bus) as bus:
                newest = bus.policy_version
        except (ShmbusError, OSError):
            return  # weights go without a bus, too
        if version < newest:
            logger.warning(
                "weights of bus %r: version %d is published, and the bus is at policy version %d: "
                "if it is of an earlier run, `shmbus rm %s` before a new one; a trainer that "
                "returns to a checkpoint calls load_state_dict or reset_policy_version first",
                self.bus, version, newest, self.bus,
            )  # fmt: skip

    def _copy(self, sink: PoolSink | CheckpointSink, version: int) -> int:
        written = 0
        lasting: list[LocalPiece] = []
        sizes: dict[str, int] = {}
        peaks: list[tuple[str, torch.dtype, torch.Tensor | None]] = []
        with torch.no_grad():
            for piece in self._source.iter_local(self.rank, self.world_size):
                if not isinstance(piece, LocalPiece):
                    raise TypeError(f"iter_local: expected LocalPieces, got {type(piece).__name__}")
                dtype = getattr(torch, self._dtypes.get(piece.name, ""), piece.tensor.dtype)
                peaks.append((piece.name, dtype, peak_of(piece.tensor, dtype)))
                if piece.rounding == "stochastic" and loses_bits(piece.tensor, dtype):
                    tensor = round_stochastically(
                        piece.tensor, dtype, version, piece.name, piece.start
                    )
                    piece = LocalPiece(piece.name, piece.start, tensor)
                if piece.lasting:
                    lasting.append(piece)
                else:
                    size = sink.put(piece)
                    sizes[piece.name] = sizes.get(piece.name, 0) + size
                    written += size
            if lasting:
                written += sink.put_lasting(lasting)
            sink.settle()
        require_range(peaks)
        if self.world_size == 1 and (written != self._whole or sizes):
            self._require_all(written, sizes, {piece.name for piece in lasting})
        return written

    def _require_all(self, written: int, sizes: dict[str, int], lasting: set[str]) -> None:
        """Raise ManifestError for a tensor that never came, or came twice."""
        known = {tensor.name: tensor.size for tensor in self.manifest.tensors}
        faults = [
            f"{name!r}: {size} bytes came, of {known[name]}"
            for name, size in sizes.items()
            if size != known[name]
        ]
        faults += [f"{n!r} did not come" for n in known if n not in sizes and n not in lasting]
        if written != self._whole:
            faults.append(f"the source gave {written} of {self._whole} bytes")
        if faults:
            raise ManifestError(
                "each tensor of params() has to come from iter_local() once; the weights that were "
                "published stay in force",
                faults,
            )

    def close(self) -> None:
        """Wait for the version in publication, and leave; the weights go too, unless `keep`.

        In a forked child only the child's own resources go: its parent publishes.
        """
        self._close(keep=self._keep)

    def _close(self, *, keep: bool) -> None:
        if os.getpid() != self._pid:
            self._closed = True
            self._writer.close(remove=False)
            return
        with self._lock:
            if not self._closed:
                self._writer.close(remove=self.rank == 0 and not keep)
                self._closed = True  # last: an interrupted caller may call again

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"rank {self.rank} of {self.world_size}"
        return f"<WeightPublisher {self.bus!r} by {self.carrier.name} {state}>"

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Readers keep the published weights after their trainer's failure, as after its death.
        self._close(keep=self._keep or error is not None)
