"""Requests open at a checkpoint, saved and offered again.

Invariant: a request is open until its group was acknowledged, dropped or given up. So the open
requests are exactly those offered and not trained. A state of them loses no prompt and trains no
prompt twice.
"""

from __future__ import annotations

import base64
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias, TypedDict

import msgspec

from shmbus.handles.feeder import Feeder, check_offer
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.undelivered import OpenGroups
from shmbus_ext import _core

#: The form of a saved state.
_VERSION = 1
#: Instance id, round and split.
RequestKey: TypeAlias = "tuple[str, int | None, str]"


class OpenRequest(TypedDict):
    """A request offered with its group not acknowledged; `prompt` is base64."""

    number: int
    instance_id: str
    round: int | None
    split: str
    group_size: int
    need: int
    priority: int
    prompt: str


class _OptionalState(TypedDict, total=False):
    trained: list[Any]
    whole: list[Any]
    number: int | None
    bus: str


class RequestsState(_OptionalState):
    """The result of `Consumer.state_dict`: plain values, for every kind of checkpoint.

    The saving code may add `trained`: [instance id, round, split] of requests open only because of
    missing acknowledgements; and `whole`: of complete groups without a request. `number` counts the
    last request on the bus of the identity `bus`.
    """

    version: int
    open: list[OpenRequest]


class RestoredRequests(msgspec.Struct, frozen=True):
    """The result of `Consumer.load_state_dict`.

    Attributes
    ----------
    offered : int
        Requests of the state that were offered again.
    kept : int
        Requests of the state that were open still.
    beyond : list of (str, int | None, str)
        Instance ids, rounds and splits of open requests missing from the state: offered after the
        save. The feeding code should not offer them again.
    trained : list of (str, int | None, str)
        Requests of the state's `trained` that are open still.
    number : int or None
        The last request offered before the save, on its bus; None if missing from the state.
    ended : int
        Requests behind `number` that have ended, on this bus: trained after the save, to be offered
        again. `OnlineDataHandler.request` and code that replays the data offer them again; a
        `Feeder` in another process must be told.
    whole : list of (str, int | None, str)
        Groups with a round, complete on this bus, whose request is missing here and in the state: a
        snapshot contains a request's samples without the request. On the state's own bus, of the
        state's `whole` alone. Treat them like `beyond`; a group offered before its take is still
        trained once.
    """

    offered: int
    kept: int
    beyond: list[tuple[str, int | None, str]]
    trained: list[tuple[str, int | None, str]]
    number: int | None = None
    ended: int = 0
    whole: list[tuple[str, int | None, str]] = []


def request_key(request: OpenRequest) -> RequestKey:
    """Return instance id, round and split of a request."""
    return request["instance_id"], request["round"], request["split"]


def open_requests(segment: _core.Segment) -> list[OpenRequest]:
    """Read the open requests, in the order of their offers."""
    found: list[OpenRequest] = []
    for row, number, *_ in sorted(_core.request_rows(segment), key=lambda row: row[1]):
        text = _core.request_text(segment, row, number)
        if text is not None:
            id_, round, split, group_size, need, priority, _, start, data = text
            found.append(
                {
                    "number": number,
                    "instance_id": id_,
                    "round": round,
                    "split": split,
                    "group_size": group_size,
                    "need": need,
                    "priority": priority,
                    "prompt": base64.b64encode(data[start:]).decode(),
                }
            )
    return found


def whole_groups(name: str) -> list[RequestKey]:
    """Return the complete groups of a bus that have a round and are not acknowledged."""
    with SegmentFile(name) as file:
        file.require()
        return [key for key in OpenGroups(file, 0).whole if key[1] is not None]


class OpenKeys:
    """Keys of the open requests of a bus; an update reads only chunks of rows with a change."""

    def __init__(self, segment: _core.Segment) -> None:
        self.segment = segment
        #: Changes of every chunk of rows, and the open request of every row, at the last update.
        self._seen = b""
        self._numbers = array("Q", bytes(8 * _core.request_row_count(segment)))
        self._open: dict[int, tuple[int, RequestKey]] = {}
        self._counts: Counter[RequestKey] = Counter()
        self._totals: Counter[str] = Counter()

    def update(self) -> None:
        """Read offers and ends since the last update."""
        seen, changed = _core.request_changes(self.segment, self._seen, self._numbers)
        if changed:
            _core.uninterrupted(self._apply, changed)
        self._seen = seen

    def _apply(self, changed: list[tuple[int, int]]) -> None:
        for row, number in changed:
            if row in self._open:
                self._count(self._open.pop(row)[1], -1)
            text = _core.request_text(self.segment, row, number) if number else None
            if text is not None:  # else the request ended meanwhile
                self._open[row] = number, text[:3]
                self._count(text[:3], 1)
            self._numbers[row] = number

    def _count(self, key: RequestKey, change: int) -> None:
        self._totals[key[2]] += change
        self._counts[key] += change
        if not self._counts[key]:
            del self._counts[key]

    def keys(self) -> list[RequestKey]:
        """Return the keys, oldest request first."""
        return [key for _, key in sorted(self._open.values())]

    def count(self, split: str, without: Mapping[RequestKey, int]) -> int:
        """Count the requests of a split, less the given number of each key."""
        held = (min(n, self._counts[key]) for key, n in without.items() if key[2] == split)
        return self._totals[split] - sum(held)


def requests_state(segment: _core.Segment) -> RequestsState:
    """Return the open requests, for a checkpoint."""
    # Read before the open requests: requests offered in between get higher numbers, and stay safe.
    number = _core.request_number(segment)
    return {
        "version": _VERSION,
        "open": open_requests(segment),
        "number": number,
        "bus": segment.identity,
    }


def restore_requests(
    feeder: Feeder, state: RequestsState, timeout: float | None
) -> RestoredRequests:
    """Offer again the state's requests missing from the bus."""
    given: Any = state
    version = given.get("version") if isinstance(given, dict) else type(given).__name__
    if version != _VERSION:
        raise ValueError(
            f"requests state: expected what Consumer.state_dict returned, of version {_VERSION}, "
            f"got {version!r}; load the checkpoint that a handler or a Consumer has saved"
        )
    number = state.get("number")
    newest = _core.request_number(feeder._segment)
    there = Counter(map(request_key, open_requests(feeder._segment)))
    trained = there & Counter((id_, round, split) for id_, round, split in state.get("trained", ()))
    there -= trained
    offered = kept = 0
    for saved in state["open"]:
        if there[request_key(saved)] > 0:
            there[request_key(saved)] -= 1
            kept += 1
            continue
        offer = check_offer(
            feeder._segment,
            saved["instance_id"],
            saved["group_size"],
            saved["need"],
            saved["round"],
            saved["split"],
            saved["priority"],
            base64.b64decode(saved["prompt"]),
        )
        feeder._offer([offer], timeout)
        offered += 1
    here = number is not None and state.get("bus") == feeder._segment.identity
    known = {*there, *trained, *map(request_key, state["open"])}
    saved_whole = {(id_, round, split) for id_, round, split in state.get("whole", ())}
    whole: list[RequestKey] = []
    if saved_whole or (number is not None and not here):
        whole = [key for key in whole_groups(feeder.name) if not here or key in saved_whole]
    return RestoredRequests(
        offered,
        kept,
        list(there.elements()),
        list(trained.elements()),
        number,
        max(0, newest - (number or 0) - there.total()) if here else 0,
        [key for key in whole if key not in known],
    )
