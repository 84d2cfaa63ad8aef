"""The options of `shmbus.Consumer` that `OnlineDataHandler` passes on, for type checkers.

Invariant: they are the keyword arguments of `shmbus.Consumer`, but for those that the handler has
itself (a test compares the names, and mypy the types).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import shmbus

__all__ = ["ConsumerOptions"]


class ConsumerOptions(TypedDict, total=False):
    """Keyword arguments of `shmbus.Consumer`, which documents them; each may be left out."""

    group_timeout: float | None
    on_timeout: Literal["wait", "drop", "partial"]
    max_policy_lag: int | None
    skip_zero_variance: bool
    duplicate: Literal["drop", "error"]
    max_stash_bytes: int | None
    on_overflow: Literal["wait", "drop", "partial"]
    sample_retries: int
    retry_timeout: float
    retry_backoff: tuple[float, float]
    on_failure: Literal["drop", "partial"]
    label: str | None
    daemon: bool | None
    split: str
    on_stall: Literal["log", "raise"] | Callable[[shmbus.StallReport], object] | None
    stall_timeout: float
    wait: float | None
    prompt_schema: Mapping[str, Any] | None
