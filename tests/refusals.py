"""Tables of refused calls, and of wrong values by the kind of an argument."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shmbus import ShmbusError

#: Values of an argument, each with its refusing errors.
Wrong = tuple[tuple[Any, tuple[type[Exception], ...]], ...]
ARRAYS = (np.zeros(2), torch.zeros(2), np.array(["auto", "wait"]))


def of_type(*values: Any) -> Wrong:
    """Values of a wrong type."""
    return tuple((value, (TypeError,)) for value in values)


def of_value(*values: Any) -> Wrong:
    """Values of the right type, out of range."""
    return tuple((value, (ValueError,)) for value in values)


ARRAY: Wrong = tuple((array, (TypeError, ValueError)) for array in ARRAYS)
INT = of_type(1.5, "2", True, np.bool_(True), np.array([1, 2]), torch.ones(2), int)
COUNT = INT + of_value(0, -1)
SECONDS = of_type("1", 1j, True, *ARRAYS) + of_value(math.nan, -1, -0.001, 10**400)
FLAG = of_type("no", *ARRAYS)
TEXT = of_type(5, b"x", *ARRAYS)
CHOICE = of_value("no such") + ARRAY
#: Not a number, or beyond a float.
NUMBER = tuple(
    (value, (TypeError, ValueError))
    for value in (10**400, -(10**400), math.nan, "a", b"a", [], {}, object(), int, 1j, *ARRAYS)
)

#: Of the options that a Consumer and a relay share.
POLICIES: dict[str, Wrong] = {
    "group_timeout": SECONDS + of_value(0), "retry_timeout": SECONDS + of_value(0) + of_type(None),
    "on_timeout": CHOICE + of_type(None), "on_failure": CHOICE + of_value("wait"),
    "max_policy_lag": INT + of_value(-1), "skip_zero_variance": FLAG,
    "sample_retries": INT + of_value(-1) + of_type(None),
    "retry_backoff": of_type(0.5, (0.5, "30")) + of_value((-1, 30), (31, math.inf), (2, 1)),
}  # fmt: skip


def tells(message: str, value: Any) -> bool:
    """Check that a message has a value: the value itself, a part, the type, length or shape."""
    if isinstance(value, dict | list | tuple) and any(tells(message, each) for each in value):
        return True
    shown = {type(value).__name__, repr(value), f"{value}"}
    if isinstance(value, torch.Tensor):
        shown.add(f"{tuple(value.shape)}")
    if isinstance(value, str | bytes):
        shown.add(str(len(value.encode("utf-8", "replace") if isinstance(value, str) else value)))
    if isinstance(value, int) and abs(value) >= 10**309:
        shown |= {"beyond 1e308", "got inf"}
    return any(each in message for each in shown)


def let_through(call: Callable[..., Any], name: str, wrong: Wrong, said: str = "") -> list[str]:
    """Call with each wrong value; return the accepted, and those with a wrong error or name."""
    found = []
    for value, errors in wrong:
        try:
            call(**{name: value})
        except errors as error:
            named = (said or name) in str(error) and tells(str(error), value)
            if not named or isinstance(error, UnicodeError):
                found.append(f"{value!r:.60}: {error}")
        except Exception as error:
            found.append(f"{value!r:.60}: {error!r}")
        else:
            found.append(f"{value!r:.60}: accepted")
    return found


def refused(said: str, call: Callable[..., Any], *given: Any) -> BaseException:
    """Make a call that raises the error class and the pattern of text that `said` names."""
    kind, _, words = said.partition(": ")
    with pytest.raises((TypeError, ValueError, LookupError, RuntimeError, ShmbusError)) as caught:
        call(*given)
    found = caught.value
    assert type(found).__name__ == kind and re.search(words, str(found)), repr(found)
    return found
