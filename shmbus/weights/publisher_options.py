"""The options of a publisher, checked before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shmbus._arguments import check_flag, check_int, check_seconds, check_text
from shmbus.weights.patches import patch_share
from shmbus.weights.source import require_source

__all__ = [
    "DEFAULT_SLOTS",
    "check_options",
    "checked_directory",
    "checked_patches",
    "require_plain",
]

#: One that is read, and one that is written.
DEFAULT_SLOTS: Final = 2


def check_options(
    bus: object, source: object, *, timeout: object, label: object, digests: object, keep: object
) -> None:
    """Raise where what every carrier takes is none."""
    check_text("bus", bus)
    require_source(source)
    check_seconds("timeout", timeout)
    check_text("label", label)
    check_flag("digests", digests)
    check_flag("keep", keep)


def require_plain(slots: int, max_slots: int | None, when_held: str) -> None:
    """Raise ValueError where a checkpoint is given what files have not."""
    check_text("when_held", when_held)
    if check_int("slots", slots) != DEFAULT_SLOTS or max_slots is not None or when_held != "wait":
        raise ValueError(
            "carrier 'checkpoint': expected no slots, max_slots or when_held, which files have "
            f"not, got {slots}, {max_slots} and {when_held!r}"
        )


def checked_directory(directory: Path | str | None, world_size: int, digests: bool) -> Path | str:
    """Return where a checkpoint goes."""
    if world_size != 1 or directory is None or digests:
        raise ValueError(
            "carrier 'checkpoint': expected directory=..., world_size=1 and digests=False, got "
            f"{directory!r}, {world_size} and {digests}"
        )
    return directory


def checked_patches(carrier: str, patches: bool | float) -> float:
    """Return the share of elements up to which a version has a patch."""
    share = patch_share(patches)
    if share and carrier != "shm":
        raise ValueError(
            f"carrier {carrier!r}: expected patches=False, got {patches}; only the carrier 'shm' "
            "has patches"
        )
    return share
