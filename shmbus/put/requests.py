"""Prompts to sample: taken from the request lane one sample at a time, and answered.

Invariants
----------
- A sample is in the hands of one producer at a time. It comes back when that one gives it back,
  closes, or dies; and it is answered once, whatever dies when (shmbus_ext/ring/requests.h).
- A retry request of a group that came by the lane is handed out here too, with its prompt.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from shmbus import limits
from shmbus._arguments import check_timeout, clamp_request
from shmbus._keys import make_key
from shmbus._loop_waits import LoopWaits
from shmbus._prompts import Prompt, Request, RequestText, check_request
from shmbus.put.asynchronous import AsynchronousPuts
from shmbus.put.retries import RetryPuts, WantedSample
from shmbus_ext import _core

if TYPE_CHECKING:
    from shmbus_ext._values import FieldValue, SupportsItem

__all__ = ["Request", "RequestPuts"]

#: What a worker waits for, in a report of a stall.
_WAITS_FOR = "a prompt to sample"


def _slice_s(timeout: float | None, waited_s: float) -> float:
    longest_s = limits.REQUEST_WAIT_S
    return longest_s if timeout is None else min(longest_s, timeout - waited_s)


class RequestPuts(AsynchronousPuts, RetryPuts):
    """`next_request`, `put_for`, `fail_for`: the workers' side of the request lane."""

    def _begin_requests(self) -> None:
        self._work = LoopWaits()
        self._next_recovery_s = 0.0
        #: Of the request that a sample was last taken of: number, text and prompt.
        self._last_request: tuple[int, RequestText | None, Prompt | None] = (0, None, None)

    def _successor(self) -> _core.Segment | None:
        segment = super()._successor()
        if segment is not None:
            self._last_request = (0, None, None)  # its numbers begin anew
        return segment

    @overload
    def next_request(self, timeout: None = None) -> Request: ...
    @overload
    def next_request(self, timeout: float) -> Request | None: ...
    def next_request(self, timeout: float | None = None) -> Request | None:
        """Take the next sample to make; waits for one, and costs no CPU meanwhile.

        Failed samples that are asked for again come first, then the highest priority, then what was
        offered first. While the bus is paused nothing is handed out. Where the bus bounds how far
        producers are ahead (`max_lead`), a group is begun here, and its samples never wait in
        `put_for` for that bound.

        What is taken is others' again when this producer closes or its process dies, or by
        `release`.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait: None waits for ever, 0 does not wait.

        Returns
        -------
        Request or None
            None where nothing came in time.

        Raises
        ------
        TypeError, ValueError
            `timeout` is no number of 0 or more.
        BusClosedError, BusRemovedError
            As for `put`.
        StallError
            Nothing moved on the bus for `stall_timeout` seconds, under ``on_stall="raise"``.
        """
        found = self.next_requests(1, timeout)
        return found[0] if found else None

    def next_requests(self, limit: int, timeout: float | None = None) -> list[Request]:
        """Take several samples to make by one call: what there is, once there is one.

        Parameters
        ----------
        limit : int
            The most to take, 1 or more.
        timeout : float, optional
            Seconds to wait for the first: None waits for ever, 0 does not wait.

        Returns
        -------
        list of Request
            As `next_request` would have given them one by one; empty where nothing came in time.

        Raises
        ------
        TypeError, ValueError
            `limit` is no int of 1 or more, or as for `next_request`.
        BusClosedError, BusRemovedError, StallError
            As for `next_request`.
        """
        check_timeout(timeout)
        limit = clamp_request("limit", limit)
        found = self._find_requests(limit)
        if found or timeout == 0:
            return found
        began = time.monotonic()
        while True:
            ticket = _core.request_want(self._here(), False)
            found = self._find_requests(limit)
            waited_s = time.monotonic() - began
            if found or (timeout is not None and waited_s >= timeout):
                return found
            left_s = _slice_s(timeout, waited_s)
            self._await_request(ticket, left_s)
            self._after_wait(None if timeout is None else timeout - waited_s)
            if self._watch.slice_s is not None:
                self._watch.check(self._segment, _WAITS_FOR, time.monotonic() - began)

    @overload
    async def anext_request(self, timeout: None = None) -> Request: ...
    @overload
    async def anext_request(self, timeout: float) -> Request | None: ...
    async def anext_request(self, timeout: float | None = None) -> Request | None:
        """Take the next sample to make, as `next_request`, without blocking the event loop.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait: None waits for ever, 0 does not wait.

        Returns
        -------
        Request or None
            None where nothing came in time.

        Raises
        ------
        TypeError, ValueError, BusClosedError, BusRemovedError, StallError
            As for `next_request`.
        asyncio.CancelledError
            The task was cancelled during the wait; nothing was taken.
        """
        found = await self.anext_requests(1, timeout)
        return found[0] if found else None

    async def anext_requests(self, limit: int, timeout: float | None = None) -> list[Request]:
        """Take several samples to make, as `next_requests`, without blocking the event loop.

        Parameters
        ----------
        limit, timeout
            As for `next_requests`.

        Returns
        -------
        list of Request
            As for `next_requests`.

        Raises
        ------
        TypeError, ValueError, BusClosedError, BusRemovedError, StallError
            As for `next_requests`.
        asyncio.CancelledError
            The task was cancelled during the wait; nothing was taken.
        """
        check_timeout(timeout)
        limit = clamp_request("limit", limit)
        began = time.monotonic()
        while True:
            ticket = _core.request_want(self._here(), False)
            found = self._find_requests(limit)
            waited_s = time.monotonic() - began
            if found or (timeout is not None and waited_s >= timeout):
                return found
            left_s = _slice_s(timeout, waited_s)
            await self._work.wait(functools.partial(self._await_request, ticket, left_s), left_s)
            self._after_wait(0)
            await self._check_stall(began, _WAITS_FOR)

    def _await_request(self, ticket: int, wait_s: float) -> None:
        _core.request_await(self._segment, False, ticket, wait_s)

    def _after_wait(self, left_s: float | None) -> None:
        """Once a while: give back what dead workers had, and notice that the bus was removed."""
        now = time.monotonic()
        if now < self._next_recovery_s:
            return
        self._next_recovery_s = now + limits.REQUEST_WAIT_S
        if self._segment.note_removal():
            self._go_on(left_s)
        self._recover_dead()

    def _find_requests(self, limit: int) -> list[Request]:
        segment = self._here()
        found: list[Request] = []
        if segment.paused() is not None:
            return found
        if _core.retry_noted(segment)[0] and _core.request_number(segment):
            while len(found) < limit and (request := self._find_retry(segment)) is not None:
                found.append(request)
        number, text, prompt = self._last_request
        for claim, new in self._take_requests(number, limit - len(found)):
            if new is not None or text is None or prompt is None:
                assert new is not None
                text, prompt = new, Prompt(new[8], new[7])
                # One prompt for all of its samples that this producer takes, decoded once.
                self._last_request = (claim[0], text, prompt)
            found.append(Request._of(text, prompt, claim[4], claim=claim))
        return found

    def _find_retry(self, segment: _core.Segment) -> Request | None:
        """Claim a failed sample whose prompt is in the lane; others are for `wanted`."""
        with self._taking:
            requests = sorted(_core.retry_requests(segment), key=lambda row: row[1])
            for each in requests:
                row, number, claimant, id_, epoch, split, size, need, index, attempt, reason, _ = (
                    each
                )
                text = None if claimant else _core.request_find(segment, id_, epoch, split)
                if text is None or not _core.retry_claim(segment, row, number, self.producer_id):
                    continue
                label = _core.split_label(segment, split)
                sample = WantedSample(
                    id_, epoch, index, size or None, attempt, reason, label, need or None
                )
                self._taken[make_key(id_, epoch, split), index] = sample
                return Request._of(
                    text, Prompt(text[8], text[7]), index, retry=(row, attempt, reason)
                )
        return None

    def _at(self, request: Request) -> tuple[Hashable, int]:
        """Return what `_taken` has a sample by."""
        split = _core.split_number(self._segment, request.split)
        return make_key(request.instance_id, request.epoch, split), request.index

    def is_wanted(self, request: Request) -> bool:
        """Whether the sample is still to be made: its group has neither ended nor been delivered.

        A read of shared memory: a long rollout may ask now and then, and stop.

        Parameters
        ----------
        request : Request
            What `next_request` gave.

        Returns
        -------
        bool
        """
        if (claim := check_request(request)._claim) is not None:
            return self._holds_request(claim)
        return self._at(request) in self._taken

    def release(self, request: Request) -> bool:
        """Give a sample back unmade: others may take it.

        Parameters
        ----------
        request : Request
            What `next_request` gave.

        Returns
        -------
        bool
            False where it was not this producer's any more.
        """
        if (claim := check_request(request)._claim) is not None:
            return self._give_back_request(claim)
        assert request._retry is not None
        with self._taking:
            self._taken.pop(self._at(request), None)
        return _core.retry_unclaim(self._segment, request._retry[0], self.producer_id)

    def put_for(
        self,
        request: Request,
        *,
        score: float | SupportsItem | None = 0.0,
        policy_version: int | tuple[int, int] = 0,
        meta: Any = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **arrays: FieldValue,
    ) -> bool:
        """Put the sample that a request asked for: id, epoch, index and sizes are the request's.

        The sample and the end of the request are one: whenever this process dies, the sample is in
        the ring and is asked of nobody, or it is not and is asked of others.

        Parameters
        ----------
        request : Request
            What `next_request` gave.
        score, policy_version, meta, rows, timeout
            As for `put`.
        **arrays
            As for `put`.

        Returns
        -------
        bool
            False where the sample is not wanted any more, as where its group has ended; then
            nothing was put.

        Raises
        ------
        TypeError, ValueError, RecordTooLargeError
            As for `put`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`; the request is still this producer's.
        """
        if not self.is_wanted(request):
            return False
        for name in ("instance_id", "group_size", "index", "epoch", "need", "split"):
            if name in arrays:
                raise TypeError(f"put_for: {name} is the request's; leave it out")
        given: dict[str, Any] = {
            **request._group(),
            "index": request.index,
            "score": score,
            "policy_version": policy_version,
            "meta": meta,
            "rows": rows,
            "timeout": timeout,
            **arrays,
        }
        if request._claim is None:
            self.put(request.instance_id, **given)
            self._forget(request)
        else:
            self._answer(request._claim, False, request.instance_id, **given)
        return True

    def fail_for(
        self,
        request: Request,
        reason: str,
        *,
        policy_version: int = 0,
        timeout: float | None = None,
    ) -> bool:
        """Report that the sample of a request failed, as `fail` does.

        With `sample_retries` it is asked for again, with its prompt; else its group is given up.

        Parameters
        ----------
        request : Request
            What `next_request` gave.
        reason : str
            What operators and the next worker are told.
        policy_version : int, default 0
            Version of the policy that was to sample it.
        timeout : float, optional
            Seconds to wait for space, as for `put`.

        Returns
        -------
        bool
            False where the sample is not wanted any more; then nothing was reported.

        Raises
        ------
        TypeError, ValueError
            The reason is no str, or as for `put`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`; the request is still this producer's.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason: expected a str, got {type(reason).__name__}")
        if not self.is_wanted(request):
            return False
        if request._claim is None:
            self.fail(
                request.instance_id,
                request.index,
                reason,
                **request._group(),
                policy_version=policy_version,
                timeout=timeout,
            )
            self._forget(request)
            return True
        self._answer(
            request._claim,
            True,
            request.instance_id,
            **request._group(),
            index=request.index,
            score=0.0,
            policy_version=policy_version,
            meta=reason[: limits.FAIL_REASON_CHARS].encode("utf-8", "replace").decode(),
            timeout=timeout,
        )
        return True

    def _forget(self, request: Request) -> None:
        with self._taking:
            self._taken.pop(self._at(request), None)

    async def aput_for(
        self,
        request: Request,
        *,
        score: float | SupportsItem | None = 0.0,
        policy_version: int | tuple[int, int] = 0,
        meta: Any = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **arrays: FieldValue,
    ) -> bool:
        """Put the sample that a request asked for, without blocking the event loop.

        Parameters
        ----------
        request : Request
            What `next_request` gave.
        score, policy_version, meta, rows, **arrays
            As for `put_for`. The arrays must not change before this returns.
        timeout : float, optional
            Seconds to wait for space: None waits for ever, 0 does not wait.

        Returns
        -------
        bool
            As for `put_for`.

        Raises
        ------
        TypeError, ValueError, RecordTooLargeError
            As for `put_for`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put_for`.
        asyncio.CancelledError
            The task was cancelled during the wait; nothing was put.
        """
        given: dict[str, Any] = {"score": score, "policy_version": policy_version, **arrays}
        put = functools.partial(self.put_for, request, meta=meta, rows=rows, timeout=0, **given)
        return await self._answer_later(put, timeout)

    async def afail_for(
        self,
        request: Request,
        reason: str,
        *,
        policy_version: int = 0,
        timeout: float | None = None,
    ) -> bool:
        """Report that the sample of a request failed, without blocking the event loop.

        Parameters
        ----------
        request, reason, policy_version
            As for `fail_for`.
        timeout : float, optional
            Seconds to wait for space: None waits for ever, 0 does not wait.

        Returns
        -------
        bool
            As for `fail_for`.

        Raises
        ------
        TypeError, ValueError
            As for `fail_for`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `fail_for`.
        asyncio.CancelledError
            The task was cancelled during the wait; nothing was reported.
        """
        fail = functools.partial(
            self.fail_for, request, reason, policy_version=policy_version, timeout=0
        )
        return await self._answer_later(fail, timeout)

    async def _answer_later(self, answer: Callable[[], bool], timeout: float | None) -> bool:
        check_timeout(timeout)
        done = False

        def attempt() -> None:
            nonlocal done
            done = answer()

        await self._retry(attempt, timeout)
        return done
