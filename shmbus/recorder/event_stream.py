"""Server-sent events: cut out of the bytes of an engine as they come, and made for a client.

Source: HTML Living Standard, 9.2.6, as far as engines use it: lines end in LF or CR LF.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

#: Bytes of one event: a prompt of 200,000 token ids in its first one, five times over.
MAX_EVENT_BYTES: Final = 8 << 20
#: How a stream of OpenAI's form says that it has ended.
DONE: Final = b"[DONE]"

_encode = msgspec.json.Encoder().encode


class EventTooLarge(Exception):
    """An event that does not end."""


class EventParser:
    """The data of events, from bytes in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; return the data of each event that they complete."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        found = []
        for lines in events:
            parts = [
                line[5:].removeprefix(b" ")
                for line in lines.split(b"\n")
                if line.startswith(b"data:")
            ]
            if parts:
                found.append(b"\n".join(parts))
        return found


def event(data: Any, name: str | None = None) -> bytes:
    """Return an event; its name is left out where a stream has none."""
    body = data if isinstance(data, bytes) else _encode(data)
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + body + b"\n\n"
