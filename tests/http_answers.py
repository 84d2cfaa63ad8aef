"""Answers over HTTP as a test reads them from a socket, byte for byte."""

import json
import socket
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def detail(self) -> str:
        detail = self.json()["detail"]
        return detail if isinstance(detail, str) else detail[0]["msg"]


def read_answer(connection: socket.socket, *, has_body: bool = True) -> Answer:
    """Read one answer; an end before its end is a ConnectionError."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += more(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines[1:])
    }
    length = int(headers.get("content-length", "0")) if has_body else 0
    while len(body) < length:
        body += more(connection)
    return Answer(int(lines[0].split()[1]), headers, body)


def more(connection: socket.socket) -> bytes:
    found = connection.recv(1 << 20)
    if not found:
        raise ConnectionError("the connection ended in the answer")
    return found
