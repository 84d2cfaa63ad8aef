"""Argument checks: a check returns the value as shmbus uses it, or raises TypeError or ValueError.

Invariants:

- A message names the argument, the expected value and the given value. A refused call began
  nothing.
- NumPy's numbers count as numbers and its bool as a bool; a bool never counts as a number.
- Importing this module loads no torch: adapters of stacks without torch use these checks, too.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, ParamSpec

import numpy as np

from shmbus.base import limits
from shmbus.base.format import show_size
from shmbus_ext import _core

if TYPE_CHECKING:
    import torch

#: Bytes of the largest size: beyond every machine's memory, and the core's sums cannot overflow.
LARGEST_SIZE = 1 << 46
#: The default split: training.
TRAIN = _core.TRAIN
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[_letter] = 1024**_power


#: The script of every process of Ray, and bytes of a title that a label may need.
_RAY_SCRIPT = "default_worker.py"
_TITLE_BYTES = 256

# Types of a timeout, named here because every poll of a reader checks a timeout. NumPy's signed
# integers are listed by name, because NumPy treats a duration of every unit as an integer.
SECONDS = (
    int, float, np.floating, np.unsignedinteger,
    np.byte, np.short, np.intc, np.int_, np.longlong,
)  # fmt: skip
_LARGEST_INT = 2**63 - 1

P = ParamSpec("P")


def names_options(init: Callable[P, None]) -> Callable[P, None]:
    """Answer a constructor's wrong keyword with its options, the nearest first."""
    options = [name for name in init.__annotations__ if name != "return"]

    @functools.wraps(init)
    def __init__(*args: P.args, **given: P.kwargs) -> None:
        for name in given.keys() - options:
            from shmbus.base.near_names import unknown_option

            raise unknown_option(init.__qualname__.partition(".")[0], name, options)
        try:
            init(*args, **given)
        except BaseException:
            # The caller never gets the handle, and may keep the exception, which refers to the
            # handle.
            del args
            raise

    return __init__


def check_int(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return an int, from `least` to `most`."""
    if isinstance(value, (bool, np.bool_, type)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    try:
        number = operator.index(value)
    except TypeError as error:  # an array or a tensor of several numbers
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from error
    if least is not None and not least <= number <= (number if most is None else most):
        bounds = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {bounds}, got {number}")
    return number


def check_int64(name: str, value: object) -> int:
    """Return an int of 64 bits; a larger number would be cut."""
    return check_int(name, value, -(1 << 63), _LARGEST_INT)


def check_count(name: str, value: object, least: int = 1) -> int:
    """Return an int of `least` or more, within 64 bits."""
    return check_int(name, check_int(name, value, least), least, _LARGEST_INT)


def check_number(name: str, value: object, what: str = "a number") -> float:
    """Return a number within a float's range, or inf or nan; `what` names the expected value."""
    # float and int first: the test for Real asks a registry.
    if isinstance(value, bool) or not isinstance(value, (float, int, Real)):
        raise TypeError(f"{name}: expected {what}, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(
            f"{name}: expected {what} that a float can hold, got one beyond 1e308"
        ) from error


def _seconds(name: str, value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, SECONDS):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")
    return check_number(name, value, expected)


def check_seconds(name: str, value: object) -> float:
    """Return 0 or more seconds."""
    seconds = _seconds(name, value, "seconds")
    if not seconds >= 0:
        raise ValueError(f"{name}: expected 0 or more seconds, got {value}")
    return seconds


def check_period(name: str, value: object) -> float:
    """Return a positive number of seconds."""
    seconds = _seconds(name, value, "seconds")
    if not seconds > 0:
        raise ValueError(f"{name}: expected more than 0 seconds, got {value}")
    return seconds


def check_timeout(timeout: object, name: str = "timeout") -> float | None:
    """Return a timeout: None, or 0 or more seconds."""
    if timeout is None or (type(timeout) is float and timeout >= 0):  # every poll of a reader asks
        return timeout
    seconds = _seconds(name, timeout, "seconds or None")
    if not seconds >= 0:
        raise ValueError(
            f"{name}: expected 0 or more seconds, or None to wait for ever, got {timeout!r}"
        )
    return seconds


def check_flag(name: str, value: object) -> bool:
    """Return a bool; the text "no" would count as true."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")
    return bool(value)


def check_choice(name: str, value: object, choices: Sequence[str], hint: str = "") -> None:
    """Check a value against two or more words; the message ends with the hint."""
    # An array is not compared: the comparison would give an array.
    if isinstance(value, str) and value in choices:
        return
    *first, last = map(repr, choices)
    expected = f"{name}: expected {', '.join(first)} or {last}"
    hint = hint and f"; {hint}"
    if not isinstance(value, str):
        raise TypeError(f"{expected}, got {type(value).__name__}{hint}")
    raise ValueError(f"{expected}, got {value!r}{hint}")


def check_path(name: str, value: object) -> None:
    """Check a path: a str or an `os.PathLike`."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}: expected a path, got {type(value).__name__}")
    if not os.fspath(value):
        raise ValueError(f"{name}: expected a path, got {value!r}; '.' is the working directory")


def check_text(name: str, value: object) -> None:
    """Check the type of a text: str."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type(value).__name__}")


def is_text(name: str) -> bool:
    """Tell if UTF-8 can encode a name, like tables of tensors and headers of files."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def known_device(device: object) -> torch.device:
    """Return a device known to torch."""
    import torch

    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device: expected a torch.device or str, got {type(device).__name__}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device: expected a device of torch, such as 'cuda:0', got {device!r}"
        ) from error


def check_round(value: object) -> int | None:
    """Return the number of a round: None, or an int from 0 to 63 bits."""
    return None if value is None else check_int("round", value, 0, _LARGEST_INT)


def check_instance_id(value: object) -> str:
    """Return a prompt's key as its text on the bus; `put` makes the same check in C."""
    if not isinstance(value, str):
        value = _id_text(value)
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"instance_id: expected text that UTF-8 can encode, got {value!a}; drop its surrogates"
        ) from error
    if not 1 <= size <= _core.MAX_ID_BYTES:
        raise ValueError(
            f"instance_id: expected 1 to {_core.MAX_ID_BYTES} bytes of UTF-8, got {size}; name the "
            "prompt by a short key and put the rest into meta"
        )
    return value


def _id_text(value: object) -> str:
    """Return the decimal text of a numeric id; an array is refused, as by `put`."""
    try:
        if isinstance(value, np.ndarray):
            raise TypeError
        number = check_int("instance_id", value)
    except TypeError as error:
        raise TypeError(
            f"instance_id: expected a str or an int, got {type(value).__name__}"
        ) from error
    # For far longer numbers Python's own message would come first.
    if number.bit_length() > 4 * _core.MAX_ID_BYTES:
        raise ValueError(
            f"instance_id: expected 1 to {_core.MAX_ID_BYTES} digits, got an int of "
            f"{number.bit_length()} bits; name the prompt by a short key"
        )
    return str(number)


def check_split(value: object) -> str:
    """Return the label of a split."""
    _core.check_split(value)
    return str(value)


def clamp_request(name: str, value: object) -> int:
    """Return a count of 1 or more, at most `limits.MAX_REQUESTED`."""
    return min(check_int(name, value, 1), limits.MAX_REQUESTED)


def check_label(label: object) -> str:
    """Return a label, cut between characters to its room in the segment; None names the process."""
    if label is not None and not isinstance(label, str):
        raise TypeError(f"label: expected a str or None, got {type(label).__name__}")
    label = label or process_label()
    if "\0" in label:
        raise ValueError(f"label: expected text without NUL, got {label!r}")
    return fit_text("label", label, _core.LABEL_BYTES)


def fit_text(name: str, text: object, most: int) -> str:
    """Return a text, cut between characters to so many bytes of UTF-8, without NUL."""
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected a str, got {type(text).__name__}")
    return text.replace("\0", " ").encode("utf-8", "replace")[:most].decode("utf-8", "ignore")


def check_rank(rank: object, world_size: object) -> tuple[int, int]:
    """Return rank and world size as ints, with 0 <= rank < world size."""
    size = check_int("world_size", world_size, 1, limits.MAX_CLIENTS)
    return check_int("rank", rank, 0, size - 1), size


def check_backoff(name: str, value: object) -> tuple[float, float]:
    """Return how long to wait between attempts: seconds at first, and at most."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name}: expected two numbers of seconds, (first, at most), got {value!r}")
    first, most = (_seconds(name, each, "seconds") for each in value)
    if not 0 <= first <= most < math.inf:
        raise ValueError(
            f"{name}: expected 0 <= first <= at most, both finite, got {first:g} and {most:g}; "
            "(0.5, 30.0) is the default"
        )
    return first, most


def parse_size(size: int | str, what: str = "size") -> int:
    """Return the bytes of a size like 1048576, "256MiB" or "1GB"; errors call the size `what`."""
    given = size
    if isinstance(size, bool) or not (isinstance(size, str) or hasattr(size, "__index__")):
        raise TypeError(
            f"{what}: expected bytes as an int, or a str such as '256MiB', "
            f"got {type(size).__name__}"
        )
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{what}: expected a number with KiB, MiB, GiB or TiB, got {size!r}")
        number = float(match[1]) * unit
        size = int(number) if math.isfinite(number) else LARGEST_SIZE + 1
    else:
        size = check_int(what, size)
    if not _core.PAGE <= size <= LARGEST_SIZE:
        raise ValueError(
            f"{what}: expected {_core.PAGE} bytes to {show_size(LARGEST_SIZE)}, got {given!r}"
        )
    return size


def check_bytes(name: str, size: int | str) -> int:
    """Return a number of bytes: an int of every size, or a text like "2GiB"."""
    if isinstance(size, (str, bool)) or not hasattr(size, "__index__"):
        return parse_size(size, name)
    return check_int(name, size, 0, _LARGEST_INT)


def check_policy_version(version: object) -> int:
    """Return a policy version as an int, 0 to 2**63 - 1."""
    return check_int("policy_version", version, 0, _LARGEST_INT)


def process_label() -> str:
    """Return the name of this process for messages of other processes: script and host."""
    script = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    if script == _RAY_SCRIPT:
        script = _ray_name() or script
    return f"{script}@{os.uname().nodename}"


def _ray_name() -> str | None:
    """Return this process's Ray actor or task by its title: ``ray::name:Class.method``."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            title = file.read(_TITLE_BYTES).split(b"\0")[0].decode("utf-8", "replace")
    except OSError:
        return None
    if not title.startswith("ray::"):
        return None
    return title.removeprefix("ray::").partition(".")[0].strip() or None
