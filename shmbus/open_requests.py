"""The requests that are open at a checkpoint, saved and offered again.

Invariant: a request is open until its group was acknowledged, dropped or given up. So the open ones
are exactly what was offered and not trained, and a state that has them loses no prompt and trains
none twice.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus.feeder import Feeder, check_offer
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.undelivered import OpenGroups
from shmbus_ext import _core

#: The form of a saved state.
_VERSION = 1
#: Instance id, round and split.
RequestKey: TypeAlias = "tuple[str, int | None, str]"


class OpenRequest(TypedDict):
    """A request that was offered, and whose group was not acknowledged; `prompt` is base64."""

    instance_id: str
    round: int | None
    split: str
    group_size: int
    need: int
    priority: int
    prompt: str


class _OptionalState(TypedDict, total=False):
    trained: list[Any]
    number: int | None
    bus: str


class RequestsState(_OptionalState):
    """What `Consumer.state_dict` returns: plain values, for any checkpoint.

    Whoever saves it may add `trained`: [instance id, round, split] of requests that are open only
    because their groups are not acknowledged yet. `number` is the last request's on the bus of the
    identity `bus`.
    """

    version: int
    open: list[OpenRequest]


class RestoredRequests(msgspec.Struct, frozen=True):
    """What `Consumer.load_state_dict` did.

    Attributes
    ----------
    offered : int
        Requests of the state that were offered again.
    kept : int
        Requests of the state that were open still.
    beyond : list of (str, int | None, str)
        Instance ids, rounds and splits of open requests that the state does not have: they were
        offered after it was saved, and whoever feeds should not offer them again.
    trained : list of (str, int | None, str)
        Those of the state's `trained` that are open still.
    number : int or None
        The last request that was offered when the state was saved, on its bus; None where the
        state does not say.
    ended : int
        Requests behind that one that have ended, on this bus: they were trained after the state was
        saved, and must be offered again. `OnlineDataHandler.request` and whoever else goes over the
        data again does; a `Feeder` in another process must be told.
    whole : list of (str, int | None, str)
        Groups with a round that are complete on this bus, and whose request neither it nor the
        state has, where it is another than the state's: a snapshot has what came of a request, and
        not the request. They are as those of `beyond`; one that is offered before it is taken is
        trained once, too.
    """

    offered: int
    kept: int
    beyond: list[tuple[str, int | None, str]]
    trained: list[tuple[str, int | None, str]]
    number: int | None = None
    ended: int = 0
    whole: list[tuple[str, int | None, str]] = []


def _key(request: OpenRequest) -> RequestKey:
    return request["instance_id"], request["round"], request["split"]


def open_requests(segment: _core.Segment) -> list[OpenRequest]:
    """Read the requests that have not ended, in the order of their offers."""
    found: list[OpenRequest] = []
    for row, number, *_ in sorted(_core.request_rows(segment), key=lambda row: row[1]):
        text = _core.request_text(segment, row, number)
        if text is not None:
            id_, round, split, group_size, need, priority, _, start, data = text
            found.append(
                {
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


class OpenKeys:
    """Keys of the open requests of a bus; an update reads the rows that have changed."""

    def __init__(self, segment: _core.Segment) -> None:
        self.segment = segment
        #: The open request of each row, as `request_numbers` returned them last.
        self._numbers: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._open: dict[int, tuple[int, RequestKey]] = {}
        self._counts: Counter[RequestKey] = Counter()
        self._totals: Counter[str] = Counter()

    def update(self) -> None:
        """Read what was offered and what has ended since the last update."""
        before = self._numbers
        self._numbers = np.frombuffer(_core.request_numbers(self.segment), np.uint64)
        before = before if len(before) else np.zeros_like(self._numbers)
        for row in np.flatnonzero(before != self._numbers).tolist():
            if row in self._open:
                self._count(self._open.pop(row)[1], -1)
            number = int(self._numbers[row])
            text = _core.request_text(self.segment, row, number) if number else None
            if text is not None:  # else the request has ended since
                self._open[row] = number, text[:3]
                self._count(text[:3], 1)

    def _count(self, key: RequestKey, change: int) -> None:
        self._totals[key[2]] += change
        self._counts[key] += change
        if not self._counts[key]:
            del self._counts[key]

    def keys(self) -> list[RequestKey]:
        """Return the keys, oldest request first."""
        return [key for _, key in sorted(self._open.values())]

    def count(self, split: str, without: Mapping[RequestKey, int]) -> int:
        """Count the requests of a split, less so many of each key."""
        held = (min(n, self._counts[key]) for key, n in without.items() if key[2] == split)
        return self._totals[split] - sum(held)


def requests_state(segment: _core.Segment) -> RequestsState:
    """Return what was offered and has not ended, for a checkpoint."""
    # Before what is open: what is offered in between is behind it, and not lost.
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
    """Offer again what a state has and the bus has not."""
    given: Any = state
    version = given.get("version") if isinstance(given, dict) else type(given).__name__
    if version != _VERSION:
        raise ValueError(
            f"requests state: expected what Consumer.state_dict returned, of version {_VERSION}, "
            f"got {version!r}; load the checkpoint that a handler or a Consumer has saved"
        )
    number = state.get("number")
    newest = _core.request_number(feeder._segment)
    there = Counter(_key(each) for each in open_requests(feeder._segment))
    trained = there & Counter((id_, round, split) for id_, round, split in state.get("trained", ()))
    there -= trained
    offered = kept = 0
    for saved in state["open"]:
        if there[_key(saved)] > 0:
            there[_key(saved)] -= 1
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
    known = {*there, *trained, *map(_key, state["open"])}
    complete = _complete_groups(feeder.name) if number is not None and not here else []
    return RestoredRequests(
        offered,
        kept,
        list(there.elements()),
        list(trained.elements()),
        number,
        max(0, newest - (number or 0) - there.total()) if here else 0,
        [key for key in complete if key not in known],
    )


def _complete_groups(name: str) -> list[tuple[str, int | None, str]]:
    """Return the groups with a round that are whole on the bus, delivered or not."""
    with SegmentFile(name) as file:
        file.require()
        return [key for key in OpenGroups(file, 0).whole if key[1] is not None]
