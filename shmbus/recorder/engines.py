"""The engines: one client for every engine, the assignment of sessions, and engine states.

Invariants:

- A session stays at its answering engine, since the prefix cache there knows the conversation.
- A call goes to another engine only while nothing of an answer went out.
- A reset of a pooled connection costs one retry on a fresh connection and leaves the engine's state
  unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from typing import Any, Final, Literal

import aiohttp
import msgspec

from shmbus.pool.server_rows import engine_address
from shmbus.recorder import settings as limits
from shmbus.recorder.engine_api import Kind
from shmbus.recorder.sessions import Session

logger = logging.getLogger(__name__)

#: Statuses of an engine unable to answer any call now.
_UNABLE: Final = frozenset({429, 500, 502, 503, 504})


#: Headers read by engines; keys, lengths and encodings belong to this hop alone.
_PASSED: Final = frozenset({
    "anthropic-beta", "anthropic-version", "traceparent", "tracestate", "user-agent",
    "x-data-parallel-rank", "x-request-id",
})  # fmt: skip
_PROBE: Final = aiohttp.ClientTimeout(total=limits.PROBE_S)


class EngineGone(Exception):
    """Every engine failed to answer."""


class Engine:
    """One engine."""

    def __init__(self, url: str) -> None:
        self.url = engine_address(url)
        self.kind: Kind = "vllm"
        self.state: Literal["unknown", "up", "slow", "down"] = "unknown"
        self.why = ""
        #: Calls in flight, and unanswered calls.
        self.calls = 0
        self.failures = 0
        #: True once the kind of the engine is known.
        self.known = False
        #: Seconds of its last probe.
        self.probe_s = 0.0

    def down(self, why: str) -> None:
        """Note a failure to answer."""
        self.failures += 1
        if self.state != "down":
            logger.warning("engine %s: %s", self.url, why)
        self.state, self.why = "down", why


class Engines:
    """The engines of a recorder."""

    def __init__(self, urls: Iterable[str], key: str | None) -> None:
        self.all = [Engine(url) for url in dict.fromkeys(urls)]
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        #: Pooled connections of calls; connections for one request, of probes and retries.
        self._client: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None
        self._probing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the clients, and probe each engine."""
        pooled = aiohttp.TCPConnector(limit=0, keepalive_timeout=limits.POOLED_S)
        self._client = self._open_client(pooled)
        self._fresh = self._open_client(aiohttp.TCPConnector(limit=0, force_close=True))
        await asyncio.gather(*map(self._probe, self.all))
        self._probing = asyncio.get_running_loop().create_task(self._watch())

    def _open_client(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            headers=self._headers,
            auto_decompress=False,
            connector=connector,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.CONNECT_S, sock_read=limits.ENGINE_SILENCE_S
            ),
            read_bufsize=1 << 18,
            trace_configs=[trace],
        )

    async def close(self) -> None:
        """Let go of connections."""
        if self._probing is not None:
            self._probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probing
        for client in (self._client, self._fresh):
            if client is not None:
                await client.close()

    # -- health ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(limits.PROBE_S)
            await asyncio.gather(*map(self._probe, self.all))

    async def _probe(self, engine: Engine) -> None:
        began = time.monotonic()
        try:
            if not engine.known:
                await self._recognize(engine)
            assert self._fresh is not None
            async with self._fresh.get(engine.url + "/health", timeout=_PROBE) as answer:
                status = answer.status
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            # A busy engine may miss the timeout; a dead engine refuses.
            if isinstance(error, asyncio.TimeoutError) and engine.state in ("up", "slow"):
                engine.state, engine.why = "slow", f"no answer within {limits.PROBE_S:g} s"
            else:
                engine.down(str(error) or type(error).__name__)
            return
        engine.probe_s = time.monotonic() - began
        if status >= 500:
            engine.down(f"/health is {status}")
            return
        engine.state = "slow" if engine.probe_s > limits.SLOW_S else "up"
        engine.why = ""

    async def _recognize(self, engine: Engine) -> None:
        """Learn if an engine is vLLM or SGLang, from the owner of its models."""
        assert self._fresh is not None
        async with self._fresh.get(engine.url + "/v1/models", timeout=_PROBE) as answer:
            if answer.status == 401:
                raise aiohttp.ClientError("/v1/models is 401; set SHMBUS_ENGINE_KEY to its key")
            if answer.status != 200:
                return
            raw = await answer.read()
        with contextlib.suppress(msgspec.DecodeError, AttributeError, TypeError):
            owners = {model.get("owned_by") for model in msgspec.json.decode(raw)["data"]}
            engine.kind = "sglang" if "sglang" in owners else "vllm"
            engine.known = True

    # -- calls ----------------------------------------------------------------------------------

    def pick(
        self, session: Session | None, is_known: Callable[[str], bool] = lambda url: True,
        tried: Collection[Engine] = (),
    ) -> Engine:  # fmt: skip
        """Return the session's engine, or the least busy of known version, then of the untried."""
        known = [engine for engine in self.all if is_known(engine.url)] or self.all
        if session is not None and session.engine in known and session.engine.state != "down":
            found: Engine = session.engine
            return found
        found = min(known, key=lambda each: (each in tried, each.state == "down", each.calls))
        if session is not None:
            session.engine = found
        return found

    @contextlib.asynccontextmanager
    async def ask(
        self,
        engine: Engine,
        method: str,
        path: str,
        body: bytes | bytearray | None,
        headers: Mapping[str, str],
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask one engine; EngineGone without the begin of an answer."""
        engine.calls += 1
        try:
            try:
                answer = await self._request(method, engine.url + path, body, headers)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                engine.down(f"{type(error).__name__}: {error}")
                raise EngineGone(f"{engine.url}: {type(error).__name__}: {error}") from error
            try:
                if answer.status in _UNABLE:
                    said = (await answer.content.read(300)).decode("utf-8", "replace")
                    engine.failures += 1
                    raise EngineGone(f"{engine.url}: {answer.status}: {said}")
                yield answer
            finally:
                # Closing an unfinished answer tells the engine to stop.
                answer.close() if not answer.content.at_eof() else answer.release()
        finally:
            engine.calls -= 1

    async def _request(
        self, method: str, url: str, body: bytes | bytearray | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a request; retry on a fresh connection after the reset of a pooled connection."""
        assert self._client is not None and self._fresh is not None
        options: Any = {"data": body, "headers": headers, "allow_redirects": False}
        connection = _Connection()
        try:
            return await self._client.request(method, url, trace_request_ctx=connection, **options)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, ConnectionResetError):
            if not connection.reused:
                raise
            return await self._fresh.request(method, url, **options)


class _Connection:
    """Marks a request on a reused connection."""

    reused = False


async def _note_reuse(session: object, context: Any, found: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True


def headers_of(request: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a client meant for its engine."""
    return {name: value for name, value in request.items() if name.lower() in _PASSED}
