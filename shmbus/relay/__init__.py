"""Records from buses of many nodes to trainers' buses, and prompts and weights to those nodes.

Invariants:

- A record is in its source's ring until the source releases it; all that others know of it can be
  asked for again.
- What a sink has put and its source has not released is in the sink's journal, which outlives it.
- A source, the coordinator and a sink are pure state machines, without clock, socket or thread:
  messages come in, and messages go out. A party has one of them, a bus, and a mailbox.
- Messages may be late, lost or doubled. What a party awaits it asks for again.
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

    One small actor runs beside each bus, and one groups and places. They outlive the caller, and
    Ray starts them again when they die. They speak over TCP connections of their own, which are
    authenticated and not encrypted: nodes must let each other connect at any port. Needs the extra
    `ray`.

    Parameters
    ----------
    source : str or sequence of str
        The rollout workers' bus, on every node that has one of that name. "NAME@RESOURCE" means
        that of the nodes with this custom resource of Ray.
    trainers : sequence of str
        The trainers' buses, likewise.
    release : "acknowledged" | "put"
        When a source lets go of a record: once the trainer has acknowledged its group, so that the
        death of a trainer's node loses nothing; or once it is on the trainer's bus, which frees its
        space earlier.
    weights : bool
        Whether each version of the first trainer's weights goes to the rollout nodes too, into the
        pool of weights of each workers' bus: engines there subscribe to that bus.
    keep : str, optional
        A directory on the trainers' nodes, of this run alone. What is put on a trainer's bus, and
        what the trainer is done with, is written there; what it was not done with is put onto a bus
        of the same name that is made anew, as after a reboot. Only with `release="acknowledged"`.
    keep_sync : float
        Seconds after which what was written is on the disk; 0 before it is put.
    address : str, optional
        Of the Ray cluster; None for the one that this process is connected to, or the local one.
    **policy : object
        What happens to groups before they cross the network, by the names that a Consumer has:
        `group_timeout`, `on_timeout`, `max_policy_lag`, `skip_zero_variance`, `sample_retries`,
        `retry_timeout`, `retry_backoff`, `on_failure`. Where groups may go without samples, the
        trainer's Consumer takes them with `on_failure="partial"`.

    Returns
    -------
    Relay
        Shows it, and ends it.

    Raises
    ------
    ImportError
        Ray is not installed.
    BusNotFoundError
        No node has such a bus; the message has the names of those that were asked.
    BusBusyError
        This relay runs already, with other buses or options. With the same ones it is returned.
    DaemonUnavailableError
        Some actors have not begun; the message names each and what it lacks. They begin by
        themselves once the cause is mended.
    TypeError, ValueError
        A bad name or policy, or a bus that is named twice.
    """
    from shmbus.relay.on_ray import start as start_on_ray

    return start_on_ray(
        source, trainers, release=release, weights=weights, keep=keep, keep_sync=keep_sync,
        address=address, **policy
    )  # fmt: skip
