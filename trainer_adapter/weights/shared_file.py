"""The file of a model that is shared as one copy: header, manifest, and the tensors in its places.

Invariants: a file that has its name is whole; nothing that is read from one bounds an access before
it was compared with the file's own size.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import time
from typing import Final

from shmbus.segment.names import SHM_DIRECTORY, companion_name
from trainer_adapter.weights.errors import WeightsBusyError, WeightsError, WeightsTimeoutError
from trainer_adapter.weights.manifest import Manifest

__all__ = [
    "HEADER",
    "HEADER_BYTES",
    "STEPPING_AT",
    "VERSION_AT",
    "create_file",
    "open_file",
    "path_of",
    "shared_state",
]

KIND: Final = "shared"
MAGIC: Final = b"shmbusS1"
#: magic, version, stepping, bytes of the manifest, bytes of the payload, where the payload begins.
HEADER: Final = struct.Struct("<8sqQQQQ")
VERSION_AT: Final = 8
STEPPING_AT: Final = 16
HEADER_BYTES: Final = 4096
_PAGE: Final = 4096
#: Bytes of a manifest; a larger one is damage.
_MAX_MANIFEST_BYTES: Final = 64 << 20


def path_of(bus: str) -> str:
    """Return the file of a bus."""
    return SHM_DIRECTORY + companion_name(KIND, bus)


def create_file(path: str, bus: str, manifest: Manifest, version: int) -> int:
    """Make the file whole under another name; then it gets its own."""
    _require_free(path, bus)
    said = manifest.encode()
    at = -(-(HEADER_BYTES + len(said)) // _PAGE) * _PAGE
    fresh = f"{path}.new-{secrets.token_hex(4)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(fresh, flags, 0o600)
    try:
        os.posix_fallocate(file, 0, at + manifest.total)
        os.pwrite(file, said, HEADER_BYTES)
        os.pwrite(file, HEADER.pack(MAGIC, version, 0, len(said), manifest.total, at), 0)
        fcntl.flock(file, fcntl.LOCK_SH)
        os.rename(fresh, path)
    except BaseException as error:
        os.close(file)
        os.unlink(fresh)
        if isinstance(error, OSError):
            raise WeightsError(
                f"shared weights of bus {bus!r} need {at + manifest.total} bytes of "
                f"{SHM_DIRECTORY}: {error}; nothing was changed"
            ) from error
        raise
    return file


def _require_free(path: str, bus: str) -> None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise WeightsBusyError(
            f"bus {bus!r}: a living process shares or reads one copy of its weights; end it first"
        ) from error
    finally:
        os.close(file)


def open_file(bus: str, timeout: float) -> int:
    """Wait for the file, check it, and open it for its locks and a mapping."""
    path = path_of(bus)
    deadline = time.monotonic() + timeout
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            break
        except FileNotFoundError as error:
            if time.monotonic() >= deadline:
                raise WeightsTimeoutError(
                    f"nobody shares one copy of the weights of bus {bus!r} in {timeout:g} s; call "
                    "share() in the trainer"
                ) from error
            time.sleep(0.01)
    try:
        check_file(file, path)
        fcntl.flock(file, fcntl.LOCK_SH)
    except BaseException:
        os.close(file)
        raise
    return file


def check_file(file: int, path: str) -> None:
    """Refuse what is no such file, before a byte of it is mapped."""
    found = os.fstat(file)
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to uid {found.st_uid}, not to this user")
    head = os.pread(file, HEADER.size, 0)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise WeightsError(
            f"{path}: expected shared weights of this version of shmbus; nothing was mapped: "
            "remove it, or install the same version on both sides"
        )
    _, _, _, said, size, at = HEADER.unpack(head)
    if said > _MAX_MANIFEST_BYTES or at < HEADER_BYTES + said or at + size > found.st_size:
        raise WeightsError(
            f"{path}: says {said} bytes of manifest and {size} of weights from {at} on, and has "
            f"{found.st_size}; nothing was mapped: share the weights again"
        )


def shared_state(bus: str) -> tuple[int, bool] | None:
    """Ask what a shared copy is, without attaching.

    Parameters
    ----------
    bus : str
        The bus.

    Returns
    -------
    (int, bool) or None
        The version, and whether it is torn; None where there is none.
    """
    path = path_of(bus)
    with contextlib.suppress(FileNotFoundError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            check_file(file, path)
            _, version, stepping, *_ = HEADER.unpack(os.pread(file, HEADER.size, 0))
        finally:
            os.close(file)
        return int(version), bool(stepping)
    return None
