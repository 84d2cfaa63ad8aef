"""Opening this user's files in a folder writable by other users, such as /dev/shm.

Invariant: every read, write or cut follows a check of the open descriptor: a regular file of this
process's user, reached without a link and without waiting.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

from shmbus import errors


def open_own(path: str, flags: int, what: str) -> int:
    """Open a file owned by this user."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):  # removed since
            check_own(path, os.lstat(path), what)
        if isinstance(error, PermissionError):
            raise PermissionError(
                f"{what}: may not open {path} as uid {os.geteuid()}; run as the user that "
                "created the file, with mode 0600"
            ) from error
        raise
    try:
        found = os.fstat(fd)
        check_own(path, found, what)
        if flags & os.O_CREAT and found.st_nlink > 1:
            raise errors.LayoutMismatchError(
                f"{what}: expected a file with one name, got {path}, a hard link to a further file "
                "of this user; remove the link, or choose a different name"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_own(path: str, what: str) -> bytes:
    """Read a file of this user."""
    with os.fdopen(open_own(path, os.O_RDONLY, what), "rb") as file:
        return file.read()


def require_own_folder(path: str, what: str) -> None:
    """Refuse a foreign user's folders and links: their owner could swap files."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid():
        found = os.stat(path)
    check_own(path, found, what, stat.S_ISDIR)


def check_own(
    path: str, found: os.stat_result, what: str, is_kind: Callable[[int], bool] = stat.S_ISREG
) -> None:
    """Refuse irregular files, and a foreign user's: their owner could read and truncate them."""
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{what}: {path} belongs to uid {found.st_uid}, this process runs as uid "
            f"{os.geteuid()}; run as the owner, have the file removed, or choose a different name"
        )
    if not is_kind(found.st_mode):
        raise errors.LayoutMismatchError(
            f"{what}: {path} is {kind_of(found.st_mode)}, not a file of shmbus; check its "
            "content, and remove it, or choose a different name"
        )


def kind_of(mode: int) -> str:
    """Name a file's kind by its mode."""
    for is_kind, text in (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISLNK, "a symbolic link"),
    ):
        if is_kind(mode):
            return text
    return "a device"
