"""One call: from a client's words to an engine's tokens, into its session, and back.

Invariants:

- An answer is recorded before its client can finish reading, for the client's next call to find,
  and removed if never received. A partial answer is not recorded. A recorded answer is never
  requested from an engine again.
- An answer unfit for training ends its session: nothing of the sample is trained.
- A chunk goes out immediately; nothing waits for the next chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, TypeAlias, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from shmbus.http.server import connection_of
from shmbus.recorder import settings as limits
from shmbus.recorder.dialects import DIALECTS
from shmbus.recorder.dialects.base import Dialect, UnusableCall
from shmbus.recorder.engine_api import (
    CHAT,
    BadAnswer,
    Reading,
    decode_answer,
    decode_chunk,
    refuse_unsampled,
)
from shmbus.recorder.engines import Engine, EngineGone, Engines, headers_of
from shmbus.recorder.event_stream import DONE, EventParser, EventTooLarge
from shmbus.recorder.refusals import CallRefusal, bad_request
from shmbus.recorder.sampling import conflict_of
from shmbus.recorder.sessions import Answer, Session, Sessions
from shmbus.recorder.settings import Settings
from shmbus.recorder.stitch import Place, Stitcher
from shmbus.recorder.transcript import Turn
from shmbus.recorder.versions import EngineVersion, EngineVersions
from shmbus.segment.cache_salt import cache_salt

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Write: TypeAlias = Callable[[web.StreamResponse, bytes], Awaitable[None]]

_JSON: Final = {"Content-Type": "application/json"}
_EVENTS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}

#: How clients of OpenAI and of Anthropic count the attempts of a call.
_RETRIES: Final = "x-stainless-retry-count"

#: Statuses about the recorder's key or address of an engine, and not about a call.
_MISPLACED: Final = frozenset({*range(201, 400), 401, 403})

_encode = msgspec.json.Encoder().encode


def decoded(raw: bytes | bytearray) -> dict[str, Any]:
    """Decode a body and require a JSON object."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad_request("invalid_json", f"expected a body of JSON: {error}") from error
    if not isinstance(found, dict):
        got = type(found).__name__
        raise bad_request("invalid_json", f"expected an object as body, got {got}")
    return found


class Calls:
    """Answers the calls of sessions; `fail` ends one by a word and a sentence."""

    def __init__(
        self,
        settings: Settings,
        sessions: Sessions,
        engines: Engines,
        versions: EngineVersions,
        fail: Callable[[Session, str, str], object],
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._engines = engines
        self._versions = versions
        self._fail = fail
        #: Calls in flight.
        self.running = 0
        self.stitcher = Stitcher(engines, sessions)

    async def answer(
        self, request: web.BaseRequest, session: Session, path: str, raw: bytearray
    ) -> web.StreamResponse:
        """Answer a call, unless its session ends first."""
        call = _Call(self, request, session, path, raw)
        work = asyncio.ensure_future(call.run())
        try:
            session.begin(self._settings, work, work.cancel)
        except CallRefusal:
            work.cancel()
            raise
        self.running += 1
        try:
            return await work
        except asyncio.CancelledError:
            work.cancel()
            end = session.end
            if call.delivers or (end is None and not session.sealed):
                raise  # the client is gone
            return await call.cut_off()
        finally:
            self.running -= 1
            session.finish_call(work, time.monotonic())

    async def pass_on(
        self, request: web.BaseRequest, session: Session, asked: tuple[str, str],
        raw: bytearray | None,
    ) -> web.Response:  # fmt: skip
        """Forward a request without tokens, like the list of models, to the engine."""
        try:
            async with self._engines.ask(
                self._engines.pick(session), *asked, raw,
                {**headers_of(request.headers), **(_JSON if raw else {})},
            ) as answer:  # fmt: skip
                body = await _whole(answer)
                kind = answer.headers.get("Content-Type", "application/json")
                return web.Response(status=answer.status, body=body, headers={"Content-Type": kind})
        except (EngineGone, aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise _no_engine(error) from error


class _Call:
    def __init__(
        self, calls: Calls, request: web.BaseRequest, session: Session, path: str, raw: bytearray
    ) -> None:
        self._calls = calls
        self._request = request
        self._session = session
        self._path = path
        self._raw = raw
        self._dialect: Dialect
        self._reading: Reading
        self._engine: Engine
        self._begun: EngineVersion
        self._turns: list[Turn] = []
        #: Place behind the session's answers.
        self._place: Place | None = None
        #: Unconfirmed answers of earlier calls; True if the client marks this call as a retry.
        self._earlier = list(session.answers)
        self._is_retry = request.headers.get(_RETRIES, "0").strip() not in ("", "0")
        self._recorded = False
        self._answer: Answer | None = None
        #: True during the transfer of a whole answer.
        self.delivers = False
        #: The client's stream, after its head.
        self._stream: web.StreamResponse | None = None

    async def run(self) -> web.StreamResponse:
        """Ask an engine, and the next engine on a failure."""
        self._take_body()
        error: Exception | None = None
        # The request may be at fault: only a failed connection or probe marks an engine down.
        tried: list[Engine] = []
        tries = min(limits.MAX_TRIES, len(self._calls._engines.all) + 1)
        for number in range(tries):
            if number >= len(self._calls._engines.all):
                await asyncio.sleep(limits.RETRY_S)
            engine = await self._known_engine(tried)
            self._session.no_engine = False
            try:
                return await self._ask(engine)
            except EngineGone as gone:
                error = gone
                self._session.engine = None
                tried.append(engine)
        assert error is not None
        self._session.no_engine = True
        raise _no_engine(error)

    async def _known_engine(self, tried: list[Engine]) -> Engine:
        """Return an engine of known version; wait `VERSION_WAIT_S` for weights, then refuse."""
        calls = self._calls
        deadline_s = time.monotonic() + limits.VERSION_WAIT_S
        while True:
            engine = calls._engines.pick(self._session, calls._versions.is_known, tried)
            self._begun = calls._versions.of(engine.url)
            if self._begun.span is not None:
                return engine
            if time.monotonic() >= deadline_s:
                self._session.no_engine = True
                raise CallRefusal(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "asleep" if self._begun.by == "asleep" else "version_unknown",
                    f"engine {engine.url}: its weights version is unknown: {self._begun.why}; "
                    "bring weights by EngineFleet.catch_up() or update(), under the address of "
                    "--engine, or start the recorder with --assume-trainer-version; ask again",
                    retry_after_s=limits.VERSION_RETRY_S,
                )
            await asyncio.sleep(limits.RETRY_S)

    def _take_body(self) -> None:
        body = decoded(self._raw)
        try:
            self._dialect = DIALECTS[self._path](body, self._session.history)
        except UnusableCall as error:
            raise bad_request("invalid_call", f"{self._path}: {error}") from error
        call, settings = self._dialect.call, self._calls._settings
        why = refuse_unsampled(call)
        if why is not None:
            raise bad_request("not_sampled", why)
        why = conflict_of(call, settings.require_sampling)
        if why is not None:
            raise bad_request("sampling", f"{why}; the recorder requires one policy of all calls")
        call.update(settings.require_sampling | settings.force_sampling)

    async def _ask(self, engine: Engine) -> web.StreamResponse:
        """Ask one engine; EngineGone if nothing of an answer went out."""
        calls, dialect = self._calls, self._dialect
        self._engine, self._place = engine, None
        if calls._settings.stitch and dialect.endpoint == CHAT:
            self._place = await calls.stitcher.place(self._session, engine, dialect.call)
        answer = await self._ask_once(engine)
        if answer is None:
            assert self._place is not None
            calls.stitcher.counts["refused"] += 1
            self._place = Place(self._place.messages)
            answer = await self._ask_once(engine)
            assert answer is not None
        return answer

    async def _ask_once(self, engine: Engine) -> web.StreamResponse | None:
        """Return the engine's answer; None for a stitched prompt refused by the engine."""
        calls, dialect, place = self._calls, self._dialect, self._place
        ids = None if place is None else place.ids
        assert self._begun.span is not None
        self._reading = Reading(
            dialect.call,
            dialect.endpoint,
            engine.kind,
            cache_salt=cache_salt(calls._settings.bus, self._begun.span.newest),
            experts=calls._settings.experts,
            trains_grammar=calls._settings.train_grammar,
            prompt=None if ids is None else ids.tolist(),
            at_once=place is not None and place.at_once,
        )
        headers = {**headers_of(self._request.headers), **_JSON, "Accept-Encoding": "identity"}
        body = _encode(self._reading.body)
        async with calls._engines.ask(engine, "POST", dialect.endpoint, body, headers) as answer:
            if answer.status != HTTPStatus.OK:
                if answer.status in _MISPLACED:
                    why = "compare --engine with its address, SHMBUS_ENGINE_KEY with its key"
                    raise EngineGone(f"{engine.url}: {answer.status}: {why}")
                if ids is not None:
                    return None
                # The client learns the engine's refusal unchanged.
                said = await _whole(answer)
                return web.Response(status=answer.status, body=said, headers=_JSON)
            if answer.content_type == "text/event-stream":
                return await self._pass_stream(engine, answer)
            return await self._pass_whole(engine, answer)

    # -- an answer at once ----------------------------------------------------------------------

    async def _pass_whole(
        self, engine: Engine, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        try:
            raw = await _whole(answer)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise EngineGone(f"{engine.url}: {type(error).__name__}: {error}") from error
        try:
            if len(raw) < limits.LARGE_ANSWER:
                read = self._read(raw)
            else:
                read = await asyncio.to_thread(self._read, raw)
            self._take_turns(engine)
            self._reading.check_usage()
            whole = b"" if self._dialect.streams else _encode(_turned(self._dialect.answer, read))
        except BadAnswer as error:
            if error.engine_gone:
                raise EngineGone(f"{engine.url}: {error}") from error
            raise self._unusable(error) from error
        if self._dialect.streams:
            return await self._as_stream(read)
        response = web.Response(body=whole, headers=_JSON)
        self._record()
        self.delivers = True
        task = asyncio.current_task()
        assert task is not None
        self._session.deliver(task)
        connection = connection_of(self._request)
        return await connection.deliver(self._request, response, self._settler(), limits.DELIVER_S)

    def _read(self, raw: bytearray) -> dict[str, Any]:
        self._reading.streams = False  # also in place of a requested stream
        read = self._reading.read(decode_answer(raw))
        assert read is not None
        return read

    async def _as_stream(self, read: dict[str, Any]) -> web.StreamResponse:
        """Send a whole answer as a stream of one chunk, for a client's stream request."""
        try:
            chunk = _turned(self._dialect.chunk, as_chunk(read), self._reading.prompt_tokens)
        except BadAnswer as error:
            raise self._unusable(error) from error
        await self._begin_stream()
        self._record()
        await self._send(chunk)
        return await self._end_stream()

    # -- a stream -------------------------------------------------------------------------------

    async def _begin_stream(self) -> web.StreamResponse:
        """Send the head of the client's stream, once."""
        if self._stream is None:
            self._stream = web.StreamResponse(headers=_EVENTS)
            await connection_of(self._request).prepare(self._request, self._stream)
        return self._stream

    async def _send(
        self, events: bytes, write: _Write = web.StreamResponse.write
    ) -> web.StreamResponse:
        """Send events to the client; ConnectionResetError, blaming the client, if gone."""
        try:
            stream = await self._begin_stream()
            await write(stream, events)
        except aiohttp.ClientError as error:
            # The library's writer raises errors caused by its client.
            raise ConnectionResetError(str(error)) from error
        if self._answer is not None:
            self._answer.is_sent = True
        return stream

    async def _end_stream(self, events: bytes | None = None) -> web.StreamResponse:
        """Send the last events: by default the end of a whole answer."""
        # In one piece: a client closes behind the last event, and an end still on its way would
        # make this a reset.
        last = self._dialect.done() if events is None else events
        return await self._send(last, connection_of(self._request).finish)

    async def _pass_stream(
        self, engine: Engine, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        parser = EventParser()
        done = False
        try:
            while data := await answer.content.read(limits.STREAM_PIECE):
                if len(data) == limits.STREAM_PIECE:
                    # An engine ahead of this process: let the remaining sessions run.
                    await asyncio.sleep(0)
                out, broken = b"", None
                for found in parser.feed(data):
                    if found == DONE:
                        done = True
                        break
                    try:
                        out += self._take_chunk(found)
                    except BadAnswer as error:
                        broken = error
                        break
                if not self._recorded and self._reading.complete:
                    # The client may stop reading here.
                    self._take_turns(engine)
                    await self._begin_stream()
                    self._record()
                if out and (broken is None or self._stream is not None):
                    await self._send(out)
                if broken is not None:
                    raise broken
                if done:
                    break
            if not done:
                raise BadAnswer("the engine's stream ended before its end", engine_gone=True)
            if not self._recorded:
                self._take_turns(engine)
                await self._begin_stream()
                self._record()
            self._reading.check_usage()
        except (aiohttp.ClientError, asyncio.TimeoutError, EventTooLarge, BadAnswer) as error:
            return await self._break_off(engine, error)
        stream = await self._end_stream()
        await _drain(answer)
        return stream

    def _take_chunk(self, raw: bytes) -> bytes:
        read = self._reading.read(decode_chunk(raw))
        if read is None:
            return b""
        return _turned(self._dialect.chunk, read, self._reading.prompt_tokens)

    async def _break_off(self, engine: Engine, error: Exception) -> web.StreamResponse:
        """End a stream without a valid end from the engine."""
        gone = not isinstance(error, BadAnswer) or error.engine_gone
        said = f"{engine.url}: {str(error) or type(error).__name__}"
        if gone:
            engine.failures += 1
        if self._recorded and gone:
            # Every token came, so the answer stays recorded.
            logger.info("%s: after a whole answer: %s", self._session.place, said)
            return await self._end_stream()
        if self._stream is None and gone:
            raise EngineGone(said) from error
        code = "engine" if gone else "bad_answer"
        self._calls._fail(self._session, code, said)
        if self._stream is None:
            raise _bad_gateway(code, said) from error
        return await self.cut_off()

    # -- both -----------------------------------------------------------------------------------

    def _take_turns(self, engine: Engine) -> None:
        span = self._calls._versions.met(engine.url, self._begun, self._reading.version)
        self._turns = self._reading.turns(span)
        self._session.assumed |= self._calls._versions.is_assumed(engine.url, self._begun)

    def _record(self) -> None:
        self._recorded = True
        lost = [each for each in self._earlier if each.is_cut or self._is_retry]
        self._answer, went_on = self._calls._sessions.record(
            self._session, self._turns, self._dialect.response_id, lost
        )
        self._calls.stitcher.answered(
            self._answer, self._engine, self._dialect.call, self._place, self._turns,
            self._reading.said,
        )  # fmt: skip
        self._turns = []
        if self._stream is not None:
            connection_of(self._request).follow(self._settler())
        if not went_on:
            logger.info(
                "%s: the conversation went on, and its tokens did not: a new row begins; the "
                "chat template renders earlier turns differently, or their text has other tokens",
                self._session.place,
            )

    def _settler(self) -> Callable[[bool], None]:
        """Return a function that settles the answer, and keeps nothing else of the call."""
        if self._answer is None:
            return lambda delivered: None
        return functools.partial(self._calls._sessions.settle, self._answer)

    def _unusable(self, error: BadAnswer) -> CallRefusal:
        """End the session for an answer unfit for training."""
        self._calls._fail(self._session, "bad_answer", str(error))
        return _bad_gateway("bad_answer", str(error))

    async def cut_off(self) -> web.StreamResponse:
        """End an answer of an ended session: with an error of the stream, or a status."""
        end = self._session.end
        code, reason = ("scored", "it has its score") if end is None else end
        message = f"the session of {self._session.place} has ended: {reason}"
        if self._stream is None:
            self._session.require_open()
            raise CallRefusal(HTTPStatus.NOT_FOUND, code, message)
        return await self._end_stream(self._dialect.failed(message, code))


def as_chunk(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a whole answer in the form of a chunk."""
    chunk = {**answer, "choices": []}
    if answer.get("object") == "chat.completion":
        chunk["object"] = "chat.completion.chunk"
    for choice in answer["choices"]:
        turned = dict(choice)
        if "message" in turned:
            turned["delta"] = dict(turned.pop("message"))
            for place, call in enumerate(turned["delta"].get("tool_calls") or ()):
                call.setdefault("index", place)
        chunk["choices"].append(turned)
    return chunk


def _turned(turn: Callable[..., _T], *answer: Any) -> _T:
    """Translate an engine's answer for the client; BadAnswer for a malformed field."""
    try:
        return turn(*answer)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise BadAnswer(
            f"the engine's answer is not of OpenAI's form: {type(error).__name__}: {error}"
        ) from error


async def _drain(answer: aiohttp.ClientResponse) -> None:
    """Read the end of an answer's body, to reuse its connection for the next call."""
    with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
        await asyncio.wait_for(answer.content.read(1), limits.DRAIN_S)


async def _whole(answer: aiohttp.ClientResponse) -> bytearray:
    raw = bytearray()
    async for data in answer.content.iter_any():
        raw += data
        if len(raw) > limits.ANSWER_LIMIT:
            raise aiohttp.ClientPayloadError(f"more than {limits.ANSWER_LIMIT >> 20} MiB")
    return raw


def _no_engine(error: Exception) -> CallRefusal:
    return CallRefusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "engine",
        f"no engine answers: {str(error)[:500]}; ask again, and look at /healthz",
        retry_after_s=1,
    )


def _bad_gateway(code: str, said: str) -> CallRefusal:
    return CallRefusal(
        # After a 502 the client would ask again, with an ended session.
        HTTPStatus.NOT_FOUND,
        code,
        f"the engine's answer cannot be trained on: {said}; the sample failed: end this rollout",
    )
