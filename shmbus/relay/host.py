"""The host of a party inside an actor: a thread fed with messages. Independent of Ray.

Invariant: a failed party ends its process, for the supervisor to restart; a party replaced by a
newer party reports the fact and rests; a party without a usable bus reports the reason, and waits.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from shmbus import errors
from shmbus.base.arguments import (
    check_backoff,
    check_choice,
    check_count,
    check_flag,
    check_int,
    check_path,
    check_period,
    check_seconds,
)
from shmbus.data.encoding import decodable
from shmbus.inspect.status import read_status
from shmbus.relay.coordinator_party import CoordinatorParty
from shmbus.relay.messages import Envelope, Message, pack
from shmbus.relay.mirror_party import MirrorParty
from shmbus.relay.party import Mailbox, Opener, Party, run_party
from shmbus.relay.sink_party import SinkParty
from shmbus.relay.source_party import SourceParty
from shmbus.relay.weights_party import WeightsParty
from shmbus.segment.names import check_name
from shmbus.stash.stash import StashPolicy

_log = logging.getLogger("shmbus.relay")

#: Exit status of a process after its party failed.
_FAILED = 70
#: Seconds to write a failure's text before the process ends.
_LAST_WORDS_S = 0.2


@decodable
class PartyPlan(msgspec.Struct, frozen=True):
    """A party's plan in names and numbers."""

    kind: str
    address: str
    #: Address of the coordinator; for a mirror, of the weights publisher.
    coordinator: str
    #: Its bus's name; empty for a coordinator.
    bus: str = ""
    release: str = "acknowledged"
    #: Addresses; of a coordinator.
    sources: list[str] = []
    sinks: list[str] = []
    policy: StashPolicy = StashPolicy()
    #: Addresses of the mirrors: for a coordinator and the weights publisher.
    mirrors: list[str] = []
    #: Sinks only: the keep directory, and seconds between two syncs.
    keep: str = ""
    keep_sync_s: float = 1.0
    #: Node of a sink, given if trainers' buses of several nodes share a name.
    node: str = ""

    def make(self, mailbox: Mailbox) -> Party:
        """Make the party."""
        if self.kind == "source":
            return SourceParty(self.bus, mailbox, self.coordinator)
        if self.kind == "sink":
            return SinkParty(
                self.bus, mailbox, self.coordinator, self.release, keep=self.keep,
                keep_sync_s=self.keep_sync_s, node=self.node,
            )  # fmt: skip
        if self.kind == "weights":
            return WeightsParty(self.bus, mailbox, self.mirrors)
        if self.kind == "mirror":
            return MirrorParty(self.bus, mailbox, self.coordinator)
        return CoordinatorParty(mailbox, self.sources, self.sinks, self.policy)


#: Carries messages to another address, or loses them; the payload belongs to the last message.
Carry: TypeAlias = Callable[[str, list[bytes], bytes | bytearray | memoryview], None]


class HostMailbox:
    """A mailbox with an external carrier, batching messages by peer."""

    def __init__(self, address: str, carry: Carry) -> None:
        self.address = address
        self._carry = carry
        self._waiting: dict[str, list[bytes]] = {}
        self._box: deque[tuple[bytes, bytes | memoryview]] = deque()
        self._changed = threading.Condition()
        self.opener = Opener(address)

    def put(self, packed: list[bytes], payload: bytes | memoryview) -> None:
        """Take received messages; the payload belongs to the last message."""
        with self._changed:
            self._box.extend((each, b"") for each in packed[:-1])
            self._box.append((packed[-1], payload))
            self._changed.notify()

    def send(
        self, to: str, message: Message, payload: bytes | bytearray | memoryview = b""
    ) -> None:
        """Send a message; lose it if no process owns the address now."""
        waiting = self._waiting.setdefault(to, [])
        waiting.append(pack(self.address, message))
        if len(payload):
            del self._waiting[to]
            self._carry(to, waiting, payload)

    def flush(self) -> None:
        """Send the waiting messages."""
        waiting, self._waiting = self._waiting, {}
        for to, packed in waiting.items():
            self._carry(to, packed, b"")

    def receive(self, timeout_s: float) -> list[Envelope]:
        """Return received messages; wait at most `timeout_s` seconds for the first."""
        with self._changed:
            if not self._box and timeout_s > 0:
                self._changed.wait(timeout_s)
            taken = [self._box.popleft() for _ in range(len(self._box))]
        return [found for each in taken for found in self.opener.open(*each)]


class Host:
    """Runs a party, and feeds it messages."""

    def __init__(self, plan: PartyPlan, carry: Carry) -> None:
        self.plan = plan
        self._mailbox = HostMailbox(self.plan.address, carry)
        self._party: Any = None
        self._superseded = ""
        #: The reason for a missing party.
        self._lacks = ""
        self._thread = threading.Thread(target=self._work, name="shmbus relay", daemon=True)

    def start(self) -> None:
        """Begin, once messages can be delivered."""
        self._thread.start()

    def _make(self) -> Party:
        try:
            found: Party = self.plan.make(self._mailbox)
        except (errors.ShmbusError, OSError) as error:
            self._lacks = str(error)
            raise
        self._party, self._lacks = found, ""
        return found

    def _work(self) -> None:
        try:
            run_party(self._make, self._mailbox, lambda: True)
        except errors.BusBusyError as error:
            self._superseded = str(error)
            _log.error("%s", error)
        except BaseException:
            traceback.print_exc()
            time.sleep(_LAST_WORDS_S)
            os._exit(_FAILED)

    def deliver(self, packed: list[bytes], payload: bytes | memoryview = b"") -> None:
        """Take messages for the party; the payload belongs to the last message."""
        self._mailbox.put(packed, payload)

    def _ledger(self) -> dict[str, Any] | None:
        """Return the ledger of the party's bus; None without a bus."""
        if self.plan.kind not in ("source", "sink"):
            return None
        try:
            status = read_status(self.plan.bus)
        except (errors.ShmbusError, OSError):
            return None
        counts, asked = status.ledger, status.requests
        found: dict[str, Any] = msgspec.to_builtins(counts)
        found |= {"asked": asked.open, "in_hand": asked.claimed} if asked else {}
        return {"asked": 0, "in_hand": 0, **found, "balanced": counts.balanced}

    def describe(self) -> dict[str, Any]:
        """Describe the party in plain values; "error" gives the reason for a resting party."""
        said: dict[str, Any] = {
            "address": self.plan.address, "kind": self.plan.kind, "bus": self.plan.bus,
            "pid": os.getpid(), "refused": self._mailbox.opener.refused,
            "superseded": self._superseded, "ledger": self._ledger(),
            "begun": self._party is not None and not self._lacks,
        }  # fmt: skip
        if self._lacks:
            said["error"] = self._lacks
        held = getattr(self._party, "held_prompt", None)
        if held is not None:
            age_s = (time.monotonic_ns() - held.offered_ns) / 1e9
            said["held_prompt"] = {**held._asdict(), "age_s": age_s}
        keep = getattr(self._party, "keep", None)
        if keep is not None:
            said["unwritten_ends"] = len(keep.owed)
            if keep.error:
                said["error"] = keep.error
        seen = {"coordinator": "relay", "weights": "weights"}.get(self.plan.kind)
        if seen is not None and self._party is not None:
            said[seen] = msgspec.to_builtins(self._party.note())
        if "weights" in said and self._lacks:
            # After the publisher's end, ages of the mirrors' words mislead.
            note: dict[str, Any] = said["weights"]
            mirrors = [{**each, "heard_s": None} for each in note["mirrors"]]
            note |= {"error": self._lacks, "mirrors": mirrors}
        return said

    def change_peers(self, address: str, joins: bool) -> bool:
        """Take on a source or a mirror, or forget a peer; False for an unknown peer."""
        peers = {name: getattr(self.plan, name) for name in ("sources", "sinks", "mirrors")}
        of = next((name for name, known in peers.items() if address in known), "")
        if joins:
            of, change = "mirrors" if self.plan.kind == "weights" else "sources", not of
            now = sorted({*peers[of], address})
        elif not of:
            return False
        else:
            change, now = True, [each for each in peers[of] if each != address]
        if change:
            # A new party begins with the plan.
            self.plan = msgspec.structs.replace(self.plan, **{of: now})
            if self._party is not None:
                (self._party.joined if joins else self._party.forgotten).append(address)
        return True


#: Seconds counted as for ever, and attempts likewise.
_LONGEST_S: Final = 1e9
_MOST_RETRIES: Final = 1 << 20


def make_policy(options: dict[str, Any]) -> StashPolicy:
    """Check the group policy, as a Consumer does."""
    known = {
        "group_timeout", "on_timeout", "max_policy_lag", "skip_zero_variance", "sample_retries",
        "retry_timeout", "retry_backoff", "on_failure",
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
                # JSON knows no infinity.
                given["retry_timeout_s"] = min(check_period(name, value), _LONGEST_S)
            case "retry_backoff":
                given["retry_backoff_s"] = check_backoff(name, value)
            case "max_policy_lag":
                given[name] = None if value is None else check_count(name, value, 0)
            case "sample_retries":
                given[name] = min(check_int(name, value, 0), _MOST_RETRIES)
            case "skip_zero_variance":
                given[name] = check_flag(name, value)
            case _:
                partial_or_drop = ("drop", "partial")
                choices = ("wait", *partial_or_drop) if name == "on_timeout" else partial_or_drop
                check_choice(name, value, choices)
                given[name] = value
    return StashPolicy(**given)


def check_keep(keep: Any, sync: float, release: str) -> tuple[str, float]:
    """Return the directory, "" without keeping, and the seconds between two syncs."""
    seconds = min(check_seconds("keep_sync", sync), _LONGEST_S)
    if keep is None:
        return "", seconds
    check_path("keep", keep)
    if release != "acknowledged":
        raise ValueError('keep: expected release="acknowledged", which reports ended groups')
    return os.path.abspath(keep), seconds


def check_specs(what: str, given: object) -> list[str]:
    """Return names of buses with their resources; TypeError or ValueError for an invalid spec."""
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
