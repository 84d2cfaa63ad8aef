"""The file of a model that is shared as one copy: header, manifest, and the tensors in its places.

Invariants:

- A file that has its name is whole, with the values of all tensors. One that a living process has
  open is never replaced, and who makes one removes no other that lives.
- Nothing that is read from a file bounds an access before it was compared with its own size.
- Locks are those of a descriptor that is not mapped: a forked child, which has the mapping, does
  not keep them.
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
#: magic, version, stepping, bytes of the manifest, bytes of the payload, where the payload begins;
#: whose exported memory the payload is instead, 0 where it is in the file.
HEADER: Final = struct.Struct("<8sqQQQQQ")
VERSION_AT: Final = 8
STEPPING_AT: Final = 16
HEADER_BYTES: Final = 4096
_PAGE: Final = 4096
#: Bytes of a manifest; a larger one is damage.
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
        """Make the file under another name, for a ``with`` block that fills it; then name it."""
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
                    # Not over what another one has made meanwhile, as a rename would.
                    os.link(self._fresh, self.path)
                    os.unlink(self._fresh)
            except (FileExistsError, FileNotFoundError) as error:
                raise _busy(self.bus) from error
            self._fresh = ""

    def _begin(self, manifest: Manifest, version: int, owner: int) -> None:
        """Allocate all of it, and write what stands before the weights."""
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
        """Map it by another descriptor."""
        fd = os.open(self._fresh or self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if not os.path.samestat(os.fstat(fd), os.fstat(self.fd)):
                raise FileNotFoundError(f"{self.path} is another file now")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            return mmap.mmap(fd, 0, mmap.MAP_SHARED, protection)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Remove its names; whoever has it open keeps what it has. Another file stays."""
        # Nobody else's has the name that it is made under; a child of its maker has no descriptor.
        if self._fresh and not self.forked:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._fresh)
        if self.fd >= 0 and leads_to(self.path, os.fstat(self.fd)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def _locked_leftover(path: str, bus: str, stack: contextlib.ExitStack) -> bool:
    """Keep everybody from a file that nobody has open, until the stack ends; False without one."""
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
    """Remove what processes that have ended were making, which is as large as a model."""
    for left in glob.glob(f"{glob.escape(path)}.new-*"):
        # What another user has put there is not ours to remove.
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
            # Its trainer has ended meanwhile, or another one has begun.
            file.close()
        except FileNotFoundError as error:
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"nobody shares one copy of the weights of bus {bus!r} in {timeout:g} s; call "
                    "share() in the trainer"
                ) from error
            time.sleep(0.01)
        except BaseException:
            file.close()
            raise


def check_file(file: int, path: str) -> None:
    """Refuse what is no such file, before a byte of it is mapped."""
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
    """Ask what a shared copy is, without attaching."""
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
