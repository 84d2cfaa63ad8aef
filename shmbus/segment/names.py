"""Names of buses, and the files in /dev/shm that they stand for."""

from __future__ import annotations

import os

from shmbus import limits

__all__ = ["PREFIX", "SHM_DIRECTORY", "check_name", "identity", "is_named", "shm_path"]

PREFIX = "/shmbus."
SHM_DIRECTORY = "/dev/shm"


def check_name(name: object) -> str:
    """Return the name if it can name a bus; TypeError or ValueError say what is wrong with it."""
    if not isinstance(name, str):
        raise TypeError(f"bus name: expected a str, got {type(name).__name__}")
    encoded = name.encode("utf-8", "replace")
    if not encoded or len(encoded) > limits.MAX_NAME_BYTES or not {"/", "\0"}.isdisjoint(name):
        raise ValueError(
            f"bus name: expected 1 to {limits.MAX_NAME_BYTES} bytes without '/' and NUL, got "
            f"{name!r}; it becomes the file {SHM_DIRECTORY}{PREFIX}NAME"
        )
    if encoded != name.encode("utf-8", "surrogatepass"):
        raise ValueError(f"bus name: expected text that UTF-8 can encode, got {name!r}")
    return name


def shm_path(name: str) -> str:
    """Return the file that a bus name stands for."""
    return f"{SHM_DIRECTORY}{PREFIX}{name}"


def identity(name: str) -> os.stat_result | None:
    """Tell the file that the name leads to; None where there is none."""
    try:
        return os.stat(shm_path(name))
    except FileNotFoundError:
        return None


def is_named(name: str, known: os.stat_result) -> bool:
    """Whether the name still leads to that file."""
    found = identity(name)
    return found is not None and os.path.samestat(found, known)
