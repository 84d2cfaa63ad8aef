"""Carrier ``checkpoint``: safetensors files in a directory, for engines that reload by a path.

::

    DIRECTORY/version-7-00000003/model.safetensors    version 7, the third publication
    DIRECTORY/latest -> version-7-00000003            swapped by a rename

Invariant: `latest` leads to a directory whose file was written whole and synced before the link was
swapped. safetensors reads the files and runs no code from them. One process writes into a
directory.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import importlib.util
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import torch

from shmbus.base.arguments import check_int, check_text, is_text
from shmbus.errors import BusBusyError, DamagedError, WaitTimeoutError, WeightsError
from shmbus.segment.locked_file import LockedFile
from shmbus.segment.own_file import require_own_folder
from shmbus.store.directory import sync
from shmbus.weights.carriers.interface import DEFAULT_SLOTS, ReaderOptions, WriterOptions
from shmbus.weights.errors import ManifestError
from shmbus.weights.manifest import Manifest
from shmbus.weights.weight_source import LocalPiece, dtype_name

FILE: Final = "model.safetensors"
#: Versions on disk: the newest, and the version before for a way back.
KEPT: Final = 2
_LINK: Final = "latest"
_NAME: Final = re.compile(r"version-(-?\d+)-(\d+)")
#: Errors of a file system without directory locks.
_NO_LOCKS: Final = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
#: Seconds between two polls of the link; a disk offers no bell.
_POLL_S: Final = 0.05


#: Reserved header key for metadata: a tensor of the same name would make the file unreadable.
METADATA: Final = "__metadata__"


def faults_in_file(tensors: Mapping[str, torch.dtype]) -> list[str]:
    """List the tensors unfit for a safetensors file."""
    written = {dtype: _is_written(dtype) for dtype in set(tensors.values())}
    faults = []
    for name, dtype in tensors.items():
        if name == METADATA or not is_text(name):
            faults.append(f"{name!r}: no name that a file can have")
        elif not written[dtype]:
            faults.append(f"{name!r}: {dtype} is no dtype of safetensors")
    return faults


def _is_written(dtype: torch.dtype) -> bool:
    from safetensors import SafetensorError
    from safetensors.torch import save

    try:
        save({"": torch.empty(0, dtype=dtype, device="cpu")})
    except (KeyError, ValueError, SafetensorError):
        return False
    return True


class CheckpointPlace(NamedTuple):
    """Place of a version on disk; sorts by the order of publication."""

    sequence: int
    version: int
    path: Path


class CheckpointWriter:
    """Single writer of whole files."""

    def __init__(self, directory: Path | str, manifest: Manifest) -> None:
        self._directory = Path(directory).absolute()
        self._manifest = manifest
        faults = faults_in_file({t.name: getattr(torch, t.dtype) for t in manifest.tensors})
        if faults:
            raise ManifestError("carrier 'checkpoint': use 'shm', or another name or dtype", faults)
        self._directory.mkdir(parents=True, exist_ok=True)
        require_own_folder(str(self._directory), "checkpoints")
        self._lock = _locked(self._directory)
        for left in self._directory.glob(".new-*"):  # leftover of a dead publisher
            if left.is_symlink():
                left.unlink(missing_ok=True)
            else:
                shutil.rmtree(left, ignore_errors=True)

    def begin(self, version: int, text: str) -> CheckpointSink:
        """Begin a version; the sink references its tensors until `finish`."""
        return CheckpointSink(self, version, text)

    def close(self, *, remove: bool) -> None:
        """Leave; ignore `remove`: a checkpoint is kept."""
        self._lock.close()

    def write(self, version: int, text: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write, sync, rename, swap the link, and remove old versions."""
        from safetensors import SafetensorError

        there = _published(self._directory)
        name = f"version-{version}-{there[-1].sequence + 1 if there else 1:08}"
        said = base64.b64encode(self._manifest.encode()).decode()
        metadata = {"shmbus": said, "version": str(version), "text": text}
        fresh = self._directory / f".new-{secrets.token_hex(4)}"
        link = self._directory / f".new-{secrets.token_hex(4)}"
        try:
            self._write(name, fresh, link, tensors, metadata)
        except BaseException as error:
            # A name beyond the newest was never published: remove it before a reader finds its
            # number.
            newest = _newest_in(self._directory)
            for left in (fresh, *([] if newest == name else [self._directory / name])):
                shutil.rmtree(left, ignore_errors=True)
            link.unlink(missing_ok=True)
            if isinstance(error, OSError | SafetensorError):
                raise WeightsError(
                    f"{self._directory}: version {version} could not be written: {error}; "
                    f"{newest or 'nothing'} is in force there"
                ) from error
            raise
        for old in _published(self._directory)[:-KEPT]:
            shutil.rmtree(old.path, ignore_errors=True)

    def _write(
        self,
        name: str,
        fresh: Path,
        link: Path,
        tensors: dict[str, torch.Tensor],
        metadata: dict[str, str],
    ) -> None:
        from safetensors.torch import save_file

        fresh.mkdir()
        save_file(tensors, fresh / FILE, metadata)
        sync(fresh / FILE)
        sync(fresh)
        fresh.rename(self._directory / name)
        link.symlink_to(name)
        link.replace(self._directory / _LINK)
        sync(self._directory)


class CheckpointSink:
    """Collector of tensors for one file."""

    def __init__(self, writer: CheckpointWriter, version: int, text: str) -> None:
        self._writer, self._version, self._text = writer, version, text
        self._places = writer._manifest.by_name()
        self._tensors: dict[str, torch.Tensor] = {}
        self.changed: int | None = None

    def put(self, piece: LocalPiece) -> int:
        """Take a whole tensor, cast to the published dtype."""
        place = self._places.get(piece.name)
        if place is None or tuple(piece.tensor.shape) != place.shape:
            expected = "no such tensor" if place is None else f"{list(place.shape)} in one piece"
            raise WeightsError(
                f"{piece.name!r}: expected {expected}, got {list(piece.tensor.shape)}; the carrier "
                "'checkpoint' takes whole tensors from one rank, 'shm' takes shards from all"
            )
        # Copy even without a cast: the model may change before the file is written.
        made = torch.empty(place.shape, dtype=getattr(torch, place.dtype), device="cpu")
        made.copy_(piece.tensor)
        self._tensors[place.name] = made
        return place.size

    def put_lasting(self, pieces: Sequence[LocalPiece]) -> int:
        """Take whole tensors, one after the other."""
        return sum(map(self.put, pieces))

    def settle(self) -> None:
        """Do nothing: `put` already copied the piece."""

    def finish(self) -> None:
        """Write the file, and make it the newest."""
        missing = [t.name for t in self._writer._manifest.tensors if t.name not in self._tensors]
        if missing:
            raise ManifestError("this version has not all of its tensors", missing)
        self._writer.write(self._version, self._text, self._tensors)
        self._tensors = {}

    def give_up(self, reason: str) -> None:
        """Forget the tensors."""
        del reason
        self._tensors = {}


class CheckpointVersion:
    """File read whole into its own memory; the directory keeps no reader rows."""

    #: No memory lasts to the next version, and no checks of the memory.
    cache = None

    def __init__(self, directory: Path, sequence: int) -> None:
        from safetensors import SafetensorError, safe_open

        path = directory / FILE
        try:
            with safe_open(path, framework="pt") as opened:
                metadata = opened.metadata() or {}
                self._tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DamagedError(
                f"{path}: {error}; nothing was loaded: publish again, or remove the directory"
            ) from error
        try:
            said = base64.b64decode(metadata["shmbus"], validate=True)
            self.version = int(metadata["version"])
        except (KeyError, ValueError) as error:
            raise ManifestError(f"{path}: not published by shmbus", [str(error)]) from error
        self.text = metadata.get("text", "")
        self.sequence = sequence
        self.origin: object = directory.parent
        self.manifest = Manifest.decode(said, _payload_bytes(said))
        self._check()

    def _check(self) -> None:
        faults = []
        for place in self.manifest.tensors:
            found = self._tensors.get(place.name)
            if found is None:
                faults.append(f"{place.name!r} is missing")
            elif (dtype_name(found.dtype), tuple(found.shape)) != (place.dtype, place.shape):
                faults.append(f"{place.name!r}: {found.dtype} {list(found.shape)}")
        if faults:
            raise ManifestError("the file does not match its manifest", faults)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the file's tensors."""
        return self._tensors

    borrow = tensors

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Do nothing: the tensors lie in plain memory."""

    def report_loading(self) -> None:
        """Do nothing, as each report."""

    report_applied = report_loading

    def report_refused(self, code: int, reason: str) -> None:
        """Do nothing, as each report."""

    def close(self) -> None:
        """Forget the tensors."""
        self._tensors = {}


class CheckpointReader:
    """Reader of the newest file."""

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory).absolute()

    def latest(self, after: int, timeout: float | None) -> CheckpointVersion:
        """Wait for a version."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            name = _newest_in(self._directory)
            found = _NAME.fullmatch(name)
            sequence = int(found[2]) if found else 0
            if sequence > after:
                target = self._directory / name
                try:
                    return CheckpointVersion(target, sequence)
                except DamagedError:
                    if target.exists():  # otherwise a newer version replaced it
                        raise
            elif deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"{self._directory}: no {'newer ' if after else ''}version in {timeout:g} s "
                    f"(newest publication: {sequence or 'none'}); start the publisher, or wait"
                )
            else:
                time.sleep(_POLL_S)

    def at(self, version: int) -> CheckpointVersion:
        """Return a surviving version, not necessarily the newest."""
        there = _published(self._directory)
        found = [place for place in there if place.version == version]
        if not found:
            raise WaitTimeoutError(
                f"{self._directory}: version {version} is not there; there are: "
                f"{', '.join(str(place.version) for place in there) or 'none'}"
            )
        return CheckpointVersion(found[-1].path, found[-1].sequence)

    def removed(self) -> bool:
        """Return False: every poll looks up the directory anew."""
        return False

    def close(self) -> None:
        """Do nothing."""


def checkpoint_problem(device: torch.device, size: int, directory: Path | str | None) -> str:
    """Return the missing requirement, else an empty text."""
    del device, size
    if directory is None:
        return "no directory was given (directory=...)"
    if importlib.util.find_spec("safetensors") is None:
        return "safetensors is not installed (pip install safetensors)"
    return ""


def checkpoint_writer(options: WriterOptions) -> CheckpointWriter:
    """Become the writer; raise ValueError for an option without meaning for files."""
    slots, max_slots, when_held = options.slots, options.max_slots, options.when_held
    check_text("when_held", when_held)
    plain = max_slots is None and when_held == "wait"
    if check_int("slots", slots) != DEFAULT_SLOTS or not plain:
        raise ValueError(
            "carrier 'checkpoint': expected no slots, max_slots or when_held, which files have "
            f"not, got {slots}, {max_slots} and {when_held!r}"
        )
    if options.world_size != 1 or options.directory is None:
        raise ValueError(
            "carrier 'checkpoint': expected directory=... and world_size=1, got "
            f"{options.directory!r} and {options.world_size}"
        )
    return CheckpointWriter(options.directory, options.manifest)


def checkpoint_reader(options: ReaderOptions) -> CheckpointReader:
    """Read the directory."""
    assert options.directory is not None, "asked by `checkpoint_problem`"
    return CheckpointReader(options.directory)


def newest_checkpoints(directory: Path) -> tuple[CheckpointPlace, CheckpointPlace | None]:
    """Return the version behind `latest`, and the version published before it."""
    newest = _newest_in(directory)
    there = _published(directory)
    names = [place.path.name for place in there]
    if newest not in names:
        raise WeightsError(
            f"{directory}: expected the link {_LINK!r} to a version, as a WeightPublisher with "
            "carrier='checkpoint' makes it; publish first. Nothing was touched"
        )
    at = names.index(newest)
    return there[at], there[at - 1] if at else None


def _newest_in(directory: Path) -> str:
    """Return the link's target; empty without a link."""
    with contextlib.suppress(OSError):
        return os.readlink(directory / _LINK)
    return ""


def _locked(directory: Path) -> LockedFile:
    """Become the directory's writer until the file is closed or the process ends."""
    file = LockedFile()
    file.open(os.path.realpath(directory), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise BusBusyError(
            f"{directory}: another publisher writes there; close that one first, or give this one "
            "a directory of its own"
        ) from error
    except OSError as error:
        # Some network file systems lock no directories; versions are still written whole.
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
    return file


def _published(directory: Path) -> list[CheckpointPlace]:
    """List a directory's versions in the order of publication."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):  # created later by its publisher
        names = os.listdir(directory)
    found = filter(None, map(_NAME.fullmatch, names))
    return sorted(CheckpointPlace(int(of[2]), int(of[1]), directory / of[0]) for of in found)


def _payload_bytes(said: bytes) -> int:
    """Return the manifest's total: a file carries no second payload size for a comparison."""
    try:
        return msgspec.msgpack.decode(said, type=Manifest).total
    except msgspec.DecodeError:
        return 0
