"""Requests as they go over the wire, for clients that start fast: they are killed often."""

import json
import socket
import struct
from typing import Any


def scored(*rows: list[int], env_id: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "tokens": list(rows), "masks": [[-100, *row[1:]] for row in rows],
        "scores": [float(n) for n in range(len(rows))], "env_id": env_id, **more,
    }  # fmt: skip


def request_bytes(method: str, path: str, content: Any = None, **headers: str) -> bytes:
    """A request as it goes over the wire; header names have _ for -."""
    body = b""
    lines = {"Host": "127.0.0.1"}
    if content is not None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reset(connection: socket.socket) -> None:
    """End a connection as the kernel does for a client that dies with something unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
