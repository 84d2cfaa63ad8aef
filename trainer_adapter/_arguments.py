"""Checks of the arguments of `OnlineDataHandler` and `pack`, and of groups before packing.

Invariant: an error names the argument or the sample, the expected value, and the given one.
"""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final, Literal, TypedDict

import torch
from torch.utils.data import default_collate

import shmbus
from shmbus.base.arguments import (
    check_choice,
    check_count,
    check_int,
    check_text,
    check_timeout,
    known_device,
)
from shmbus.base.near_names import unknown_option
from shmbus.batch.gather import MAX_SCORE, MOST_THREADS, FieldNames
from trainer_adapter.advantages import check_kind

#: Most ready batches: more would only be staler, and hold more of the ring.
MAX_PREFETCH: Final = 8
#: Most threads for copying a batch, and their default.
USUAL_PACK_THREADS: Final = 4
#: Tokens of a batch without a given number of tokens or groups.
DEFAULT_TOKENS_PER_BATCH: Final = 65_536
#: Seconds from the first group of a token-budget batch until a partial batch.
DEFAULT_MAX_WAIT_S: Final = 1.0


def check_lengths(trajectories: list[shmbus.Trajectory], lengths: list[int], budget: int) -> None:
    """Raise ValueError for a sequence of more tokens than the budget of a batch."""
    for trajectory, length in zip(trajectories, lengths, strict=True):
        if length > budget:
            raise ValueError(
                f"trajectory {trajectory.instance_id!r}[{trajectory.index}] of producer "
                f"{trajectory.producer_id}: field 'tokens': expected at most {budget} tokens, as "
                f"tokens_per_batch says, got {length}; raise it, or let workers end earlier"
            )


def score_error(trajectories: list[shmbus.Trajectory]) -> ValueError:
    """Return the error for the first score unfit for advantages."""
    # By the negation, since a nan, found only in a forged record, compares with nothing. Reading a
    # missing score raises UnscoredError.
    t = next(t for t in trajectories if not abs(t.score) <= MAX_SCORE)
    return ValueError(
        f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: score: "
        f"expected at most {MAX_SCORE:g} by magnitude, got {t.score:g}; scale the reward"
    )


def check_device(device: object) -> torch.device:
    """Return a device known to torch and present; raise TypeError or ValueError for any other."""
    found = known_device(f"cuda:{device}" if isinstance(device, int) else device)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: expected one of the {torch.cuda.device_count()} CUDA devices that torch "
            f"{torch.__version__} sees, got {str(found)!r}; pass 'cpu', or install torch for CUDA"
        )
    return found


def check_fields(fields: object) -> None:
    """Raise TypeError unless fields is None or FieldNames of texts, with None for unused names."""
    if fields is None:
        return
    if not isinstance(fields, FieldNames):
        raise TypeError(f"fields: expected FieldNames, got {type(fields).__name__}")
    for name in fields.__struct_fields__:
        if name == "tokens" or getattr(fields, name) is not None:
            check_text(f"fields: {name}", getattr(fields, name))


def check_pack_threads(value: object) -> None:
    """Raise TypeError or ValueError for a number of threads outside 1 to `MOST_THREADS`."""
    check_int("pack_threads", value, 1, MOST_THREADS)


def checked_pack_threads(value: int | None, world_size: int) -> int:
    """Return `pack_threads`, or without it a fourth of a rank's share of processors, up to 4."""
    # Threads take processors from inference and environments, and memory bandwidth ends at a few.
    if value is None:
        share = len(os.sched_getaffinity(0)) // (4 * world_size)
        return max(1, min(share, USUAL_PACK_THREADS))
    check_pack_threads(value)
    return operator.index(value)


def check_packing(
    device: object, fields: object, advantages: object, prefetch: object
) -> torch.device:
    """Check a handler's packing arguments, and return the device; raise like each check."""
    check_int("prefetch", prefetch, 0, MAX_PREFETCH)
    check_fields(fields)
    found = check_device(device)
    check_kind("advantages", advantages)
    return found


def checked_budget(tokens_per_batch: int | None, groups_per_batch: int | None) -> int | None:
    """Return the tokens of a batch, None for a number of groups; raises as `check_count`."""
    if tokens_per_batch is not None and groups_per_batch is not None:
        raise ValueError(
            "expected one of tokens_per_batch and groups_per_batch, got both; drop one"
        )
    for name, value in (
        ("tokens_per_batch", tokens_per_batch),
        ("groups_per_batch", groups_per_batch),
    ):
        if value is not None:
            check_count(name, value)
    if groups_per_batch is None and tokens_per_batch is None:
        return DEFAULT_TOKENS_PER_BATCH
    return tokens_per_batch


def checked_max_wait(max_wait: float | str | None, tokens_per_batch: int | None) -> float | None:
    """Return `max_wait` with "auto" resolved: a batch of a number of groups waits until full."""
    if isinstance(max_wait, str) and max_wait == "auto":
        return None if tokens_per_batch is None else DEFAULT_MAX_WAIT_S
    return check_timeout(max_wait, "max_wait")


def check_choices(**given: object) -> None:
    """Raise TypeError or ValueError for an argument outside its values."""
    for name, value in given.items():
        check_choice(name, value, _CHOICES[name])


_CHOICES: Final = {
    "layout": ("packed", "padded", "prefix"),
    "malformed": ("raise", "drop"),
    "truncated": ("keep", "mask", "exclude", "drop"),
    "stale_samples": ("drop", "mask", "exclude"),
}


def check_consumer_options(options: Mapping[str, object], handler: type) -> None:
    """Raise TypeError for an option unknown to handler and Consumer, with the nearest name."""
    bus = inspect.signature(shmbus.Consumer).parameters.keys() - {"name", "rank", "world_size"}
    for name in options.keys() - bus:
        own = [
            p.name
            for p in inspect.signature(handler).parameters.values()
            if p.kind != p.VAR_KEYWORD
        ]
        others = f"{', '.join(own)}; or, for the bus, {', '.join(sorted(bus))}"
        raise unknown_option(handler.__name__, name, [*own, *sorted(bus)], others)


def check_for_ranks(world_size: int, truncated: str) -> None:
    """Raise ValueError for an option that would give several ranks different numbers of steps."""
    check_int("world_size", world_size, 1)
    if world_size != 1 and truncated == "drop":
        raise ValueError(
            "truncated: expected 'keep', 'mask' or 'exclude' with several ranks, got 'drop'; a "
            "rank whose groups are all dropped would have no step"
        )


def check_loader(caller: FrameType) -> None:
    """Raise TypeError if a collating torch DataLoader is about to iterate."""
    fetcher = caller.f_locals.get("self")
    if (
        getattr(fetcher, "auto_collation", False)
        and getattr(fetcher, "collate_fn", None) is default_collate
    ):
        raise TypeError(
            "OnlineDataHandler: expected a DataLoader with batch_size=None, since its items are "
            "batches, got a collating DataLoader; pass DataLoader(handler, batch_size=None)"
        )


class ConsumerOptions(TypedDict, total=False):
    """Optional keyword arguments of `shmbus.Consumer`, documented there."""

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
    stall_timeout: float | None
    wait: float | None
    prompt_schema: Mapping[str, Any] | None
