"""Options of a relay, checked as a Consumer checks its own. Knows no Ray.

Invariant: what is returned here is the same after its way as JSON, which an actor is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from shmbus._arguments import check_choice, check_count, check_flag, check_period
from shmbus.segment.names import check_name
from shmbus.stash.stash import StashPolicy

__all__ = ["check_specs", "make_policy"]

#: Seconds that count as for ever, and attempts likewise.
_LONGEST_S: Final = 1e9
_MOST_RETRIES: Final = 1 << 20


def make_policy(options: dict[str, Any]) -> StashPolicy:
    """Check what happens to groups, as a Consumer does."""
    known = {
        "group_timeout", "on_timeout", "max_policy_lag", "skip_zero_variance", "sample_retries",
        "retry_timeout", "on_failure",
    }  # fmt: skip
    unknown = options.keys() - known
    if unknown:
        raise TypeError(f"relay: expected options among {sorted(known)}, got {sorted(unknown)}")
    given: dict[str, Any] = {}
    for name, value in options.items():
        match name:
            case "group_timeout":
                seconds = None if value is None else check_period(name, value)
                given["group_timeout_s"] = None if seconds == math.inf else seconds
            case "retry_timeout":
                # JSON has no infinite number.
                given["retry_timeout_s"] = min(check_period(name, value), _LONGEST_S)
            case "max_policy_lag":
                given[name] = None if value is None else check_count(name, value, 0)
            case "sample_retries":
                given[name] = min(check_count(name, value, 0), _MOST_RETRIES)
            case "skip_zero_variance":
                given[name] = check_flag(name, value)
            case _:
                partial_or_drop = ("drop", "partial")
                choices = ("wait", *partial_or_drop) if name == "on_timeout" else partial_or_drop
                check_choice(name, value, choices)
                given[name] = value
    return StashPolicy(**given)


def check_specs(what: str, given: object) -> list[str]:
    """Return names of buses, each with its resource; TypeError or ValueError for what is none."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f"{what}: expected a list of bus names, got {type(given).__name__}")
    if not given:
        raise ValueError(f"{what}: expected the name of a bus, got none")
    for spec in given:
        if not isinstance(spec, str):
            raise TypeError(f"{what}: expected names of buses, got {type(spec).__name__}")
        bus, at, resource = spec.partition("@")
        check_name(bus)
        if at and not resource:
            raise ValueError(f"{what}: expected NAME or NAME@RESOURCE, got {spec!r}")
    return list(given)
