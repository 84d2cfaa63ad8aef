"""Prompts offered by whoever collects, and the requests that are open at a checkpoint.

Invariant: a request is open until its group was acknowledged, dropped or given up. So the open ones
are exactly what was offered and not trained, and a state that has them loses no prompt and trains
none twice.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any, TypedDict

import msgspec

from shmbus import limits
from shmbus._arguments import TRAIN, check_timeout
from shmbus._schema import Schema, mapping_of, parse
from shmbus.feeder import Feeder, check_offer
from shmbus.inspect.open_groups import OpenGroups
from shmbus.inspect.segment_file import SegmentFile
from shmbus.take.attached import AttachedConsumer
from shmbus_ext import _core

__all__ = ["OpenRequest", "PromptRequests", "RequestsState", "RestoredRequests"]

#: The form of a saved state.
_VERSION = 1


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
    """What `requests_state` returns: plain values, for any checkpoint.

    Whoever saves it may add `trained`: [instance id, round, split] of requests that are open only
    because their groups are not acknowledged yet. `number` is the last request's on the bus of the
    identity `bus`.
    """

    version: int
    open: list[OpenRequest]


class RestoredRequests(msgspec.Struct, frozen=True):
    """What `load_requests_state` did.

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


class PromptRequests(AttachedConsumer):
    """`request`, and the state of what was requested."""

    def _begin_requests(self, prompt_schema: Schema | None) -> None:
        self._feeder: Feeder | None = None
        #: What open requests are of, by their numbers; a prompt is read once.
        self._request_keys: dict[int, tuple[str, int | None, str]] = {}
        #: In the form that pickles; whoever made the handle gets an error for a wrong one.
        self._prompt_schema = None if prompt_schema is None else mapping_of(parse(prompt_schema))

    def _feeding(self) -> Feeder:
        """Return the feeder of this consumer's process, which its first use opens."""
        self._require_source()
        with self._lock:
            if self._feeder is None or self._feeder.closed:
                on_stall, stall_timeout = self._watch.options
                self._feeder = Feeder(
                    self.name,
                    schema=self._prompt_schema,
                    on_stall=on_stall,
                    stall_timeout=stall_timeout,
                )
            return self._feeder

    def _end_feeding(self) -> None:
        feeder = self._feeder
        if feeder is not None:
            feeder.close()

    def request(
        self,
        instance_id: str | int,
        *,
        group_size: int,
        need: int | None = None,
        round: int | None = None,
        split: str = TRAIN,
        priority: int = 0,
        meta: Any = None,
        timeout: float | None = None,
        **prompt: Any,
    ) -> int:
        """Offer one group to the workers; a full lane makes this wait, as a full bus does `put`.

        While this waits nothing is taken: give a `timeout`, or offer fewer groups than the lane has
        room for, where the same thread takes what makes room. `Feeder` offers from any process.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key, as for `Producer.put`.
        group_size : int
            Samples to make, 1 to 16384.
        need : int, optional
            How many of them make the group complete; all by default.
        round : int, optional
            Which repetition of the prompt this is, 0 or more. Give it where prompts come again.
        split : str, default "train"
            What the group is for.
        priority : int, default 0
            0 to 7; workers take the highest first, and within it what was offered first.
        meta : object, optional
            Whatever msgspec can encode as MessagePack.
        timeout : float, optional
            Seconds to wait for room: None waits for ever, 0 does not wait.
        **prompt : array
            The prompt, as for `Feeder.request`; by `prompt_schema`, where the Consumer has one.

        Returns
        -------
        int
            The request's number: 1 for the first that was ever offered on the bus.

        Raises
        ------
        TypeError, ValueError, RecordTooLargeError
            As for `Feeder.request`.
        BusFullError
            There was no room within the timeout; the message says who serves the lane.
        BusClosedError, BusRemovedError, StallError
            As for `take`.
        """
        return self._feeding().request(
            instance_id,
            group_size=group_size,
            need=need,
            round=round,
            split=split,
            priority=priority,
            meta=meta,
            timeout=timeout,
            **prompt,
        )

    def open_requests(self) -> list[tuple[str, int | None, str]]:
        """Return which requests have not ended: those whose groups are open, or on their way.

        It reads the segment, and asks no daemon: one that has not heard of an acknowledgement yet
        has the request open still.

        Returns
        -------
        list of (str, int | None, str)
            Instance ids, rounds and splits, oldest request first.

        Raises
        ------
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        segment = self._feeding()._segment
        known = self._request_keys
        found: dict[int, tuple[str, int | None, str]] = {}
        for row, number, *_ in sorted(_core.request_rows(segment), key=lambda row: row[1]):
            key = known.get(number)
            if key is None:
                text = _core.request_text(segment, row, number)
                if text is None:
                    continue  # it has ended since
                key = text[:3]
            found[number] = key
        self._request_keys = found
        return list(found.values())

    def requests_state(self) -> RequestsState:
        """Return what was offered and not trained: every request whose group is not acknowledged.

        Save it with the weights, after the acknowledgement of what they were trained on.

        Returns
        -------
        RequestsState
            Plain values, oldest request first; it has the prompts, as large as they are.

        Raises
        ------
        BusClosedError
            The consumer is closed, or was made before a fork.
        DaemonUnavailableError
            The daemon does not answer: whether it knows of the last acknowledgements cannot be
            told. Nothing is lost; call this again once it is back.
        """
        segment = self._feeding()._segment
        if self.served:
            # It reads in order: with its answer it has ended the requests that were acknowledged.
            self._require_source().stats()
        # Before what is open: what is offered in between is behind it, and not lost.
        number = _core.request_number(segment)
        return {
            "version": _VERSION,
            "open": open_requests(segment),
            "number": number,
            "bus": segment.identity,
        }

    def load_requests_state(
        self, state: RequestsState, *, timeout: float | None = limits.RETRY_TIMEOUT_S
    ) -> RestoredRequests:
        """Offer again what a state has and the bus has not.

        On a bus that lives on, requests that are open still are not offered twice.

        Parameters
        ----------
        state : RequestsState
            What `requests_state` returned.
        timeout : float, optional
            Seconds to wait for room for each; None waits for ever.

        Returns
        -------
        RestoredRequests

        Raises
        ------
        ValueError
            It is no such state.
        BusFullError
            There was no room in time; call this again with the same state.
        BusClosedError, BusRemovedError, StallError
            As for `request`.
        """
        check_timeout(timeout)
        given: Any = state
        version = given.get("version") if isinstance(given, dict) else type(given).__name__
        if version != _VERSION:
            raise ValueError(
                f"requests state: expected what requests_state returned, of version {_VERSION}, "
                f"got {version!r}; load the checkpoint that a handler or a Consumer has saved"
            )
        feeder = self._feeding()
        number = state.get("number")
        newest = _core.request_number(feeder._segment)
        there = Counter(_key(each) for each in open_requests(feeder._segment))
        trained = there & Counter(
            (id_, round, split) for id_, round, split in state.get("trained", ())
        )
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
        complete = self._complete_groups() if number is not None and not here else []
        return RestoredRequests(
            offered,
            kept,
            list(there.elements()),
            list(trained.elements()),
            number,
            max(0, newest - (number or 0) - there.total()) if here else 0,
            [key for key in complete if key not in known],
        )

    def _complete_groups(self) -> list[tuple[str, int | None, str]]:
        """Return the groups with a round that are whole on the bus, delivered or not."""
        with SegmentFile(self.name) as file:
            file.require()
            return [key for key in OpenGroups(file, 0).whole if key[1] is not None]


def _key(request: OpenRequest) -> tuple[str, int | None, str]:
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
