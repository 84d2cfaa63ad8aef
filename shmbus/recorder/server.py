"""The recorder's HTTP server: from a request to its session, its route, its status.

Invariants:

- Every request is answered or its connection ends. A refusal names the next step, in a body shown
  by clients of OpenAI and of Anthropic.
- No key appears in logs or errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web

import shmbus
from shmbus.data.prompts import Ticket
from shmbus.handles.session import Opened
from shmbus.http.access import (
    Refusal,
    bearer_of,
    is_loopback,
    require_loopback_name,
    require_program,
)
from shmbus.http.metrics import Metrics, escaped
from shmbus.http.server import HttpServer, connection_of, run_server, url_of, wait_for_any
from shmbus.recorder import settings as limits
from shmbus.recorder.bodies import read_body
from shmbus.recorder.dialects import DIALECTS
from shmbus.recorder.dialects.base import error_body
from shmbus.recorder.recorder import Recorder
from shmbus.recorder.refusals import CallRefusal, bad_request, kind_of
from shmbus.recorder.sessions import Session
from shmbus.recorder.settings import Settings

logger = logging.getLogger(__name__)
#: A line for each refused or failed request.
access_logger = logging.getLogger("shmbus.recorder.access")

Route = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
SessionRoute = Callable[[web.BaseRequest, Session], Awaitable[web.StreamResponse]]

#: Requests without tokens, answered by the engine.
_PASSED: Final = frozenset({
    ("GET", "/v1/models"), ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"),
    ("POST", "/detokenize"),
})  # fmt: skip
#: Prefix of a key in the address, for harnesses without further options.
_IN_PATH: Final = "/s/"

_encode = msgspec.json.Encoder().encode


class Server:
    """Answers requests for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        settings = recorder.settings
        self._token = None if settings.token is None else settings.token.encode()
        self._loopback_only = is_loopback(settings.host)
        self._metrics = Metrics("shmbus_recorder")
        self.http = HttpServer(
            self._answer,
            max_connections=limits.MAX_CONNECTIONS,
            idle_s=limits.IDLE_CONNECTION_S,
            read_ahead=256 << 10,
            ends_with_client=True,
        )
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/healthz"): self._healthz,
            ("GET", "/metrics"): self._expose,
            ("POST", "/sessions"): self._open,
        }
        self._of_session: dict[tuple[str, str], SessionRoute] = {
            ("GET", "/session"): self._tell,
            ("POST", "/session/rows"): self._rows,
            ("POST", "/session/score"): self._score,
            ("POST", "/session/fail"): self._fail,
        }

    # -- a request ------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        began_s = time.monotonic()
        path, key = _address_of(request)
        route = path if self._knows(path) else "other"
        status = sent = 0
        try:
            response = await self._guarded(request, path, key)
            # A stream is already sent; a whole answer goes now.
            status, sent = response.status, response.content_length or response.body_length
            return response
        finally:
            seconds = time.monotonic() - began_s
            self._metrics.note(route, status, seconds, request.content.total_bytes, sent)

    def _knows(self, path: str) -> bool:
        tables = (self._routes, self._of_session, _PASSED)
        return path in DIALECTS or any(path == known for table in tables for _, known in table)

    async def _guarded(
        self, request: web.BaseRequest, path: str, key: str | None
    ) -> web.StreamResponse:
        """Answer, even after an error in the route."""
        try:
            if self._loopback_only:
                require_loopback_name(request, "the recorder")
            require_program(request)
            return await self._dispatch(request, path, key)
        except Refusal as refusal:
            access_logger.info("%s %s: %d: %s", request.method, path[:200], refusal.status, refusal)
            return _refused(refusal)
        except (ConnectionResetError, web.RequestPayloadError) as error:
            self._metrics.note_undelivered(path if self._knows(path) else "other")
            connection_of(request).abort()
            raise asyncio.CancelledError(str(error)) from error
        except (shmbus.BusRemovedError, shmbus.BusClosedError) as error:
            return _refused(CallRefusal(HTTPStatus.NOT_FOUND, "bus_removed", str(error)))
        except Exception:
            logger.exception("%s %s failed", request.method, path[:200])
            text = "a mistake of the recorder, which its log shows; send the request again"
            return _refused(CallRefusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", text))

    async def _dispatch(
        self, request: web.BaseRequest, path: str, key: str | None
    ) -> web.StreamResponse:
        method = "GET" if request.method == "HEAD" else request.method
        asked = method, path
        route = self._routes.get(asked)
        if route is not None:
            return await route(request)
        if request.method == "POST" and path in DIALECTS:
            session = self._recorder.sessions.of_key(key)
            self._recorder.require_wanted(session)
            async with self._body(request) as raw:
                return await self._recorder.calls.answer(request, session, path, raw)
        own = self._of_session.get(asked)
        if own is not None:
            return await own(request, self._recorder.sessions.of_key(key))
        if asked in _PASSED:
            session = self._recorder.sessions.of_key(key)
            async with self._body(request) as raw:
                return await self._recorder.calls.pass_on(request, session, asked, raw or None)
        tables = (self._routes, self._of_session, _PASSED)
        known = sorted({*DIALECTS, *(name for table in tables for _, name in table)})
        status = HTTPStatus.METHOD_NOT_ALLOWED if path in known else HTTPStatus.NOT_FOUND
        raise CallRefusal(
            status,
            "no_route",
            f"{request.method} {path[:200]}: unknown route; expected one of {', '.join(known)}",
            close=True,
        )

    @contextlib.asynccontextmanager
    async def _body(self, request: web.BaseRequest) -> AsyncIterator[bytearray]:
        """Read a body, within its limit and the shared budget."""
        with self._recorder.room() as take:
            yield await read_body(request, self._recorder.settings.body_limit, take)

    async def _object(self, request: web.BaseRequest) -> dict[str, Any]:
        async with self._body(request) as raw:
            try:
                # Python's own reader accepts NaN; the score check then refuses it by name.
                found = json.loads(raw or b"{}")
            except (ValueError, RecursionError) as error:
                raise bad_request("invalid_json", f"expected a body of JSON: {error}") from error
        if not isinstance(found, dict):
            raise bad_request("invalid_json", "expected an object as body")
        return found

    # -- sessions -------------------------------------------------------------------------------

    def _require_token(self, request: web.BaseRequest) -> None:
        given = request.headers.get("Authorization", "")
        if self._token is not None and not hmac.compare_digest(
            bearer_of(given) or b"", self._token
        ):
            raise CallRefusal(
                HTTPStatus.UNAUTHORIZED,
                "token",
                "POST /sessions: expected 'Authorization: Bearer TOKEN' with the recorder's token, "
                f"got {'a different token' if given else 'none'}",
                close=True,
            )

    async def _open(self, request: web.BaseRequest) -> web.StreamResponse:
        """Open a session: for a worker's ticket, or for the next prompt of the bus."""
        self._require_token(request)
        body = await self._object(request)
        if "ticket" in body:
            try:
                ticket = msgspec.convert(body["ticket"], Ticket)
            except msgspec.ValidationError as error:
                raise bad_request("invalid_call", f"ticket: {error}") from error
            session = self._recorder.open_for(ticket)
            opened = Opened(key=session.key, base_url=f"{self._recorder.url}/v1")
            return await self._deliver(request, session, opened)
        found = await self._recorder.open_next(_wait_of(body))
        if found is None:
            return web.Response(status=HTTPStatus.NO_CONTENT)
        prompt = found.hold
        answer = {
            "api_key": found.key,
            "base_url": f"{self._recorder.url}/v1",
            "anthropic_base_url": self._recorder.url,
            "url_with_key": f"{self._recorder.url}{_IN_PATH}{found.key}/v1",
            "instance_id": prompt.instance_id,
            "index": prompt.index,
            "group_size": prompt.group_size,
            "round": prompt.round,
            "split": prompt.split,
            "attempt": prompt.attempt,
            "reason": prompt.reason,
            "meta": prompt.meta,
            "fields": {name: array.tolist() for name, array in prompt.fields.items()},
        }
        return await self._deliver(request, found, answer)

    async def _deliver(
        self, request: web.BaseRequest, session: Session, answer: object
    ) -> web.StreamResponse:
        """Send the key of a session; end the session if the key is lost."""
        key = session.key

        def settle(delivered: bool) -> None:
            session = self._recorder.sessions.find(key)
            if not delivered and session is not None and not session.calls:
                self._recorder.end(session, "undelivered", "its client did not get the key")

        response = web.Response(body=_encode(answer), headers=_JSON)
        connection = connection_of(request)
        return await connection.deliver(request, response, settle, limits.DELIVER_S)

    async def _tell(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        """Report the state of a session; refuse an ended session."""
        self._recorder.require_wanted(session)
        transcript = session.transcript
        answer = {
            "instance_id": session.place.instance_id,
            "index": session.place.index,
            "group_size": session.place.group_size,
            "calls": session.calls,
            "running": session.running,
            "no_engine": session.no_engine,
            "turns": transcript.turns,
            "tokens": transcript.tokens,
            "sampled": transcript.sampled,
            "drift": transcript.drift,
            "versions": transcript.versions,
        }
        return web.Response(body=_encode(answer), headers=_JSON)

    async def _rows(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        body = self._recorder.rows(session)
        return web.Response(body=body, headers={"Content-Type": "application/msgpack"})

    async def _score(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        body = await self._object(request)
        meta = body.get("meta")
        if meta is not None and not isinstance(meta, dict):
            raise bad_request("invalid_call", "meta: expected an object or nothing")
        put = await self._recorder.score(session, body.get("score"), meta or {})
        return web.Response(body=_encode({"put": put}), headers=_JSON)

    async def _fail(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        reason = (await self._object(request)).get("reason")
        if not isinstance(reason, str) or not reason:
            reason = "its harness gave no reason"
        self._recorder.fail(session, "failed", reason)
        return web.Response(body=_encode({"failed": True}), headers=_JSON)

    # -- operators ------------------------------------------------------------------------------

    async def _healthz(self, request: web.BaseRequest) -> web.StreamResponse:
        recorder = self._recorder
        engines = [
            {
                "url": engine.url,
                "kind": engine.kind,
                "state": engine.state,
                "why": engine.why,
                "calls": engine.calls,
                "probe_ms": round(engine.probe_s * 1e3, 1),
                "version": version.span,
                "version_by": version.by,
                "version_why": version.why,
            }
            for engine in recorder.engines.all
            for version in (recorder.versions.of(engine.url),)
        ]
        healthy = any(engine.state in ("up", "slow") for engine in recorder.engines.all)
        answer = {
            "status": "ok" if healthy else "no engine answers",
            "bus": recorder.settings.bus,
            "sessions": len(recorder.sessions),
            "engines": engines,
        }
        status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
        return web.Response(body=_encode(answer), status=status, headers=_JSON)

    async def _expose(self, request: web.BaseRequest) -> web.StreamResponse:
        recorder, sessions = self._recorder, self._recorder.sessions
        gauges: dict[str, float] = {
            "sessions": len(sessions),
            "calls": sum(session.running for session in sessions),
            "session_bytes": sessions.nbytes,
            "body_bytes": recorder.body_bytes,
            "connections": len(self.http),
        }
        counters: dict[str, float] = {
            "sessions_opened_total": sessions.opened,
            "turns_total": sessions.turns,
            "sampled_tokens_total": sessions.sampled,
            "drift_total": sessions.drift,
            "answers_undone_total": sessions.undone,
            "grammar_tokens_total": sessions.grammar,
        }
        for code, count in sorted(sessions.ended.items()):
            counters[f'sessions_ended_total{{how="{code}"}}'] = count
        for engine in recorder.engines.all:
            label = f'{{engine="{escaped(engine.url)}"}}'
            gauges[f"engine_up{label}"] = engine.state in ("up", "slow")
            gauges[f"engine_version_known{label}"] = recorder.versions.is_known(engine.url)
            gauges[f"engine_slow{label}"] = engine.state == "slow"
            gauges[f"engine_calls{label}"] = engine.calls
            gauges[f"engine_probe_seconds{label}"] = engine.probe_s
            counters[f"engine_failures_total{label}"] = engine.failures
        text = self._metrics.expose(recorder.settings.bus, gauges, counters)
        return web.Response(
            body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )


_JSON: Final = {"Content-Type": "application/json"}


def _address_of(request: web.BaseRequest) -> tuple[str, str | None]:
    """Return the path without a key, and the key: of the path, or of a header."""
    path, key = request.path, None
    if path.startswith(_IN_PATH):
        key, _, rest = path.removeprefix(_IN_PATH).partition("/")
        path = f"/{rest}"
    while path.startswith("/v1/v1/"):
        # Anthropic's clients add the version themselves: one base URL serves every client.
        path = path.removeprefix("/v1")
    if key is None:
        given = bearer_of(request.headers.get("Authorization", ""))
        key = (
            request.headers.get("x-api-key") if given is None else given.decode("utf-8", "replace")
        )
    return path.rstrip("/") or "/", key


def _wait_of(body: dict[str, Any]) -> float:
    wait = body.get("timeout", 0.0)
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not wait >= 0:
        raise bad_request(
            "invalid_call", f"timeout: expected seconds of 0 or more, got {wait!r:.80}"
        )
    return float(min(wait, limits.MAX_WAIT_S))


def _refused(refusal: Refusal) -> web.Response:
    code = refusal.code if isinstance(refusal, CallRefusal) else "refused"
    message = refusal.message.encode(errors="backslashreplace").decode()
    body = error_body(message, kind_of(refusal.status), code)
    if isinstance(refusal, CallRefusal) and refusal.reason is not None:
        body["error"]["reason"] = refusal.reason
    response = web.Response(status=refusal.status, body=_encode(body), headers=_JSON)
    if isinstance(refusal, CallRefusal) and refusal.retry_after_s is not None:
        response.headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.close:
        response.force_close()
    return response


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Recorder]:
    """Serve in the block; the yielded recorder knows its address."""
    async with contextlib.AsyncExitStack() as stack:
        recorder = Recorder(settings)
        stack.push_async_callback(recorder.close)
        http = Server(recorder).http
        stack.push_async_callback(http.close)
        host, port = await http.bind(settings.host, settings.port)
        await recorder.start(url_of(host, port))
        await http.start()
        yield recorder


def serve(settings: Settings, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; return 1 after a removal of the bus."""

    async def record(stop: asyncio.Event) -> int:
        async with serving(settings) as recorder:
            gc.collect()
            gc.freeze()
            say(recorder.url)
            logger.info("recording", extra={"bus": settings.bus, "http": recorder.url})
            await wait_for_any(stop, recorder.gone)
            logger.info("stopping", extra={"bus": settings.bus})
            return 1 if recorder.gone.is_set() else 0

    return run_server(record, None)
