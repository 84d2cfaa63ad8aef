"""What a relay says of itself, for people and as JSON.

Invariant: plain values, so that any process of a cluster reads them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import msgspec

from shmbus._keys import split_key
from shmbus.relay.origin_head import OriginHead
from shmbus.relay.origins import bus_of
from shmbus.stash.stash import Stash

__all__ = ["PeerNote", "RelayNote", "WaitingNote", "waiting_notes"]

#: Groups that are told.
_MOST_WAITING: Final = 5


class PeerNote(msgspec.Struct, frozen=True):
    """What the coordinator knows of a source or a sink, for people.

    Attributes
    ----------
    address, name, bus : str
        Where it is, its bus's name, and that bus's identity.
    is_sink : bool
        Whether a trainer is there.
    heard_s : float
        Seconds since it last said something.
    clock_offset_s : float
        Its CLOCK_MONOTONIC minus the coordinator's, as the quickest of its last words said.
    held, moving, settled : int
        Records: in a source's ring; under way to a sink; on its bus, and at their source too.
    policy_version : int
        Of its bus.
    paused : str or None
        Why its bus is paused.
    oldest_s : float or None
        Of a source: seconds since the record was committed that it has held for longest.
    """

    address: str
    name: str
    bus: str
    is_sink: bool
    heard_s: float
    clock_offset_s: float
    held: int
    moving: int
    settled: int
    policy_version: int
    paused: str | None
    oldest_s: float | None


class WaitingNote(msgspec.Struct, frozen=True):
    """A group that waits for samples.

    Attributes
    ----------
    instance_id : str
        Its prompt.
    round : int or None
        The round of the prompt.
    size, here : int
        Its samples, and how many were announced.
    age_s : float
        Seconds since the first of them was committed, whatever its machine's clock says.
    at : list[str]
        Addresses of the sources that hold them.
    missing : list[int]
        Indexes that nobody has announced, the first ones.
    """

    instance_id: str
    round: int | None
    size: int
    here: int
    age_s: float
    at: list[str]
    missing: list[int]


class RelayNote(msgspec.Struct, frozen=True):
    """A relay at one instant, for people.

    Attributes
    ----------
    term : int
        Of this coordinator.
    peers : list[PeerNote]
        Sources and sinks that have said who they are.
    missing : list[str]
        Addresses of those that have not.
    announced : int
        Heads in incomplete groups.
    ready, assigned : int
        Records of complete groups that wait for a sink, and of those that were given to one.
    dropped : dict[str, int]
        Records that never crossed the network, by reason.
    lost : int
        Records that were announced by buses that have gone, and that nobody had fetched.
    refused : int
        Messages that were refused.
    why_refused : list[str]
        Why, the last few reasons: with both sides' names, and what to do.
    asked : int
        Samples that producers are asked for again.
    given_up : int
        Groups with a sample that failed for good.
    waiting : list[WaitingNote]
        The groups that wait longest for samples.
    """

    term: int
    peers: list[PeerNote]
    missing: list[str]
    announced: int
    ready: int
    assigned: int
    dropped: dict[str, int]
    lost: int
    refused: int
    why_refused: list[str]
    asked: int
    given_up: int
    waiting: list[WaitingNote]


def waiting_notes(
    stash: Stash[OriginHead], buses: Mapping[str, str], most_missing: int
) -> list[WaitingNote]:
    """Tell of the groups that wait longest, by when their first sample was committed.

    Parameters
    ----------
    stash : Stash
        Of announced heads.
    buses : mapping
        By the address of a source, its bus's identity.
    most_missing : int
        Indexes of a group that are told.

    Returns
    -------
    list of WaitingNote
        At most five.
    """
    now_ns = time.monotonic_ns()
    address_of = {bus: address for address, bus in buses.items()}
    found = []
    for group in stash.oldest(_MOST_WAITING):
        if not group.samples:
            continue  # nothing but reports of failures
        id_, round, _ = split_key(group.key)
        here = {sample.index for sample in group.samples}
        age_s = max(now_ns - sample.committed_ns for sample in group.samples) / 1e9
        on = {bus_of(sample.origin) for sample in group.samples}
        at = sorted(address_of.get(bus, bus) for bus in on)
        missing = [index for index in range(group.size) if index not in here]
        found.append(
            WaitingNote(id_, round, group.size, len(here), age_s, at, missing[:most_missing])
        )
    return found
