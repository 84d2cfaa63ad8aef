"""One inference server as the fleet sees it: verbs with a deadline and a checked answer each.

Invariants: no status and no body is taken for granted; a verb either did what it says, by the
server's own word, or raises EngineError; nothing is sent twice; no error has a key that was sent.
That the weights are there is not believed from here: the readers' rows say it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec

from shmbus._arguments import check_seconds
from shmbus._closing import ClosedByAsyncWith
from shmbus.engines.errors import SHOWN_BODY, EngineError
from shmbus.segment.names import check_name

#: What happens to requests in flight: frozen and continued; awaited; aborted.
PauseMode = Literal["keep", "wait", "abort"]

#: Bytes of an answer that are read; a control answer has a few hundred.
MAX_ANSWER_BYTES = 1 << 20

#: Characters of what may be a key; a shorter word of a header is part of many others.
LEAST_KEY = 8

#: What is advised where only the server can know more.
AGAIN = "look at the server's own log"

#: Warning about a draft model, after the name of the option that configures drafts.
DRAFTS = (
    "{}: the draft model keeps the weights that the server was started with; answers are those of "
    "the new version, and fewer drafts are taken: restart the server with a new draft model"
)

#: Which routes and options it has, as each step's own advice has it, is no question there.
_NOBODY = "nobody listens there: is this the server's address, and has it started?"


class _Card(msgspec.Struct):
    """A model of a server's list; what else it says is left alone."""

    id: str
    root: str | None = None


class EngineServer(Protocol):
    """What the fleet needs of a server. Every verb raises EngineError where it did not happen."""

    #: The bus of its node whose weights it reads; None for the fleet's.
    bus: str | None
    #: What a note of paused servers calls this kind; whoever ends the pause knows it by that.
    kind: str
    #: What this kind of server can do with requests in flight.
    modes: tuple[PauseMode, ...]
    #: Whether an answer is that of its call, also after a call that failed in some of its ranks.
    answers_in_step: bool

    @property
    def address(self) -> str:
        """How messages and rows name it."""

    async def ranks(self, timeout: float) -> int:
        """Return how many processes load weights: each has a row of its own."""

    async def prepare(self, bus: str, timeout: float) -> bool:
        """Have each rank attach to a bus's weights; False where it cannot before it is paused."""

    async def attach(self, bus: str, timeout: float) -> bool:
        """Do what `prepare` could not, now that it is paused; False where only `load` can."""

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Stop generating."""

    async def load(self, version: int, clear_cache: bool, timeout: float) -> None:
        """Have each rank load that version; whether it did is in the rows."""

    async def reload(self, path: str, version: int, clear_cache: bool, timeout: float) -> None:
        """Read a checkpoint's directory on its machine, and say that it has that version."""

    async def settle(self, loading: bool, timeout: float) -> bool:
        """End an update that was left open; whether there was one. `loading`: what the rows say."""

    async def resume(self, timeout: float) -> None:
        """Go on generating."""

    async def paused(self, timeout: float) -> bool:
        """Ask whether it is paused."""

    async def close(self) -> None:
        """Let go of connections."""


class HttpServer(ClosedByAsyncWith):
    """A server that is controlled over HTTP, by one connection a request.

    Parameters
    ----------
    url : str
        ``http://host:port``.
    headers : mapping of str to str, optional
        Sent with each request, such as a bearer token.
    bus : str, optional
        The bus of its node whose weights it reads, where a relay carries them; else the fleet's.

    Raises
    ------
    TypeError, ValueError
        The address is not one of HTTP, or has a key in it; or a header is invalid.
    """

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, bus: str | None = None
    ) -> None:
        self.address = _checked_url(url)
        self.bus = None if bus is None else check_name(bus)
        self._headers = _checked_headers(headers)

    async def ask(
        self,
        step: str,
        method: str,
        path: str,
        timeout: float,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        advice: str,
    ) -> dict[str, Any]:
        """Send one request; the JSON object that a 200 carries, EngineError for anything else."""
        _, text = await self.call(
            step, method, path, timeout, body=body, query=query, advice=advice, good=(200,)
        )
        return self._object(step, text, advice)

    async def post(
        self, step: str, path: str, timeout: float, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send an order as `ask` does; what is wrong with it is in the server's own log."""
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
        """Send one request; the status, one of `good` if there are any, and the text.

        EngineError where none came in time.
        """
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
                # One read gives what has come so far, which may be half of an answer.
                while len(raw) < MAX_ANSWER_BYTES:
                    part = await response.content.read(MAX_ANSWER_BYTES - len(raw))
                    if not part:
                        break
                    raw += part
        except TimeoutError as error:
            raise EngineError(
                self.address, step, None, f"nothing within {timeout:g} s", advice
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            gone = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
                error.os_error, ConnectionRefusedError
            )
            advice = _NOBODY if gone else advice
            said = self._without_keys(str(error) or repr(error))
            cause = None if gone else error  # the text says all of a refusal
            raise EngineError(self.address, step, None, said, advice, gone=gone) from cause
        text = raw.decode("utf-8", "replace")
        text = text if status == 200 else self._without_keys(text)
        if good and status not in good:
            raise EngineError(self.address, step, status, text, advice)
        return status, text

    def _without_keys(self, said: str) -> str:
        """Take out what was sent in headers: some servers say in an error what they were sent."""
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
        """Make the error of an answer that is a 200 and no success."""
        said = self._without_keys(repr(dict(answer)))
        return EngineError(self.address, step, 200, said, advice)

    async def close(self) -> None:
        """Let go of what it holds, which is nothing; may be called twice."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"


class InferenceServer(HttpServer):
    """One that serves adapters beside its model, by the routes that vLLM began with."""

    #: State that no update renews, for the warning of each report.
    caution = ""

    #: What those routes begin with, and what is advised where one fails.
    _adapter_routes = _adapter_advice = ""

    async def load_adapter(self, name: str, path: str, timeout: float) -> None:
        """Load an adapter from a folder on its machine."""
        await self._adapter("load", {"lora_name": name, "lora_path": path}, timeout)

    async def unload_adapter(self, name: str, timeout: float) -> None:
        """Unload an adapter; requests in flight keep what they have."""
        await self._adapter("unload", {"lora_name": name}, timeout)

    async def _adapter(self, verb: str, body: Mapping[str, str], timeout: float) -> None:
        step, path = f"{verb} adapter", f"{self._adapter_routes}/{verb}_lora_adapter"
        advice = self._adapter_advice
        await self.call(step, "POST", path, timeout, body=body, advice=advice, good=(200,))

    async def adapters(self, timeout: float) -> dict[str, str]:
        """Return the adapters and models that it lists, as OpenAI's API has it, and their paths."""
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
        # Addresses are in messages, in rows, and in the note that a dead trainer leaves.
        raise ValueError(
            "url: expected http://host:port, got one with a user or a password; pass headers="
        )
    plain = url.isprintable() and not any(c in " ?#" for c in url)
    if parts.scheme not in ("http", "https") or not _is_host(parts) or not plain:
        raise ValueError(f"url: expected http://host:port, got {url!r}")
    return url.rstrip("/")


def _is_host(parts: SplitResult) -> bool:
    """Whether an address can be looked up and connected to."""
    try:
        return bool(parts.hostname and parts.hostname.encode("idna")) and parts.port != 0
    except ValueError:  # a label of more than 63 characters, a port of more than 65535
        return False


def _checked_headers(headers: object) -> dict[str, str]:
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers: expected texts by name, got {type(headers).__name__}")
    checked: dict[str, str] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"headers: expected texts by name, got {type(value).__name__} {name!r}")
        if not name or not name.isascii() or any(c <= " " or c == ":" for c in name):
            raise ValueError(f"headers: expected a header's name, got {name!r}")
        if any(c in value for c in "\r\n\0"):
            # What it has is a secret, as a rule.
            raise ValueError(f"headers: expected one line of text for {name!r}")
        checked[name] = value
    return checked


class Addressed(Protocol):
    """What has an address."""

    @property
    def address(self) -> str:
        """How messages and rows name it."""


def checked_addresses(servers: Sequence[Addressed]) -> list[str]:
    """Return the addresses of servers; TypeError where something is none."""
    if isinstance(servers, (str, Mapping)) or not isinstance(servers, Sequence):
        raise TypeError(f"servers: expected a list of servers, got {type(servers).__name__}")
    for server in servers:
        if not isinstance(getattr(server, "address", None), str):
            raise TypeError(
                f"servers: expected servers such as VllmServer(url), got {type(server).__name__}"
            )
    return [server.address for server in servers]


def checked_timeout(timeout: float) -> float:
    """Return a deadline in a float of its own, since a server may be told it in JSON."""
    check_seconds("timeout", timeout)
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout: expected more than 0 seconds, and an end, got {timeout}")
    return float(timeout)


def as_engine_error(server: Addressed, error: Exception) -> EngineError:
    """Return what a server, or its class, raised as what the fleet takes for its failure."""
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
