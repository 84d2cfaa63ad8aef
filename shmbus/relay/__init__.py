"""Relay of records from many nodes' buses to trainers' buses, and of prompts and weights back.

Invariants:

- A record stays in its source's ring until the source releases it; the relay can ask for everything
  else again.
- A sink's journal names the records put on the sink's bus and not yet released by their source. The
  journal outlives the sink.
- A source, the coordinator and a sink are pure state machines without clock, socket or thread:
  messages in, messages out. A party combines a state machine, a bus and a mailbox.
- Messages may arrive late, twice or never. A party repeats its requests until an answer comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shmbus.relay.on_ray import Relay

__all__ = ["start"]


def start(
    source: str | Sequence[str],
    trainers: Sequence[str],
    *,
    release: Literal["acknowledged", "put"] = "acknowledged",
    weights: bool = False,
    keep: str | None = None,
    keep_sync: float = 1.0,
    address: str | None = None,
    **policy: Any,
) -> Relay:
    """Relay buses of a Ray cluster's nodes: the rollout workers' to the trainers'.

    One small actor runs beside each bus, and a coordinator actor groups and places. The actors
    outlive the caller, and Ray restarts dead actors. They use their own TCP connections,
    authenticated and not encrypted: nodes must let each other connect at any port. Needs the extra
    `ray`.

    Parameters
    ----------
    source : str or sequence of str
        Name of the rollout workers' bus, relayed from every node with a bus of this name.
        "NAME@RESOURCE" selects only nodes with this custom Ray resource.
    trainers : sequence of str
        The trainers' buses, in the same form.
    release : "acknowledged" | "put"
        When a source releases a record. "acknowledged": after the trainer acknowledged the group,
        so the death of a trainer's node loses nothing. "put": once the record lies on the trainer's
        bus, which frees source space earlier.
    weights : bool
        Send each version of the first trainer's weights to the rollout nodes, into the weight pool
        of each workers' bus. Engines there subscribe to their local bus.
    keep : str, optional
        Directory on the trainers' nodes, for this run alone. A log of the records put on a
        trainer's bus and of the trainer's acknowledgements. A bus recreated under the same name,
        for example after a reboot, gets the unacknowledged records again. Requires
        `release="acknowledged"`.
    keep_sync : float
        Seconds until written data reaches the disk; 0 syncs before each put.
    address : str, optional
        Address of the Ray cluster; None for the current connection, or the local cluster.
    **policy : object
        Group policy before the network, with a Consumer's names: `group_timeout`, `on_timeout`,
        `max_policy_lag`, `skip_zero_variance`, `sample_retries`, `retry_timeout`, `retry_backoff`,
        `on_failure`. If groups may go without samples, the trainer's Consumer needs
        `on_failure="partial"`.

    Returns
    -------
    Relay
        A handle to show and end the relay.

    Raises
    ------
    ImportError
        Ray is not installed.
    BusNotFoundError
        No node has such a bus; the message names the nodes asked.
    BusBusyError
        This relay already runs with different buses or options. The same ones return the running
        relay.
    DaemonUnavailableError
        Some actors have not begun; the message names each actor and its missing resource. They
        begin by themselves once the cause is mended.
    TypeError, ValueError
        A bad name or policy, or a bus named twice.
    """
    from shmbus.relay.on_ray import start as start_on_ray

    return start_on_ray(
        source, trainers, release=release, weights=weights, keep=keep, keep_sync=keep_sync,
        address=address, **policy
    )  # fmt: skip
