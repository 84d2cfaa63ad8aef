"""File of a model's single shared copy: header, manifest, and the tensors in place.

Invariants:

- A file under its final name is whole, with the values of every tensor. A file opened by a living
  process is never replaced, and a creator removes no living process's file.
- Nothing read from a file bounds an access before a comparison with the file's own size.
- Locks belong to a descriptor without a mapping: a forked child inherits the mapping and does
  not keep the locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from typing import Final

from shmbus import LayoutMismatchError
from shmbus.errors import BusBusyError, WaitTimeoutError, WeightsError
from shmbus.segment.locked_file import LockedFile
from shmbus.segment.names import SHM_DIRECTORY, companion_name, leads_to
from shmbus.segment.own_file import open_own
from shmbus.segment.room import shortage, tightest
from shmbus.weights.manifest import Manifest

KIND: Final = "shared"
MAGIC: Final = b"shmbusS2"
#: magic, version, stepping, bytes of the manifest, bytes of the payload, start of the payload;
#: owner of exported memory that holds the payload instead, 0 for a payload in the file.
HEADER: Final = struct.Struct("<8sqQQQQQ")
VERSION_AT: Final = 8
STEPPING_AT: Final = 16
HEADER_BYTES: Final = 4096
_PAGE: Final = 4096
#: Limit of a manifest's bytes; a larger value means damage.
_MAX_MANIFEST_BYTES: Final = 64 << 20


def path_of(bus: str) -> str:
    """Return the file of a bus."""
    return SHM_DIRECTORY + companion_name(KIND, bus)


class SharedFile(LockedFile):
    """A file of shared weights, open for its locks."""

    def __init__(self, bus: str) -> None:
        self.bus: Final = bus
        self.path: Final = path_of(bus)
        self._fresh = ""

    @contextlib.contextmanager
    def made(self, manifest: Manifest, version: int, owner: int = 0) -> Iterator[None]:
        """Create the file under a temporary name, filled by the ``with`` block; then rename it."""
        with contextlib.ExitStack() as stack:
            left = _locked_leftover(self.path, self.bus, stack)
            _remove_unfinished(self.path)
            self._fresh = f"{self.path}.new-{secrets.token_hex(4)}"
            self._begin(manifest, version, owner)
            yield
            try:
                if left:
                    os.rename(self._fresh, self.path)
                else:
                    # A link, unlike a rename, fails over a concurrently created file.
                    os.link(self._fresh, self.path)
                    os.unlink(self._fresh)
            except (FileExistsError, FileNotFoundError) as error:
                raise _busy(self.bus) from error
            self._fresh = ""

    def _begin(self, manifest: Manifest, version: int, owner: int) -> None:
        """Allocate the whole file, and write the bytes before the weights."""
        said = manifest.encode()
        at = -(-(HEADER_BYTES + len(said)) // _PAGE) * _PAGE
        try:
            self.open(self._fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, _title(self.bus))
            fcntl.flock(self.fd, fcntl.LOCK_SH)
            size = at + (0 if owner else manifest.total)
            if size > tightest().left:
                raise OSError(errno.ENOSPC, shortage(size))
            os.posix_fallocate(self.fd, 0, size)
            os.pwrite(self.fd, said, HEADER_BYTES)
            head = HEADER.pack(MAGIC, version, 0, len(said), manifest.total, at, owner)
            os.pwrite(self.fd, head, 0)
        except OSError as error:
            raise WeightsError(
                f"shared weights of bus {self.bus!r} need {at + manifest.total} bytes of "
                f"{SHM_DIRECTORY}: {error}; nothing was changed"
            ) from error

    def map(self, *, writable: bool) -> mmap.mmap:
        """Map the file by another descriptor."""
        fd = os.open(self._fresh or self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if not os.path.samestat(os.fstat(fd), os.fstat(self.fd)):
                raise FileNotFoundError(f"{self.path} is another file now")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            return mmap.mmap(fd, 0, mmap.MAP_SHARED, protection)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Remove the file's names; processes with an open file keep it. A newer file stays."""
        # The temporary name is unique to this file; a creator's forked child holds no descriptor.
        if self._fresh and not self.forked:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._fresh)
        if self.fd >= 0 and leads_to(self.path, os.fstat(self.fd)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def _locked_leftover(path: str, bus: str, stack: contextlib.ExitStack) -> bool:
    """Lock an unused file until the stack ends; return False without one."""
    try:
        file = open_own(path, os.O_RDWR, _title(bus))
    except FileNotFoundError:
        return False
    stack.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _busy(bus) from error
    return leads_to(path, os.fstat(file))


def _remove_unfinished(path: str) -> None:
    """Remove dead processes' unfinished files, each as large as a model."""
    for left in glob.glob(f"{glob.escape(path)}.new-*"):
        # Never remove a foreign user's file.
        with contextlib.suppress(OSError, LayoutMismatchError):
            file = open_own(left, os.O_RDWR, "unfinished shared weights")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(left)
            finally:
                os.close(file)


def _title(bus: str) -> str:
    return f"shared weights of bus {bus!r}"


def _busy(bus: str) -> BusBusyError:
    return BusBusyError(
        f"bus {bus!r}: a living process shares or reads one copy of its weights; end it first"
    )


def open_file(bus: str, timeout: float) -> SharedFile:
    """Wait for the file, check it, and open it for its locks."""
    file = SharedFile(bus)
    deadline = time.monotonic() + timeout
    while True:
        try:
            file.open(file.path, os.O_RDWR, _title(bus))
            check_file(file.fd, file.path)
            fcntl.flock(file.fd, fcntl.LOCK_SH)
            if leads_to(file.path, os.fstat(file.fd)):
                return file
            # Its trainer ended meanwhile, or a new one began.
            file.close()
        except FileNotFoundError as error:
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"nobody shares one copy of the weights of bus {bus!r} in {timeout:g} s; call "
                    "share_model() in the trainer"
                ) from error
            time.sleep(0.01)
        except BaseException:
            file.close()
            raise


def check_file(file: int, path: str) -> None:
    """Refuse a foreign file, before a byte of it is mapped."""
    found = os.fstat(file)
    head = os.pread(file, HEADER.size, 0)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise WeightsError(
            f"{path}: expected shared weights of this version of shmbus; nothing was mapped: "
            "remove it, or install the same version on both sides"
        )
    _, _, _, said, size, at, owner = HEADER.unpack(head)
    there = at + (0 if owner else size)
    if said > _MAX_MANIFEST_BYTES or at < HEADER_BYTES + said or there > found.st_size:
        raise WeightsError(
            f"{path}: says {said} bytes of manifest and {size} of weights from {at} on, and has "
            f"{found.st_size}; nothing was mapped: share the weights again"
        )


def shared_state(bus: str) -> tuple[int, bool] | None:
    """Return a shared copy's version and state, without attaching."""
    path = path_of(bus)
    with contextlib.suppress(FileNotFoundError):
        file = open_own(path, os.O_RDONLY, _title(bus))
        try:
            check_file(file, path)
            _, version, stepping, *_ = HEADER.unpack(os.pread(file, HEADER.size, 0))
        finally:
            os.close(file)
        return int(version), bool(stepping)
    return None
