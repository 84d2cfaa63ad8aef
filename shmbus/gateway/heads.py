"""Heads that are known: a large body below one is put without parsing its head again.

A client posts group after group in the same words; only the length of the body differs. The HTTP
library's parser, its request and its answer cost as much as a third of the numbers in the body.

Invariants:

- A head is known only after a request with it was answered 200 the long way, with every check of
  who may ask; none of these looks at anything but its bytes. It is known to the byte, but for the
  digits of the body's length.
- Only heads are known of which no two readers can differ on where the body ends: one Content-Length
  of digits, and nothing that changes how the body is framed.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from multidict import CIMultiDictProxy

from shmbus.gateway import settings

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "Heads",
    "KnownHead",
    "KnownRequest",
    "Request",
    "Split",
    "is_plain",
    "split_head",
    "wire_head",
]

#: What opens a request whose body is a group, or several.
_OPENS: Final = (b"POST /scored_data", b"POST /buffer/write")
_LENGTH: Final = re.compile(rb"\r\nContent-Length: *([0-9]{1,15})\r\n", re.IGNORECASE)
#: What says more about a body's framing, in lower case, and what may begin the same header twice.
_UNPLAIN: Final = (b"transfer-encoding", b"expect", b"upgrade", b"\n ", b"\n\t", b"\0")
#: Bytes of a head that is remembered, and how many are: those of clients have some 300, and differ
#: by the name of the server, by compression and by the number of digits of a length.
_MOST_BYTES: Final = 2048
_MOST_HEADS: Final = 256


class Split(NamedTuple):
    """A request, cut behind its head.

    Attributes
    ----------
    head : bytes
        With zeros for the digits of the length.
    behind : bytes
        What came of the body.
    length : int
        Bytes that the body has.
    """

    head: bytes
    behind: bytes
    length: int


def split_head(received: bytes) -> Split | None:
    """Cut a request with a large body; None for any other, or where its head is not whole."""
    if not received.startswith(_OPENS):
        return None
    end = received.find(b"\r\n\r\n") + 4
    found = _LENGTH.search(received, 0, end) if end >= 4 else None
    if found is None:
        return None
    length = int(found[1])
    begin, stop = found.span(1)
    behind = received[end:]
    if length <= settings.SMALL_BYTES or len(behind) > length:
        return None
    head = received[:begin] + b"0" * (stop - begin) + received[stop:end]
    return Split(head, behind, length)


def is_plain(head: bytes) -> bool:
    """Whether no two readers of a head of `split_head` can differ on where its body ends."""
    lower = head.lower()
    return (
        head.count(b"\r\n") == head.count(b"\n") == head.count(b"\r")
        and lower.count(b"content-length") == 1
        and not any(word in lower for word in _UNPLAIN)
    )


class KnownHead(NamedTuple):
    """What a head says.

    Attributes
    ----------
    path : str
        Whom it asks.
    headers : CIMultiDictProxy
        As the library read them, with a length of zero.
    keep_alive : bool
        Whether the connection stays.
    """

    path: str
    headers: CIMultiDictProxy[str]
    keep_alive: bool


class KnownRequest:
    """What a route reads of a request whose head is known.

    Parameters
    ----------
    head : KnownHead
        Of `Heads`.
    transport : Transport
        Of its connection.
    """

    __slots__ = ("_transport", "answered", "head", "headers", "path", "remote")

    method: Final = "POST"
    #: As the library has it: the body is received beside it.
    content_length: Final = 0

    def __init__(self, head: KnownHead, transport: asyncio.Transport) -> None:
        self.head = head
        self.path = head.path
        self.headers = head.headers
        self._transport = transport
        #: Whether an answer was written.
        self.answered = False
        #: Who asks: noted now, since a connection that has ended does not know it.
        self.remote = _peer_of(transport)

    @property
    def transport(self) -> asyncio.Transport | None:
        """Where it came from; None once that has ended."""
        return None if self._transport.is_closing() else self._transport


def _peer_of(transport: asyncio.Transport) -> str | None:
    try:
        peer = transport.get_extra_info("peername")
    except (OSError, ValueError):  # it was reset already
        return None
    return str(peer[0]) if isinstance(peer, tuple) else None


#: What a route that takes groups is asked by.
Request = web.BaseRequest | KnownRequest


class Heads:
    """The heads that one gateway knows."""

    def __init__(self) -> None:
        #: The oldest first.
        self._known: dict[bytes, KnownHead] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, head: bytes) -> KnownHead | None:
        """Return what a head of `split_head` says, where it is known."""
        return self._known.get(head)

    def remember(self, head: bytes, request: web.BaseRequest, status: int) -> None:
        """Know a head of `split_head` that `is_plain`, once a request with it was answered 200."""
        if (
            status != HTTPStatus.OK
            or len(head) > _MOST_BYTES
            or head in self._known
            or request.version != (1, 1)
            # A page's answer has more headers.
            or "Origin" in request.headers
        ):
            return
        if len(self._known) >= _MOST_HEADS:
            del self._known[next(iter(self._known))]
        self._known[head] = KnownHead(request.path, request.headers, request.keep_alive)


def wire_head(response: web.Response, keep_alive: bool) -> bytes:
    """Return the head of an answer as the library writes it, for a body of known length."""
    lines = [f"HTTP/1.1 {response.status} {response.reason}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    lines.append(f"Content-Length: {response.content_length or 0}")
    lines.append(f"Date: {rfc822_formatted_time()}")
    if not keep_alive:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
