"""Server-sent events: cut out of the bytes of an engine as they come, and made for a client.

Source: HTML Living Standard, 9.2.6, as far as engines use it: lines end in LF or CR LF.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

#: Bytes of one event: a first event with a prompt of 200,000 token ids, five times over.
MAX_EVENT_BYTES: Final = 8 << 20
#: End mark of a stream in OpenAI's form.
DONE: Final = b"[DONE]"

_encode = msgspec.json.Encoder().encode


class EventTooLarge(Exception):
    """An event beyond the limit."""


class EventParser:
    """Parser of events from byte pieces of any size, in time linear in the bytes."""

    def __init__(self) -> None:
        #: Pieces of the open line, data lines of the open event.
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._held = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; return the data of each event completed by them."""
        found = []
        piece, *pieces = data.split(b"\n")
        self._line.append(piece)
        self._held += len(data)
        for piece in pieces:
            line = b"".join(self._line).removesuffix(b"\r")
            self._line = [piece]
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                self._data, self._held = [], len(piece)
        if self._held > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        return found


def event(data: Any, name: str | None = None) -> bytes:
    """Return an event, without a name for nameless streams."""
    body = data if isinstance(data, bytes) else _encode(data)
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + body + b"\n\n"
