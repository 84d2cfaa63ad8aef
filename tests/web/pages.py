"""The web server as a process of its own, and a client of raw sockets."""

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

from conftest import Child, Spawner, wait_until
from http_answers import Answer, more, read_answer

#: Runs the command without the entry point, missing from older environments.
RUN = """
import argparse, sys
from shmbus.web import command
parser = argparse.ArgumentParser()
command.add_parser(parser.add_subparsers())
arguments = parser.parse_args(["web", *sys.argv[1:]])
sys.exit(arguments.run(arguments))
"""
TIMEOUT_S = 30.0

WORKER = """
import sys, time, shmbus
name, index, size, groups, rest = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
with shmbus.Producer(name, label=f"rollout-{index}") as producer:
    for number in range(groups):
        producer.put(f"math-{1000 + number}", group_size=size, index=index,
                     policy_version=max(0, producer.policy_version - index % 3),
                     score=(number * 7 + index * 3) % 10 / 9, tokens=[1] * (100 + 40 * index))
        if number == 0:
            print("ready", flush=True)
        time.sleep(rest)
    time.sleep(600)
"""
TRAINER = """
import sys, time, shmbus
with shmbus.Consumer(sys.argv[1], label=sys.argv[2]) as consumer:
    print("ready", flush=True)
    taken = 0
    while True:
        for group in consumer.take(max_groups=2, timeout=1.0):
            time.sleep(float(sys.argv[3]))
            group.ack()
            taken += 1
            consumer.policy_version = taken // 12
"""


def apply(old: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    new = dict(old)
    for key, value in changes.items():
        before = new.get(key)
        if value is None:
            new.pop(key, None)
        elif isinstance(value, dict) and isinstance(before, dict):
            new[key] = apply(before, value)
        else:
            new[key] = value
    return new


class Web:
    def __init__(self, spawner: Spawner, names: tuple[str, ...], *, before: str = "") -> None:
        self.child: Child = spawner.script(before + RUN, *names)
        wait_until(
            lambda: "token=" in self.child.output() or not self.child.running,
            what="the page's server",
        )
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", self.child.output())
        if found is None:
            raise AssertionError(f"the server ended:\n{self.child.output()}")
        self.address = found[0]
        self.port = int(found[1])
        self.token = found[2]

    @property
    def cookie(self) -> str:
        """Return a browser's message after the token's exchange."""
        return f"shmbus-{self.port}={self.token}"

    def stop(self) -> str:
        self.child.send_signal(signal.SIGTERM)
        return self.child.finish()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)

    def ask(self, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
        with self.connect() as connection:
            connection.sendall(self.request(path, method, body, **headers))
            return read_answer(connection, has_body=method != "HEAD")

    def request(self, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> bytes:
        """Return a request on the wire, with the cookie by default."""
        lines = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie}
        if body:
            lines["Content-Length"] = str(len(body))
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape") + body

    def pictures(self, name: str = "") -> Iterator[dict[str, Any]]:
        """Watch a bus as a page does: whole, then differences; ends with the connection."""
        with self.connect() as connection:
            query = f"?bus={name}" if name else ""
            connection.sendall(self.request(f"/events{query}"))
            picture: dict[str, Any] = {}
            for kind, value in read_events(connection):
                picture = value["picture"] if kind == "whole" else apply(picture, value["change"])
                yield picture

    def until(self, name: str, wanted: Any, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        picture: dict[str, Any] = {}
        for picture in self.pictures(name):
            if wanted(picture):
                return picture
            if time.monotonic() > deadline:
                break
        raise TimeoutError(f"waited for {what}; the last picture: {json.dumps(picture)[:3000]}")


def read_events(connection: socket.socket) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream; chunked encoding is undone."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += more(connection)
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], head
    text = b""
    while True:
        while b"\r\n" not in rest:
            rest += more(connection)
        line, _, rest = rest.partition(b"\r\n")
        length = int(line, 16)
        if length == 0:
            return
        while len(rest) < length + 2:
            rest += more(connection)
        text, rest = text + rest[:length], rest[length + 2 :]
        while b"\n\n" in text:
            one, _, text = text.partition(b"\n\n")
            kind, _, value = one.partition(b"\ndata: ")
            yield kind.removeprefix(b"event: ").decode(), json.loads(value)
