"""Directories written atomically: complete after a rename, or absent.

Invariants:

- Every byte reaches the disk before the rename.
- A writer holds a file lock on its hidden directory. A free lock proves the writer's death, and the
  next writer beside it removes the directory.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from shmbus.base.format import show_size
from shmbus.segment.locked_file import LockedFile
from shmbus.store.parts import write_file

logger = logging.getLogger(__name__)

#: The last file written.
MANIFEST: Final = "manifest.json"
#: A directory in progress, beside its target.
_PARTIAL: Final = re.compile(r"\..+\.partial-[0-9a-f]{8}")
ManifestType = TypeVar("ManifestType", bound=msgspec.Struct)


def write_directory(target: Path, write: Callable[[Path], ManifestType]) -> ManifestType:
    """Let `write` fill a directory beside the target, then rename the complete directory."""
    target = Path(os.path.abspath(target))
    if os.path.lexists(target) and (
        target.is_symlink() or not target.is_dir() or any(target.iterdir())
    ):
        raise FileExistsError(
            f"{target}: expected an empty or missing directory, got files, or a path to a file; "
            "choose a different directory, or move the files away"
        )
    _remove_abandoned(target.parent)
    try:
        partial, lock = _begin_partial(target)
    except OSError as error:
        what = f"cannot be written: {error.strerror}; choose a directory in one that is there"
        raise type(error)(error.errno, f"{what} and writable", str(target)) from error
    try:
        return _fill_partial(partial, target, write)
    finally:
        lock.close()


def _fill_partial(
    partial: Path, target: Path, write: Callable[[Path], ManifestType]
) -> ManifestType:
    try:
        manifest = write(partial)
        write_file(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        sync(partial)
        os.rename(partial, target)
    except BaseException as error:
        written = sum(path.stat().st_size for path in partial.iterdir())
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(target, written) from error
        if isinstance(error, OSError) and error.errno and error.filename is None:
            what = f"{error.strerror} (nothing is left of this attempt)"
            raise type(error)(error.errno, what, str(target)) from error
        raise
    sync(target.parent)
    return manifest


def _begin_partial(target: Path) -> tuple[Path, LockedFile]:
    """Make a directory beside the target; its lock proves a living writer."""
    while True:
        partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
        partial.mkdir(mode=0o700)
        lock = LockedFile()
        try:
            lock.open(str(partial), os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # removed by a rival before the lock
        with contextlib.suppress(OSError):  # a file system without locks: remove nothing
            if not lock.lock():
                continue  # another writer is removing it
        if partial.exists():
            return partial, lock
        lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Remove dead writers' hidden directories."""
    try:
        beside = [path for path in parent.iterdir() if _PARTIAL.fullmatch(path.name)]
    except OSError:
        return  # missing or unreadable; the next mkdir raises
    for partial in beside:
        lock = LockedFile()
        try:
            lock.open(str(partial), os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # no directory, or another user's
        try:
            if os.fstat(lock.fd).st_uid == os.geteuid() and lock.lock():
                size = sum(path.stat().st_size for path in partial.iterdir())
                shutil.rmtree(partial)
                logger.warning(
                    "removed %s (%s): its writer was killed, and nothing of it is needed",
                    partial,
                    show_size(size),
                )
        except OSError:
            pass  # no proof of the writer's death
        finally:
            lock.close()


def _no_room(target: Path, written: int) -> OSError:
    free = shutil.disk_usage(target.parent).free
    what = (
        f"no room: it needs more than {written:,} bytes, and {free:,} are free there; make room or "
        "choose a directory on another disk (nothing is left of this attempt)"
    )
    return OSError(errno.ENOSPC, what, str(target))


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
