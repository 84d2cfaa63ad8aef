"""Checks of plain arguments, wherever they are given.

Invariants:

- An error names the argument, what was expected, and what was given; nothing was begun.
- Importing this loads no torch: adapters of stacks that have none check by it, too.
"""

from __future__ import annotations

import difflib
import operator
import os
import sys
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

__all__ = [
    "UnknownNameError",
    "check_choice",
    "check_flag",
    "check_int",
    "check_int64",
    "check_number",
    "check_path",
    "check_seconds",
    "check_text",
    "checked_int",
    "is_text",
    "known_device",
]

#: Names like an unknown one that its error shows, and names that it shows where none is like it.
_NEAR_SHOWN: Final = 3
_NAMES_SHOWN: Final = 5


class UnknownNameError(KeyError):
    """A name under which nothing is; a KeyError, so that `in` and `get` of a mapping work by it.

    Parameters
    ----------
    what : str
        What was asked, such as "weights of version 7".
    name : object
        That it lacks.
    names : iterable of str
        What it has.
    """

    def __init__(self, what: str, name: object, names: Iterable[str]) -> None:
        super().__init__(name)
        self._what = what
        self._names = list(names)

    def __str__(self) -> str:
        # Not before it is shown: to compare the names of a large model takes most of a second, and
        # `get` and `in` show nothing.
        name = self.args[0]
        near = difflib.get_close_matches(str(name), self._names, _NEAR_SHOWN)
        if near:
            return f"{name!r}: {self._what}: no such name; did you mean {_listed(near)}?"
        shown = _listed(self._names[:_NAMES_SHOWN]) or "none"
        more = len(self._names) - _NAMES_SHOWN
        return f"{name!r}: {self._what}: no such name; there is {shown}" + (
            f" and {more} more" if more > 0 else ""
        )

    def __reduce__(self) -> tuple[type[KeyError], tuple[str]]:
        return KeyError, (str(self),)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def checked_int(name: str, value: object) -> int:
    """Return an int; NumPy's integers are ints, a bool is not. Raises TypeError for another."""
    if isinstance(value, (bool, type)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    try:
        return operator.index(value)
    except TypeError as error:  # an array or a tensor of several numbers
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from error


def check_int64(name: str, value: object) -> int:
    """Return an int of 64 bits; a tensor is none here, since its value may be on a device."""
    torch = sys.modules.get("torch")  # who gives a tensor has loaded it
    if torch is not None and isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    number = checked_int(name, value)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{name}: expected an int64, got {number}")
    return number


def check_int(name: str, value: object, least: int, most: int) -> int:
    """Return an int from `least` to `most`."""
    number = check_int64(name, value)
    if not least <= number <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {number}")
    return number


def check_seconds(name: str, value: object, *, none: str = "") -> None:
    """Raise TypeError or ValueError unless it is 0 or more seconds.

    Parameters
    ----------
    name : str
        Of the argument.
    value : object
        What was given.
    none : str
        What None means; empty where it is no value.
    """
    if value is None and none:
        return
    also = f", or None, which {none}" if none else ""
    check_number(name, value, f"seconds{also}")
    if not value >= 0:  # type: ignore[operator]
        raise ValueError(f"{name}: expected 0 or more seconds{also}, got {value}")


def check_number(name: str, value: object, what: str = "a number") -> None:
    """Raise TypeError or ValueError unless it is a number that a float can hold; inf and nan are.

    Parameters
    ----------
    name : str
        Of the argument.
    value : object
        What was given.
    what : str
        What it is to be, for the message.
    """
    # float and int first: the test for Real asks a registry.
    if isinstance(value, bool) or not isinstance(value, (float, int, Real)):
        raise TypeError(f"{name}: expected {what}, got {type(value).__name__}")
    try:
        float(value)
    except OverflowError as error:
        raise ValueError(
            f"{name}: expected {what} that a float can hold, got one beyond 1e308"
        ) from error


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless it is a bool: of a text, "no" would be true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")


def check_choice(name: str, value: object, choices: Sequence[str], hint: str = "") -> None:
    """Raise TypeError or ValueError unless it is one of several words.

    Parameters
    ----------
    name : str
        Of the argument.
    value : object
        What was given.
    choices : sequence of str
        Two words or more.
    hint : str
        What to do next, for the message.
    """
    # An array is not compared: it would give an array of answers.
    if isinstance(value, str) and value in choices:
        return
    *first, last = map(repr, choices)
    expected = f"{name}: expected {', '.join(first)} or {last}"
    hint = hint and f"; {hint}"
    if not isinstance(value, str):
        raise TypeError(f"{expected}, got {type(value).__name__}{hint}")
    raise ValueError(f"{expected}, got {value!r}{hint}")


def check_path(name: str, value: object) -> None:
    """Raise TypeError unless it is a path, as a str or an `os.PathLike`."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}: expected a path, got {type(value).__name__}")


def check_text(name: str, value: object) -> None:
    """Raise TypeError unless it is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type(value).__name__}")


def is_text(name: str) -> bool:
    """Whether UTF-8 can encode a name, as tables of tensors and headers of files do."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def known_device(device: object) -> torch.device:
    """Return a device that torch knows; TypeError or ValueError for another."""
    import torch

    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device: expected a torch.device or str, got {type(device).__name__}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected one that torch knows, got {device!r}") from error
