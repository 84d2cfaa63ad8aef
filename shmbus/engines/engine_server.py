"""Interface of an inference server: verbs with a deadline and a checked answer each.

Invariants: no status and no body is taken for granted; a verb either succeeded, by the server's own
answer, or raises EngineError; nothing is sent twice; errors never contain a key. The presence of
weights is decided by the readers' rows, not here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec

from shmbus.base.arguments import check_seconds
from shmbus.base.closing import ClosedByAsyncWith
from shmbus.engines.results import SHOWN_BODY, EngineError
from shmbus.segment.names import check_name

#: Treatment of requests in flight: frozen and continued; awaited; aborted.
PauseMode = Literal["keep", "wait", "abort"]

#: Limit of bytes read from an answer; a control answer takes a few hundred.
MAX_ANSWER_BYTES = 1 << 20

#: Seconds for a connection of a dying process to be reset; a live server leaves it open.
DYING_S = 0.2

#: Shortest header word treated as a key; shorter words occur inside many texts.
LEAST_KEY = 8

#: Advice for errors explained only by the server.
AGAIN = "look at the server's own log"

#: Advice for sleeping servers.
WAKE = "call EngineFleet.wake(publisher, version)"

#: Warning about a draft model, with the option that configures drafts, and a remedy.
DRAFTS = (
    "{}: the draft model keeps the weights that the server was started with; answers are those of "
    "the new version, and fewer drafts are taken: {}"
)

#: Advice for a refused connection: routes and options do not matter there.
_NOBODY = "nobody listens there: is this the server's address, and has it started?"


class _Card(msgspec.Struct):
    """An entry of a server's model list; further fields are ignored."""

    id: str
    root: str | None = None


class EngineServer(Protocol):
    """Required interface of a server. A verb raises EngineError unless it succeeded.

    A server that sleeps also has `check_sleep`, `sleep`, `wake_weights` and `wake_cache`, as in
    `VllmServer`.
    """

    #: Bus of the server's own node with its weights; None for the fleet's bus.
    bus: str | None
    #: Kind in a note of paused servers, for the process that ends the pause.
    kind: str
    #: Supported treatments of requests in flight.
    modes: tuple[PauseMode, ...]
    #: True if answers always match calls, even after a failure in some ranks.
    answers_in_step: bool

    @property
    def address(self) -> str:
        """Return the server's name in messages and rows."""

    async def ranks(self, timeout: float) -> int:
        """Return the number of loading processes; each owns a row."""

    async def prepare(self, bus: str, timeout: float) -> bool:
        """Make each rank attach to a bus's weights; return False if impossible before a pause."""

    async def attach(self, bus: str, timeout: float) -> bool:
        """Attach during the pause after `prepare` returned False; False if only `load` can."""

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Stop generating."""

    async def load(self, version: int, clear_cache: bool, timeout: float) -> None:
        """Make each rank load a version; the rows show the result."""

    async def reload(self, path: str, version: int, clear_cache: bool, timeout: float) -> None:
        """Read a checkpoint's directory on the server's machine, and report the version."""

    async def settle(self, loading: bool, timeout: float) -> bool:
        """End an update left open; return True if one was open. `loading`: state by the rows."""

    async def resume(self, timeout: float) -> None:
        """Go on generating."""

    async def paused(self, timeout: float) -> bool:
        """Ask whether the server is paused."""

    async def close(self) -> None:
        """Let go of connections."""


class HttpServer(ClosedByAsyncWith):
    """A server controlled over HTTP, by one connection a request.

    Parameters
    ----------
    url : str
        ``http://host:port``.
    headers : mapping of str to str, optional
        Sent with each request, for example a bearer token.
    bus : str, optional
        Bus of its node, fed by a relay, with the server's weights; default: the fleet's.

    Raises
    ------
    TypeError, ValueError
        The address is no HTTP address, or contains a key; or a header is invalid.
    """

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, bus: str | None = None
    ) -> None:
        self.address = _checked_url(url)
        self.bus = None if bus is None else check_name(bus)
        self._headers = _checked_headers(headers)

    async def ask(
        self, step: str, method: str, path: str, timeout: float, *, advice: str, **request: Any
    ) -> dict[str, Any]:
        """Send one request as `call` does; return a 200's JSON object, refuse other statuses."""
        _, text = await self.call(
            step, method, path, timeout, advice=advice, good=(200,), **request
        )
        return self._object(step, text, advice)

    async def post(
        self, step: str, path: str, timeout: float, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send an order as `ask` does; its advice names the server's own log."""
        return await self.ask(step, "POST", path, timeout, body=body, advice=AGAIN)

    async def call(
        self,
        step: str,
        method: str,
        path: str,
        timeout: float,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        advice: str,
        good: Sequence[int] = (),
    ) -> tuple[int, str]:
        """Send a request; return status, one of `good` if given, and text, or raise EngineError."""
        raw = bytearray()
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers) as session,
                session.request(
                    method,
                    self.address + path,
                    json=body,
                    params=query,
                    timeout=aiohttp.ClientTimeout(total=timeout),
                    allow_redirects=False,
                ) as response,
            ):
                status = response.status
                # One read returns the bytes received so far, possibly half of an answer.
                while len(raw) < MAX_ANSWER_BYTES:
                    part = await response.content.read(MAX_ANSWER_BYTES - len(raw))
                    if not part:
                        break
                    raw += part
        except asyncio.TimeoutError as error:
            raise EngineError(
                self.address, step, None, f"nothing within {timeout:g} s", AGAIN
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
                error.os_error, ConnectionRefusedError
            )
            gone = refused or not await self._listens()
            # A missing option or route has an answer.
            advice = _NOBODY if gone else AGAIN
            said = self._without_keys(str(error) or repr(error))
            cause = None if refused else error  # the text already explains a refusal
            raise EngineError(self.address, step, None, said, advice, gone=gone) from cause
        text = raw.decode("utf-8", "replace")
        text = text if status == 200 else self._without_keys(text)
        if good and status not in good:
            raise EngineError(self.address, step, status, text, advice)
        return status, text

    async def _listens(self) -> bool:
        """Return False once connections are refused, True at a connection left open."""
        address = urlsplit(self.address)
        port = address.port or (443 if address.scheme == "https" else 80)
        deadline = time.monotonic() + 5 * DYING_S
        while time.monotonic() < deadline:
            try:
                opening = asyncio.open_connection(address.hostname, port)
                reader, writer = await asyncio.wait_for(opening, DYING_S)
                try:
                    await asyncio.wait_for(reader.read(1), DYING_S)
                finally:
                    writer.close()
            except ConnectionRefusedError:
                return False
            except ConnectionResetError:
                pass  # by a dying process, also within a connection's begin
            except (OSError, asyncio.TimeoutError):
                return True
            await asyncio.sleep(DYING_S / 20)
        return True

    def _without_keys(self, said: str) -> str:
        """Remove header values: some servers quote the request in an error."""
        words = [word for value in self._headers.values() for word in value.split()]
        for word in sorted(words, key=len, reverse=True):
            if len(word) >= LEAST_KEY:
                said = said.replace(word, "***")
        return said

    def _object(self, step: str, text: str, advice: str) -> dict[str, Any]:
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            shown = f"expected a JSON object, got {self._without_keys(text)[:SHOWN_BODY]!r}"
            raise EngineError(self.address, step, 200, shown, advice) from error

    def refuse(self, step: str, answer: Mapping[str, Any], advice: str) -> EngineError:
        """Build the error of a 200 answer without success."""
        said = self._without_keys(repr(dict(answer)))
        return EngineError(self.address, step, 200, said, advice)

    async def close(self) -> None:
        """Do nothing: no connection stays open."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"


class InferenceServer(HttpServer):
    """A server of adapters beside its model, by vLLM's original routes."""

    #: State not renewed by any update, for the warning of each report.
    caution = ""

    #: Prefix of these routes, and the advice after a failure.
    _adapter_routes = _adapter_advice = ""

    async def load_adapter(self, name: str, path: str, timeout: float) -> None:
        """Load an adapter from a folder on its machine."""
        await self._adapter("load", {"lora_name": name, "lora_path": path}, timeout)

    async def unload_adapter(self, name: str, timeout: float) -> None:
        """Unload an adapter; requests in flight keep it."""
        await self._adapter("unload", {"lora_name": name}, timeout)

    async def _adapter(self, verb: str, body: Mapping[str, str], timeout: float) -> None:
        step, path = f"{verb} adapter", f"{self._adapter_routes}/{verb}_lora_adapter"
        advice = self._adapter_advice
        await self.call(step, "POST", path, timeout, body=body, advice=advice, good=(200,))

    async def adapters(self, timeout: float) -> dict[str, str]:
        """Return the adapters and models in the OpenAI API's list, with their paths."""
        advice = "is it a server with OpenAI's routes?"
        answer = await self.ask("models", "GET", "/v1/models", timeout, advice=advice)
        try:
            cards = msgspec.convert(answer.get("data"), list[_Card])
        except msgspec.ValidationError as error:
            raise self.refuse("models", answer, advice) from error
        return {card.id: card.root or "" for card in cards}


def _checked_url(url: object) -> str:
    if not isinstance(url, str):
        raise TypeError(f"url: expected a str, got {type(url).__name__}")
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        # Addresses appear in messages, in rows, and in a dead trainer's note.
        raise ValueError(
            "url: expected http://host:port, got one with a user or a password; pass headers="
        )
    plain = url.isprintable() and not any(c in " ?#" for c in url)
    if parts.scheme not in ("http", "https") or not _is_host(parts) or not plain:
        raise ValueError(f"url: expected http://host:port, got {url!r}")
    return url.rstrip("/")


def _is_host(parts: SplitResult) -> bool:
    """Return whether an address permits a lookup and a connection."""
    try:
        return bool(parts.hostname and parts.hostname.encode("idna")) and parts.port != 0
    except ValueError:  # a label of more than 63 characters, a port above 65535
        return False


def _checked_headers(headers: object) -> dict[str, str]:
    checked = checked_texts("headers", headers)
    for name, value in checked.items():
        if not name or not name.isascii() or any(c <= " " or c == ":" for c in name):
            raise ValueError(f"headers: expected a header's name, got {name!r}")
        if any(c in value for c in "\r\n\0"):
            # The value is usually a secret.
            raise ValueError(f"headers: expected one line of text for {name!r}")
    return checked


def checked_texts(what: str, given: object) -> dict[str, str]:
    """Return a copy of texts by name, which errors never show; None means none."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{what}: expected texts by name, got {type(given).__name__}")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"{what}: expected texts by name, got {type(value).__name__} {name!r}")
    return dict(given)


class Addressed(Protocol):
    """Any object with an address."""

    @property
    def address(self) -> str:
        """Return the name in messages and rows."""


def checked_addresses(servers: Sequence[Addressed]) -> list[str]:
    """Return the addresses of servers; raise TypeError for a value without an address."""
    if isinstance(servers, (str, Mapping)) or not isinstance(servers, Sequence):
        raise TypeError(f"servers: expected a list of servers, got {type(servers).__name__}")
    for server in servers:
        if not isinstance(getattr(server, "address", None), str):
            raise TypeError(
                f"servers: expected servers such as VllmServer(url), got {type(server).__name__}"
            )
    return [server.address for server in servers]


def require_awake(servers: Sequence[Addressed], asleep: Collection[str], step: str) -> None:
    """Raise EngineError for a step that sleeping servers cannot take."""
    there = [server.address for server in servers if server.address in asleep]
    if there:
        raise EngineError(", ".join(there), step, None, "asleep", f"{WAKE} first")


def checked_timeout(timeout: float) -> float:
    """Return a deadline as a plain float, fit for JSON."""
    check_seconds("timeout", timeout)
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout: expected more than 0 seconds, and an end, got {timeout}")
    return float(timeout)


def as_engine_error(server: Addressed, error: Exception) -> EngineError:
    """Convert an exception of a server, or its class, to an EngineError."""
    if isinstance(error, EngineError):
        return error
    found = EngineError(
        server.address,
        "update",
        None,
        f"{type(error).__name__}: {error}",
        "look at this error's cause",
    )
    found.__cause__ = error
    return found
