"""Prompts to sample: taken from the request lane sample by sample, and answered.

Invariants
----------
- A sample belongs to a single producer at a time, and returns if the producer gives the sample
  back, closes, or dies. A sample is answered once, through every death
  (shmbus_ext/ring/requests.h).
- `next` also hands out retry requests of the lane's groups, with their prompts.
- When this producer closes, its unanswered requests go to the remaining producers.
"""

from __future__ import annotations

import functools
import random
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, overload

from shmbus.base import limits
from shmbus.base.arguments import check_count, check_timeout, clamp_request, fit_text
from shmbus.base.backoff import Backoff
from shmbus.base.loop_waits import LoopWaits
from shmbus.batch.token_versions import version_span
from shmbus.data.keys import make_key
from shmbus.data.prompts import Prompt, Request, RequestText, Ticket, check_request
from shmbus.errors import BusClosedError
from shmbus.handles.partial_rollouts import PartialRollouts, check_continuation
from shmbus_ext import _core

if TYPE_CHECKING:
    from shmbus.handles.stall import Watch
    from shmbus.pool.server_rows import ServerRows
    from shmbus_ext._core import FieldValue, SupportsItem

#: A worker's wait, as named in a stall report.
_WAITS_FOR: Final = "a prompt to sample"


class _RetryRow(NamedTuple):
    """A row of the retry table, as returned by `_core.retry_requests`."""

    row: int
    number: int
    claimant: int
    instance_id: str
    round: int | None
    split: int
    size: int
    need: int
    sample_index: int
    attempt: int
    why: str
    due_ns: int

    @property
    def sample(self) -> tuple[Hashable, int]:
        return make_key(self.instance_id, self.round, self.split), self.sample_index


class RequestState:
    """A Producer's state for `ProducerRequests`, an object made anew at every use."""

    __slots__ = (
        "backoff", "failed", "given_back", "last_request", "lock", "next_recovery_s", "partials",
        "taken", "work",
    )  # fmt: skip

    def __init__(self) -> None:
        #: Backoff of a worker after a series of failures or releases.
        self.backoff = Backoff(limits.RETRY_BACKOFF_S, random.random())
        #: Failed samples, and samples released without a part, since the last success.
        self.failed = self.given_back = 0
        self.work = LoopWaits()
        self.next_recovery_s = 0.0
        #: Failed samples claimed by this producer, for its own puts and failure reports.
        self.taken: dict[tuple[Hashable, int], Request] = {}
        self.lock = _core.RecursiveLock()
        self.partials: PartialRollouts | None = None
        #: Number, text and prompt of the last taken request.
        self.last_request: tuple[int, RequestText | None, Prompt | None] = (0, None, None)

    def forget(self) -> None:
        """Forget the state of a bus replaced by its successor."""
        self.last_request = (0, None, None)
        self.taken.clear()
        self.succeeded()

    def succeeded(self) -> None:
        """Reset the backoff after a success."""
        self.failed = self.given_back = 0
        self.backoff.reset()


class _Worker(Protocol):
    _watch: Watch

    @property
    def _attach(self) -> str: ...
    @property
    def producer_id(self) -> int: ...
    @property
    def _slot(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def cache_salt(self) -> str: ...
    @property
    def _servers(self) -> ServerRows: ...
    @property
    def _segment(self) -> _core.Segment: ...
    def _here(self) -> _core.Segment: ...
    def _answer(self, *arguments: Any, **more: Any) -> bool: ...
    def _go_on(self, *arguments: Any) -> object: ...
    def _recover_dead(self) -> object: ...
    def _take_requests(self, *arguments: Any) -> list[Any]: ...
    def _holds_request(self, *arguments: Any) -> bool: ...
    def _give_back_request(self, *arguments: Any) -> bool: ...
    def _note_unmade(self, *arguments: Any) -> None: ...
    async def _retry(self, *arguments: Any) -> None: ...
    async def _check_stall(self, *arguments: Any) -> None: ...


class ProducerRequests:
    """`Producer.requests`: a worker's requested samples, and its answers.

    `next` takes a sample to make, `answer` puts the sample, `fail` reports a failure, and
    `release` gives the sample back unmade. Every method is thread-safe, like the Producer.

    Parameters
    ----------
    producer : Producer
        The worker's handle, owner of this object: ``producer.requests``.
    state : object
        State of the Producer between two calls.
    """

    __slots__ = ("_producer", "_state")

    def __init__(self, producer: _Worker, state: RequestState) -> None:
        self._producer = producer
        self._state = state

    @overload
    def next(self, timeout: None = None) -> Request: ...
    @overload
    def next(self, timeout: float) -> Request | None: ...
    def next(self, timeout: float | None = None) -> Request | None:
        """Take the next sample to make; blocks without CPU use.

        The order: first repeated requests for failed samples (last, for a worker whose own last
        sample failed), then the highest priority, then the oldest offer. A worker with only
        failures or releases gets no sample for up to 30 s. A paused bus hands out nothing, as does
        a bus whose inference servers all run unknown weights. If the bus bounds the producers' lead
        (`max_lead`), a group begins here, and its samples never wait in `answer` for the bound.

        When this producer closes, its process dies, or `release` is called, taken samples go to
        other producers.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait: None waits for ever, 0 does not wait.

        Returns
        -------
        Request or None
            None at the timeout.

        Raises
        ------
        TypeError, ValueError
            `timeout` is no number of 0 or more.
        BusClosedError, BusRemovedError
            As for `put`.
        StallError
            Nothing moved on the bus for `stall_timeout` seconds, under ``on_stall="raise"``.
        """
        found = self.next_many(1, timeout)
        return found[0] if found else None

    def next_many(self, limit: int, timeout: float | None = None) -> list[Request]:
        """Take several samples in a single call: wait for the first, then take all available.

        Parameters
        ----------
        limit : int
            Maximum number of samples, 1 or more.
        timeout : float, optional
            Seconds to wait for the first: None waits for ever, 0 does not wait.

        Returns
        -------
        list of Request
            In the order of `next`; empty at the timeout.

        Raises
        ------
        TypeError, ValueError
            `limit` is no int of 1 or more, or as for `next`.
        BusClosedError, BusRemovedError, StallError
            As for `next`.
        """
        check_timeout(timeout)
        limit = clamp_request("limit", limit)
        found = self._find_requests(limit)
        if found or timeout == 0:
            if not found:
                _core.request_want(self._producer._segment, False)  # a relay brings wanted samples
            return found
        began = time.monotonic()
        while True:
            ticket = _core.request_want(self._producer._here(), False)
            found = self._find_requests(limit)
            waited_s = time.monotonic() - began
            if found or (timeout is not None and waited_s >= timeout):
                return found
            left_s = self._slice_s(timeout, waited_s)
            self._await_request(ticket, left_s)
            self._after_wait(None if timeout is None else timeout - waited_s)
            if self._producer._watch.slice_s is not None:
                waited_s = time.monotonic() - began
                self._producer._watch.check(self._producer._segment, _WAITS_FOR, waited_s)

    @overload
    async def anext(self, timeout: None = None) -> Request: ...
    @overload
    async def anext(self, timeout: float) -> Request | None: ...
    async def anext(self, timeout: float | None = None) -> Request | None:
        """Take the next sample to make as `next` does, without blocking the event loop.

        A task cancelled during the wait (CancelledError) took nothing.
        """
        found = await self.anext_many(1, timeout)
        return found[0] if found else None

    async def anext_many(self, limit: int, timeout: float | None = None) -> list[Request]:
        """Take several samples to make as `next_many` does, without blocking the event loop.

        A task cancelled during the wait (CancelledError) took nothing.
        """
        check_timeout(timeout)
        limit = clamp_request("limit", limit)
        began = time.monotonic()
        while True:
            ticket = _core.request_want(self._producer._here(), False)
            found = self._find_requests(limit)
            waited_s = time.monotonic() - began
            if found or (timeout is not None and waited_s >= timeout):
                return found
            left_s = self._slice_s(timeout, waited_s)
            await self._state.work.wait(
                functools.partial(self._await_request, ticket, left_s), left_s
            )
            self._after_wait(0)
            await self._producer._check_stall(began, _WAITS_FOR)

    def _slice_s(self, timeout: float | None, waited_s: float) -> float:
        """Return the seconds of the next sleep in a wait of the given age."""
        slots = max(1.0, self._producer._slot / limits.REQUEST_EAGER_SLOTS)
        slice_s = min(limits.REQUEST_WAIT_S * slots, limits.REQUEST_REST_S)
        if timeout is not None:
            slice_s = min(slice_s, timeout - waited_s)
        if (rest_s := self._state.backoff.until_s - time.monotonic()) > 0:
            slice_s = min(slice_s, rest_s)
        if (watch_s := self._producer._watch.slice_s) is not None:
            slice_s = min(slice_s, watch_s)
        return slice_s

    def _await_request(self, ticket: int, wait_s: float) -> None:
        rests = self._state.backoff.until_s > time.monotonic()
        _core.request_await(self._producer._segment, False, ticket, wait_s, rests)

    def _after_wait(self, left_s: float | None) -> None:
        """Check now and then for a removed bus, and for dead workers if no other process does."""
        now = time.monotonic()
        if now < self._state.next_recovery_s:
            return
        self._state.next_recovery_s = now + limits.REQUEST_WAIT_S
        if self._producer._segment.note_removal():
            self._producer._go_on(left_s)
        self._producer._recover_dead()

    def _find_requests(self, limit: int) -> list[Request]:
        segment = self._producer._here()
        if segment.removed and self._producer._attach == "same":
            segment.require_name()
        if segment.removed or segment.paused() is not None:
            return []
        if self._producer._servers.all_unknown(segment.policy_version):
            return []
        rows = _retry_rows(segment) if _core.request_number(segment) else []
        for row in rows:
            if row.attempt == _core.RETRY_PAUSE:
                return self._probe(segment, row, rows)
        if time.monotonic() < self._state.backoff.until_s:
            return []
        if self._state.failed:
            # After a failure of its own, this worker leaves failed samples to other workers.
            found = self._take_new(limit)
            return found + self._take_failed(segment, rows, limit - len(found))
        found = self._take_failed(segment, rows, limit)
        return found + self._take_new(limit - len(found))

    def _probe(
        self, segment: _core.Segment, pause: _RetryRow, rows: list[_RetryRow]
    ) -> list[Request]:
        """Take a sample of the paused lane, at this worker's turn."""
        mine = self._producer.producer_id
        if not _core.retry_claim(segment, pause.row, pause.number, mine):
            return []
        found = self._take_new(1) or self._take_failed(segment, rows, 1)
        if not found:
            _core.retry_unclaim(segment, pause.row, pause.number, mine)
        return found

    def _salt(self) -> Callable[[], str]:
        """Return the salt function of a request, without a reference to the producer."""
        mine = weakref.ref(self._producer)

        def salt() -> str:
            producer = mine()
            if producer is None:
                raise BusClosedError("the producer of this request is gone; take it from another")
            return producer.cache_salt

        return salt

    def _take_new(self, limit: int) -> list[Request]:
        found: list[Request] = []
        number, text, prompt = self._state.last_request
        for claim, new in self._producer._take_requests(number, limit) if limit else ():
            if new is not None or text is None or prompt is None:
                assert new is not None
                text, prompt = new, Prompt(new[8], new[7])
                # Decode a prompt once for this producer's samples of the group.
                self._state.last_request = (claim[0], text, prompt)
            sample = Request._of(
                text, prompt, claim[4], self._salt(), claim=claim, partials=self._partials
            )
            found.append(sample)
        return found

    def _take_failed(
        self,
        segment: _core.Segment,
        rows: list[_RetryRow],
        limit: int,
        *,
        without_prompt: bool = False,
    ) -> list[Request]:
        """Claim failed samples; those outside of the lane, without a prompt, only on demand."""
        found: list[Request] = []
        mine = self._producer.producer_id
        with self._state.lock:
            kept = {each.sample for each in rows if each.claimant == mine + 1}
            for at in self._state.taken.keys() - kept:
                del self._state.taken[at]  # answered, or requested of another producer
            for each in rows:
                if len(found) == limit:
                    break
                if each.claimant or each.attempt == _core.RETRY_PAUSE:
                    continue
                text = _core.request_find(segment, each.instance_id, each.round, each.split)
                if text is None and not without_prompt:
                    continue
                if not _core.retry_claim(segment, each.row, each.number, mine):
                    continue
                prompt = Prompt(text[8], text[7]) if text is not None else Prompt(b"", 0)
                text = text or _text_of(segment, each)
                claim = each.number, mine, each.row, _core.REQUEST_IS_RETRY, each.sample_index
                sample = Request._of(
                    text, prompt, each.sample_index, self._salt(), claim,
                    retry=(each.attempt, each.why), partials=self._partials,
                )  # fmt: skip
                found.append(sample)
                self._state.taken[each.sample] = found[-1]
        return found

    def retries(self, limit: int | None = None) -> list[Request]:
        """Take failed samples of prompts this worker chooses itself; never waits.

        For workers that put samples without an offer: `next` hands out the lane's failed samples,
        with their prompts. A sample goes to a single worker at a time. When this producer closes
        without an answer, the sample goes to another worker. If the producer dies, or does not
        answer within the consumer's `retry_timeout`, the sample counts as failed once more. Without
        open retry requests the call reads a single word of shared memory.

        Parameters
        ----------
        limit : int, optional
            Maximum number; None for all. Workers that share the work take few at a time.

        Returns
        -------
        list of Request
            In the order of the retry requests, for `answer`, `fail` and `release`. Samples of the
            lane carry their prompt, other samples no fields. `group_size` is 0 if unknown; give the
            size to `answer`.

        Raises
        ------
        TypeError, ValueError
            `limit` is no int of 1 or more.
        BusClosedError
            The Producer is closed, or was made before a fork.
        """
        if limit is not None:
            limit = check_count("limit", limit, 1)
        segment = self._producer._here()
        rows = _retry_rows(segment)
        most = len(rows) if limit is None else limit
        return self._take_failed(segment, rows, most, without_prompt=True)

    def _return_failed(self) -> None:
        """Return failed samples claimed by this closing producer to the table."""
        if self._state.taken:
            mine = self._producer.producer_id
            for each in _retry_rows(self._producer._segment):
                if each.claimant == mine + 1:
                    _core.retry_unclaim(self._producer._segment, each.row, each.number, mine)

    def is_wanted(self, request: Request) -> bool:
        """Tell if the sample still belongs to this producer: not ended, not taken over.

        A read of shared memory: a long rollout may ask now and then, and stop.

        Parameters
        ----------
        request : Request
            A request from `next`.

        Returns
        -------
        bool
        """
        return self._producer._holds_request(check_request(request)._claim)

    def _ticket(self, request: Request) -> Ticket:
        """Return the identity of this worker's sample."""
        return Ticket(
            instance_id=request.instance_id,
            round=request.round,
            split=request.split,
            group_size=request.group_size,
            index=request.index,
            claim=check_request(request)._claim,
        )

    def _holds(self, ticket: Ticket) -> bool:
        """Tell if a foreign producer's sample remains wanted."""
        try:
            return self._producer._holds_request(ticket.claim)
        except IndexError:
            return False

    def release(
        self,
        request: Request,
        so_far: Mapping[str, FieldValue] | None = None,
        *,
        state: Any = None,
        max_releases: int = limits.PARTIAL_RELEASES,
        max_lag: int | None = None,
        reason: str = "",
    ) -> bool:
        """Give a sample back, for an external cause: other workers may take and continue it.

        A release uses up no retry of the sample. After a release without `so_far` this worker backs
        off, half a second at first and 30 s at most, until its next answer.

        Parameters
        ----------
        request : Request
            A request from `next`.
        so_far : mapping of str to array, optional
            The partial rollout: `tokens`, after the prompt's, and further arrays by token, such as
            `logprobs`, `loss_mask` and `token_versions`. The next worker finds the rollout in
            `Request.so_far`, and must begin its answer with these arrays: each token keeps its
            sampler's logprob and version.
        state : object, optional
            A value msgspec can encode, for `Request.state`.
        max_releases : int, default 16
            After this many releases with a partial rollout a sample starts anew.
        max_lag : int, optional
            A sample also starts anew if its oldest trained token, by `token_versions`, lags more
            than this many versions behind the policy at the next take.
        reason : str, default ""
            Shown by ``shmbus status`` beside this worker, such as "engine away"; 72 bytes of it.

        Returns
        -------
        bool
            False if the sample no longer belonged to this producer; then nothing is kept.

        Raises
        ------
        TypeError, ValueError
            `so_far` lacks tokens, holds arrays of other lengths, or does not continue the prompt
            and the request's partial rollout; the message names group, sample and field. Or the
            request did not come from the request lane.
        BusFullError
            The partial rollout does not fit; the request still belongs to this producer.
        """
        check_request(request)
        reason = checked_reason(reason)
        if so_far is not None and self.is_wanted(request):
            self._keep(request, so_far, state, max_releases, max_lag)
        given_back = self._producer._give_back_request(request._claim)
        if given_back and so_far is None:
            self._state.given_back += 1
            self._state.backoff.wait(time.monotonic())
            self._note_unmade(1, reason)
        return given_back

    def _note_unmade(self, released: int, reason: str) -> None:
        """Show observers the number of unmade samples of this worker, and the reason."""
        state = self._state
        rest_s = state.backoff.until_s - time.monotonic()
        text = fit_text("reason", reason, _core.UNMADE_REASON_BYTES)
        self._producer._note_unmade(released, state.given_back, state.failed, rest_s, text)

    def _keep(
        self,
        request: Request,
        so_far: Mapping[str, FieldValue],
        state: Any,
        max_releases: int,
        max_lag: int | None,
    ) -> None:
        most = check_count("max_releases", max_releases, 0)
        if max_lag is not None:
            check_count("max_lag", max_lag, 0)
        given: Any = so_far
        if not isinstance(given, Mapping) or "tokens" not in given:
            raise TypeError(
                f"release: group {request.instance_id!r}, sample {request.index}: so_far: expected "
                f"a mapping with tokens, got {type(given).__name__}"
            )
        if not request._offered_ns:
            raise ValueError(
                f"release: group {request.instance_id!r}, sample {request.index}: so_far: expected "
                "a request of the request lane, got a failed sample of another; release it without"
            )
        count = len(so_far["tokens"])  # type: ignore[arg-type]
        for name, values in so_far.items():
            if len(values) != count:  # type: ignore[arg-type]
                raise ValueError(
                    f"release: group {request.instance_id!r}, sample {request.index}: field "
                    f"{name!r}: expected {count} elements, one per token, got {len(values)}; "  # type: ignore[arg-type]
                    "pass values of the whole sample as state="
                )
        prompt = request._prompt.fields.get("prompt")
        if prompt is not None and prompt.ndim == 1 and prompt.dtype.kind in "iu":
            check_continuation(request, {"tokens": prompt}, so_far, "release")
        check_continuation(request, request.so_far or {}, so_far, "release")
        if request.releases + 1 > most:
            self._partials.forget(request)
        else:
            self._partials.keep(request, so_far, state, max_lag)

    @property
    def _partials(self) -> PartialRollouts:
        segment = self._producer._segment
        found = self._state.partials
        if found is None or found.segment is not segment:
            found = self._state.partials = PartialRollouts(self._producer.name, segment)
        return found

    def answer(
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
        """Put the requested sample: id, round, index and sizes are the request's.

        A single atomic step puts the sample and ends the request. Whenever this process dies,
        either the sample is in the ring and never requested again, or it goes to other producers.

        Parameters
        ----------
        request : Request
            A request from `next`.
        score, policy_version, meta, rows, timeout
            As for `put`. With an array `token_versions`, a policy version of 0 stands for the
            oldest and the newest of the trained tokens.
        **arrays
            As for `put`.

        Returns
        -------
        bool
            False for a sample no longer wanted, for example after its group's end; then nothing was
            put.

        Raises
        ------
        TypeError, ValueError, RecordTooLargeError
            As for `put`; or the arrays do not begin with a `Request.so_far` that was read.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`; the request still belongs to this producer.
        """
        if not self.is_wanted(request):
            return False
        continued = None if not isinstance(request._found, tuple) else request.so_far
        if continued is not None:
            check_continuation(request, continued, arrays if rows is None else rows[0], "answer")
        own = [arrays] if rows is None else rows
        if policy_version == 0 and own and all("token_versions" in fields for fields in own):
            policy_version = version_span(request, *own)
        for name in ("instance_id", "group_size", "index", "round", "need", "split"):
            if name in arrays and (name != "group_size" or request.group_size):
                raise TypeError(f"requests.answer: {name} is the request's; leave it out")
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
        if not self._producer._answer(request._claim, 0, request.instance_id, **given):
            return False
        if continued is not None:
            self._partials.forget(request)
        if self._state.failed or self._state.given_back:
            self._state.succeeded()
            self._note_unmade(0, "")
        return True

    def fail(
        self,
        request: Request,
        reason: str,
        *,
        policy_version: int = 0,
        timeout: float | None = None,
    ) -> bool:
        """Report the failure of a requested sample, as `Producer.fail` does.

        With `sample_retries` the sample is requested again, with its prompt, after its backoff;
        else its group ends. If the recent samples of every worker failed alike, the lane lets
        single samples through until a success, and meanwhile no failure uses up a retry.

        Parameters
        ----------
        request : Request
            A request from `next`.
        reason : str
            Message to operators and to the next worker.
        policy_version : int, default 0
            Version of the policy meant to sample it.
        timeout : float, optional
            Seconds to wait for space, as for `put`.

        Returns
        -------
        bool
            False for a sample no longer wanted; then nothing was reported.

        Raises
        ------
        TypeError, ValueError
            The reason is no str, or as for `put`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`; the request still belongs to this producer.
        """
        reason = checked_reason(reason)
        if not self.is_wanted(request):
            return False
        report: dict[str, Any] = {"policy_version": policy_version, "timeout": timeout}
        report |= request._group()
        report |= {"index": request.index, "score": float(request.attempt), "meta": reason}
        flags = _core.FLAG_FAILED
        if not request.group_size:
            report["group_size"] = request.index + 1
            flags |= _core.FLAG_NO_SIZE
        if not self._producer._answer(request._claim, flags, request.instance_id, **report):
            return False
        if isinstance(request._found, tuple):
            self._partials.forget(request)  # a possible cause of the failure
        self._state.failed += 1
        if self._state.failed >= limits.ALIKE_FAILURES:
            self._state.backoff.wait(time.monotonic())
        self._note_unmade(0, reason)
        return True

    async def aanswer(
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
        """Put the sample as `answer` does, without blocking the event loop.

        The arrays must not change before this returns. A task cancelled during the wait
        (CancelledError) put nothing.
        """
        given: dict[str, Any] = {"score": score, "policy_version": policy_version, **arrays}
        put = functools.partial(self.answer, request, meta=meta, rows=rows, timeout=0, **given)
        return await self._answer_later(put, timeout)

    async def afail(
        self,
        request: Request,
        reason: str,
        *,
        policy_version: int = 0,
        timeout: float | None = None,
    ) -> bool:
        """Report a failure as `fail` does, without blocking the event loop.

        A task cancelled during the wait (CancelledError) reported nothing.
        """
        fail = functools.partial(
            self.fail, request, reason, policy_version=policy_version, timeout=0
        )
        return await self._answer_later(fail, timeout)

    async def _answer_later(self, answer: Callable[[], bool], timeout: float | None) -> bool:
        check_timeout(timeout)
        done = False

        def attempt() -> None:
            nonlocal done
            done = answer()

        await self._producer._retry(attempt, timeout)
        return done


def checked_reason(reason: object) -> str:
    """Return a failure's reason for its report: text of a bounded length."""
    if not isinstance(reason, str):
        raise TypeError(f"reason: expected a str, got {type(reason).__name__}")
    return reason[: limits.FAIL_REASON_CHARS].encode("utf-8", "replace").decode()


def _retry_rows(segment: _core.Segment) -> list[_RetryRow]:
    """Return the retry requests in order; a single word of memory tells if the table is empty."""
    if not _core.retry_noted(segment)[0]:
        return []
    return sorted(
        (_RetryRow(*row) for row in _core.retry_requests(segment)), key=lambda each: each.number
    )


def _text_of(segment: _core.Segment, row: _RetryRow) -> RequestText:
    """Return a request text for a sample from outside the lane."""
    need = row.need or row.size
    split = _core.split_label(segment, row.split)
    return row.instance_id, row.round, split, row.size, need, 0, 0, 0, b""
