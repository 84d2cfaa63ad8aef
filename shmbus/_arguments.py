"""What the arguments of the public names may be; TypeError and ValueError say what is wrong."""

from __future__ import annotations

import operator

import numpy as np

from shmbus import limits
from shmbus.segment import lifecycle
from shmbus_ext import _core


def check_int(name: str, value: object) -> int:
    """Return it as an int: NumPy's integers count too, a bool does not."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    return operator.index(value)


def check_flag(name: str, value: object) -> bool:
    """Return it as a bool; any text would be true, "no" as well."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")
    return bool(value)


def check_asked(name: str, value: object) -> int:
    """Return how much is asked for, as C can count it and a daemon hears it."""
    return min(check_count(name, value, 1), limits.MAX_ASKED)


def check_label(label: object) -> str:
    """Return the label as it fits the segment, cut between two characters; None is the process."""
    if label is None or label == "":
        label = lifecycle.process_label()
    if not isinstance(label, str):
        raise TypeError(f"label: expected a str or None, got {type(label).__name__}")
    if "\0" in label:
        raise ValueError(f"label: expected text without NUL, got {label!r}")
    return label.encode("utf-8", "replace")[: _core.LABEL_BYTES].decode("utf-8", "ignore")


def check_rank(rank: object, world_size: object) -> tuple[int, int]:
    """Return both as int."""
    place, size = check_int("rank", rank), check_int("world_size", world_size)
    if not 1 <= size <= limits.MAX_CLIENTS:
        raise ValueError(f"world_size: expected 1 to {limits.MAX_CLIENTS}, got {size}")
    if not 0 <= place < size:
        raise ValueError(f"rank: expected 0 to {size - 1}, got {place}")
    return place, size


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of several words."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {choices}, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}")


def check_count(name: str, value: object, least: int) -> int:
    """Return a whole number from `least` on."""
    number = check_int(name, value)
    if number < least:
        raise ValueError(f"{name}: expected {least} or more, got {number}")
    return number


def check_seconds(name: str, value: object) -> float:
    """Return a period above 0 seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected seconds, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name}: expected more than 0 seconds, got {value}")
    return float(value)
