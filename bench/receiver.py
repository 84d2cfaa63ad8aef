"""A server that only receives: what any server of a group spends at the least.

``python -m bench.receiver PORT [--parse]``. One thread, blocking calls, and a buffer that it keeps,
for one client after the other. With ``--parse`` the numbers of a body become arrays too, in C.
"""

from __future__ import annotations

import argparse
import re
import socket
from typing import Final

from shmbus_ext import _core

__all__ = ["main"]

#: Bytes of the largest request.
ROOM: Final = 4 << 20
#: Bytes that the kernel may keep of a connection: a body comes in few pieces.
RECEIVE_BUFFER: Final = 4_000_000
LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 21\r\n\r\n"
    b'{"status":"received"}'
)
#: Lists of numbers of a group, and whether they are floats.
LISTS: Final = {"tokens": False, "masks": False, "inference_logprobs": True}


def _answer_all(connection: socket.socket, room: memoryview, parse: bool) -> None:
    """Answer the requests of a connection, until its client ends it."""
    count, body, end = 0, 0, -1
    while received := connection.recv_into(room[count:]):
        count += received
        if end < 0:
            head = bytes(room[: min(count, 4096)])
            body = head.find(b"\r\n\r\n") + 4
            if body < 4:
                continue
            found = LENGTH.search(head, 0, body)
            end = body + (int(found[1]) if found else 0)
        if count >= end:
            if parse and end > body and _core.lift_numbers(room[body:end], LISTS) is None:
                raise SystemExit("bench.receiver: expected a group, got another body")
            connection.sendall(ANSWER)
            count, end = 0, -1


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int, help="where it listens, on 127.0.0.1")
    parser.add_argument("--parse", action="store_true", help="parse the numbers of bodies")
    arguments = parser.parse_args()
    room = memoryview(bytearray(ROOM))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        listener.bind(("127.0.0.1", arguments.port))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                _answer_all(connection, room, arguments.parse)


if __name__ == "__main__":
    main()
