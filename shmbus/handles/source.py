"""A Consumer's source of groups: a Collector in its own process, or a daemon.

`attach` chooses between the two.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any, Literal, TypeAlias

import msgspec

from shmbus import errors
from shmbus.base import limits
from shmbus.base.arguments import TRAIN, process_label
from shmbus.base.closing import LiveObjects
from shmbus.base.format import show_wait
from shmbus.client.daemon_client import DaemonClient
from shmbus.control.socket_path import obstacle
from shmbus.control.wire import DaemonUnreachable, socket_exists
from shmbus.segment import lifecycle
from shmbus.segment.explain import DAEMON_LABEL
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

logger = logging.getLogger("shmbus.source")

#: Seconds a new Consumer waits for the absent daemon of a bus: a supervisor restarts a daemon in
#: less.
DAEMON_WAIT_S = 5.0


#: Leases complete groups of a bus to a single Consumer, and ends these leases: each once, by `end`
#: with a reason, or by `give_back`. The Consumer checks first that it holds the lease
#: (`is_leased`), so a source never ends a lease twice. `end` may hold back messages to other
#: processes until `flush`. A caller holds `lock` from its first check to `flush`. Taking differs: a
#: Collector takes groups in C, through an `intake`; a daemon's client uses `receive` and
#: `receive_step`, and then `hand_out`.
Source: TypeAlias = Collector | DaemonClient


class AttachOptions(msgspec.Struct, frozen=True):
    """How a Consumer attaches; checked already. A pickled Consumer attaches again with these."""

    #: The bus.
    name: str
    #: Policies for late, stale, useless and excess groups.
    policy: StashPolicy
    #: If a second sample of an index also raises.
    duplicate: Literal["drop", "error"]
    #: Name of the Consumer in messages; None for the program's name.
    label: str | None
    #: This trainer's rank, and the number of trainer processes.
    rank: int
    world_size: int
    #: True requires a daemon, False never uses a daemon, None uses a daemon if present.
    daemon: bool | None
    #: Seconds to wait for the bus, and for a required daemon; None for ever.
    wait_s: float | None = 0.0
    #: The split to take.
    split: str = TRAIN


def attach(options: AttachOptions, opened: list[Source]) -> Source:
    """Connect to the daemon if present, else become the bus's collector."""
    # Wait for a starting or restarting daemon, up to DAEMON_WAIT_S, or as long as for the bus.
    # Never wait for an impossible daemon: another user's socket, or a file.
    began = time.monotonic()
    lifecycle.wait_for_bus(options.name, options.wait_s)
    if options.daemon is False:
        return _collector(options, opened)
    wait_s = math.inf if options.wait_s is None else options.wait_s
    deadline = max(time.monotonic() + DAEMON_WAIT_S, began + wait_s)
    warned = False
    while True:
        try:
            return _daemon_client(options, opened)
        except DaemonUnreachable as error:
            unreachable = error
            opened.clear()
        what = obstacle(options.name)
        if what is not None and options.daemon:
            raise errors.DaemonUnavailableError(
                f"bus {options.name!r}: no daemon can answer: {what}; have it removed, or choose "
                f"another name for the bus{_daemon_hint(options)}"
            ) from unreachable
        if what is not None and not warned:
            warned = True
            logger.warning("bus %r: %s; this process reads the bus itself", options.name, what)
        if not socket_exists(options.name) and options.daemon is None:
            try:
                return _collector(options, opened)
            except errors.BusBusyError as error:
                # A daemon reads the bus a moment before listening.
                if f"({DAEMON_LABEL})" not in str(error) or time.monotonic() > deadline:
                    raise
        if time.monotonic() > deadline:
            raise errors.DaemonUnavailableError(
                f"bus {options.name!r}: no daemon answers after "
                f"{show_wait(time.monotonic() - began)} ({unreachable}); start it with `shmbus "
                f"serve {options.name}`{_daemon_hint(options)}"
            ) from unreachable
        time.sleep(limits.REDIAL_INTERVAL_S)


def _collector(options: AttachOptions, opened: list[Source]) -> Collector:
    def make() -> Collector:
        made = Collector(options.name, options.policy, options.duplicate, options.label)
        opened.append(made)
        made.read_inherited()
        _collectors.add(made)
        return made

    try:
        return _core.uninterrupted(make)
    except errors.BusBusyError as error:
        # A fork closes collectors.
        if any(
            each.segment.name == options.name for each in _collectors if not each.segment.closed
        ):
            raise errors.BusBusyError(
                f"{error}. The reader is a Consumer or OnlineDataHandler of this same process, "
                "for example of a notebook's cell that ran twice; close the earlier handle, or "
                "go on with it"
            ) from None
        raise


#: Those of this process: between containers, which number processes alike, a pid proves little.
_collectors: LiveObjects[Collector] = LiveObjects()


def _daemon_client(options: AttachOptions, opened: list[Source]) -> DaemonClient:
    made = DaemonClient(
        options.name,
        stash_options(options.policy, options.duplicate, only_set=True),
        options.label or process_label(),
        options.rank,
        options.world_size,
        options.split,
    )
    opened.append(made)
    made.attach()
    return made


def _daemon_hint(options: AttachOptions) -> str:
    if options.world_size > 1:
        return (
            f", which rank={options.rank}, world_size={options.world_size} need: without it a bus "
            "has one reader"
        )
    return "" if options.daemon else ", or read the bus in this process by daemon=False"


def stash_options(policy: StashPolicy, duplicate: str, *, only_set: bool = False) -> dict[str, Any]:
    """Return the stash's options by Consumer's names, or only those changed from the default."""
    # A daemon refuses a client whose options differ from its own.

    def named(policy: StashPolicy, duplicate: str) -> dict[str, Any]:
        return {
            "group_timeout": policy.group_timeout_s,
            "on_timeout": policy.on_timeout,
            "max_policy_lag": policy.max_policy_lag,
            "skip_zero_variance": policy.skip_zero_variance,
            "duplicate": duplicate,
            "max_stash_bytes": policy.max_stash_bytes,
            "on_overflow": policy.on_overflow,
            "sample_retries": policy.sample_retries,
            "retry_timeout": policy.retry_timeout_s,
            "retry_backoff": list(policy.retry_backoff_s),
            "on_failure": policy.on_failure,
        }

    options = named(policy, duplicate)
    defaults = named(StashPolicy(), "drop")
    return {k: v for k, v in options.items() if not only_set or v != defaults.get(k)}
