"""Calls that are refused: each room has one table of them, with the error that each is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from shmbus import ShmbusError


def refused(said: str, call: Callable[..., Any], *given: Any) -> BaseException:
    """Make a call that raises what `said` is: a kind of error, and a pattern of its text."""
    kind, _, words = said.partition(": ")
    with pytest.raises((TypeError, ValueError, LookupError, RuntimeError, ShmbusError)) as caught:
        call(*given)
    found = caught.value
    assert type(found).__name__ == kind and re.search(words, str(found)), repr(found)
    return found
