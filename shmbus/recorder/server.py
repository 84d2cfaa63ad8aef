"""The recorder's HTTP server: from a request to its session, its route, its status.

Invariants:

- Every request is answered or its connection ends. A refusal names the next step, in a body shown
  by clients of OpenAI and of Anthropic.
- No key appears in logs or errors.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web

from shmbus.base.arguments import fit_text
from shmbus.data.prompts import Ticket
from shmbus.handles.session import Opened
from shmbus.http.access import Access, Refusal, Route, bearer_of
from shmbus.http.app import App, json_answer, run
from shmbus.http.metrics import escaped
from shmbus.http.server import connection_of
from shmbus.recorder import settings as limits
from shmbus.recorder.dialects import DIALECTS
from shmbus.recorder.dialects.base import error_body
from shmbus.recorder.recorder import Recorder
from shmbus.recorder.refusals import CallRefusal, bad_request, kind_of
from shmbus.recorder.sessions import Session
from shmbus.recorder.settings import Settings

SessionRoute = Callable[[web.BaseRequest, Session], Awaitable[web.StreamResponse]]

#: Requests without tokens, answered by the engine.
_PASSED: Final = frozenset({
    ("GET", "/v1/models"), ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"),
    ("POST", "/detokenize"),
})  # fmt: skip
#: Prefix of a key in the address, for harnesses without further options.
_IN_PATH: Final = "/s/"


class Routes:
    """The routes of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.routes = {
            ("POST", "/sessions"): Route(self._open),
            ("GET", "/session"): self._of_session(self._tell, reads=True),
            ("POST", "/session/rows"): self._of_session(self._rows),
            ("POST", "/session/score"): self._of_session(self._score),
            ("POST", "/session/fail"): self._of_session(self._fail),
            **{("POST", path): self._of_session(self._call) for path in DIALECTS},
            **{
                asked: self._of_session(self._pass_on, reads=asked[0] == "GET") for asked in _PASSED
            },
        }

    def _of_session(self, answer: SessionRoute, *, reads: bool = False) -> Route:
        """Return a route whose key is a session's."""

        async def of_key(request: web.BaseRequest) -> web.StreamResponse:
            return await answer(request, self._recorder.sessions.of_key(_key_of(request)))

        return Route(of_key, reads, open=True)

    # -- calls ----------------------------------------------------------------------------------

    async def _call(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        self._recorder.require_wanted(session)
        async with self._recorder.body(request, session) as raw:
            return await self._recorder.calls.answer(request, session, _path_of(request), raw)

    async def _pass_on(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        asked = "POST" if request.method == "POST" else "GET", _path_of(request)
        async with self._recorder.body(request, session) as raw:
            return await self._recorder.calls.pass_on(request, session, asked, raw or None)

    async def _object(self, request: web.BaseRequest) -> dict[str, Any]:
        async with self._recorder.body(request, free=limits.FREE_BODY) as raw:
            try:
                # Python's own reader accepts NaN; the score check then refuses it by name.
                found = json.loads(raw or b"{}")
            except (ValueError, RecursionError) as error:
                raise bad_request("invalid_json", f"expected a body of JSON: {error}") from error
        if not isinstance(found, dict):
            raise bad_request("invalid_json", "expected an object as body")
        return found

    # -- sessions -------------------------------------------------------------------------------

    async def _open(self, request: web.BaseRequest) -> web.StreamResponse:
        """Open a session: for a worker's ticket, or for the next prompt of the bus."""
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

        response = json_answer(answer)
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
        return json_answer(answer)

    async def _rows(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        body = self._recorder.rows(session)
        return web.Response(body=body, headers={"Content-Type": "application/msgpack"})

    async def _score(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        body = await self._object(request)
        meta = body.get("meta")
        if meta is not None and not isinstance(meta, dict):
            raise bad_request("invalid_call", "meta: expected an object or nothing")
        put = await self._recorder.score(session, body.get("score"), meta or {})
        return json_answer({"put": put})

    async def _fail(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        reason = (await self._object(request)).get("reason")
        if not isinstance(reason, str) or not reason:
            reason = "its harness gave no reason"
        self._recorder.require_unscored(session, "a failure")
        self._recorder.fail(session, "failed", fit_text("reason", reason, limits.MOST_REASON_BYTES))
        return json_answer({"failed": True})

    # -- operators ------------------------------------------------------------------------------

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return True if an engine answers, with the state."""
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
        return healthy, {
            "status": "ok" if healthy else "no engine answers",
            "bus": recorder.settings.bus,
            "sessions": len(recorder.sessions),
            "engines": engines,
        }

    def counts(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return gauges and counters for a scrape."""
        recorder, sessions = self._recorder, self._recorder.sessions
        gauges: dict[str, float] = {
            "sessions": len(sessions),
            "calls": recorder.calls.running,
            "session_bytes": sessions.nbytes,
            "body_bytes": recorder.body_bytes,
        }
        counters: dict[str, float] = {
            "sessions_opened_total": sessions.opened,
            "turns_total": sessions.turns,
            "sampled_tokens_total": sessions.sampled,
            "drift_total": sessions.drift,
            "answers_undone_total": sessions.undone,
            "grammar_tokens_total": sessions.grammar,
        }
        for how, count in sorted(recorder.calls.stitcher.counts.items()):
            counters[f'prompts_total{{how="{how}"}}'] = count
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
        return gauges, counters


def _path_of(request: web.BaseRequest) -> str:
    """Return the path without a key."""
    path = request.path
    if path.startswith(_IN_PATH):
        path = f"/{path.removeprefix(_IN_PATH).partition('/')[2]}"
    while path.startswith("/v1/v1/"):
        # Anthropic's clients add the version themselves: one base URL serves every client.
        path = path.removeprefix("/v1")
    return path.rstrip("/") or "/"


def _key_of(request: web.BaseRequest) -> str | None:
    """Return the key: of the path, or of a header."""
    if request.path.startswith(_IN_PATH):
        return request.path.removeprefix(_IN_PATH).partition("/")[0]
    given = bearer_of(request.headers.get("Authorization", ""))
    return request.headers.get("x-api-key") if given is None else given.decode("utf-8", "replace")


def _wait_of(body: dict[str, Any]) -> float:
    wait = body.get("timeout", 0.0)
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not wait >= 0:
        raise bad_request(
            "invalid_call", f"timeout: expected seconds of 0 or more, got {wait!r:.80}"
        )
    return float(min(wait, limits.MAX_WAIT_S))


def _refused(refusal: Refusal, message: str) -> web.Response:
    body = error_body(message, kind_of(refusal.status), refusal.code)
    if isinstance(refusal, CallRefusal) and refusal.reason is not None:
        body["error"]["reason"] = refusal.reason
    return json_answer(body, refusal.status)


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Recorder]:
    """Serve in the block; the yielded recorder knows its address."""
    recorder = Recorder(settings)
    routes = Routes(recorder)
    app = App(
        "recorder",
        settings.bus,
        Access("recorder", settings.host, settings.token),
        routes.routes,
        _refused,
        health=routes.health,
        counts=routes.counts,
        open_metrics=True,
        path_of=_path_of,
        # The end for every client.
        gone_status=HTTPStatus.NOT_FOUND,
        max_connections=limits.MAX_CONNECTIONS,
        idle_s=limits.IDLE_CONNECTION_S,
        read_ahead=256 << 10,
        ends_with_client=True,
    )
    async with app.serving(recorder, settings.host, settings.port):
        yield recorder


def serve(settings: Settings, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; return 1 after a removal of the bus."""
    return run(lambda: serving(settings), say)
