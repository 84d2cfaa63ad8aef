"""Redis streams: XADD and XREAD over a Unix socket, against a server of this run."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.contenders.base import Contender, Received, started
from bench.contenders.packed_bytes import Decoder, Encoder
from bench.workload import Source, Workload

__all__ = ["CONTENDER", "link", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="redis",
    title="Redis streams, Unix socket, msgspec",
    packages=("redis", "hiredis", "msgspec"),
    programs=("redis-server",),
    per_second=9_000.0,
    copies=7,
    copied="into a message, into a command, into the socket, into the server's stream, into its "
    "answer, out of the socket, out of the answer",
    favour="no persistence, hiredis, a Unix socket; XADD in pipelines of 8, XREAD of 64; no "
    "consumer group, and what was read is trimmed in one call",
)

STREAM: Final = "trajectories"
#: Trajectories of one XREAD.
COUNT: Final = 64
#: Trajectories of one pipeline: a group's worth.
PIPELINE: Final = 8
#: Seconds between looks whether the consumer has made room: the server itself has no bound.
FULL_S: Final = 0.001


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[str]:
    """Run a server that writes nothing to disk."""
    program = shutil.which("redis-server")
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="shmbus-redis-") as directory:
        path = str(Path(directory, "socket"))
        argv = [program, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"]
        with started(argv, Path(path).exists, cwd=directory):
            yield path


class _Sender:
    def __init__(self, client: Any, workload: Workload) -> None:
        self._client = client
        self._pipe = client.pipeline(transaction=False)
        self._encode = Encoder(workload).encode
        self._room = max(PIPELINE, workload.room // workload.producers)
        self._pipeline = min(PIPELINE, workload.group_size)
        self._since_look = 0

    def send(self, instance_id: str, index: int, source: Source) -> None:
        self._pipe.xadd(STREAM, {b"t": self._encode(instance_id, index, source)})
        if len(self._pipe) >= self._pipeline:
            self.flush()

    def flush(self) -> None:
        self._since_look += len(self._pipe)
        self._pipe.execute()
        if self._since_look >= self._room // 2:
            while self._client.xlen(STREAM) > self._room // 2:
                time.sleep(FULL_S)
            self._since_look = 0


class _Receiver:
    def __init__(self, client: Any, workload: Workload) -> None:
        self._client = client
        self._decode = Decoder().decode
        self._last = b"0-0"

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        block = None if timeout_s == 0 else 0 if timeout_s is None else max(1, int(timeout_s * 1e3))
        answer = self._client.xread({STREAM: self._last}, COUNT, block)
        if not answer:
            return ()
        entries = next(iter(answer.values())) if isinstance(answer, dict) else answer[0][1]
        if entries and isinstance(entries[0], list):
            entries = entries[0]
        self._last = entries[-1][0]
        return [self._decode(fields[b"t"]) for _, fields in entries]

    def done(self) -> None:
        """Free what was read: all up to the last entry, which stays until there is another."""
        self._client.xtrim(STREAM, minid=self._last, approximate=False)


@contextlib.contextmanager
def sender(address: str, workload: Workload, number: int) -> Iterator[_Sender]:
    """Send from this process."""
    import redis

    with redis.Redis(unix_socket_path=address) as client:
        yield _Sender(client, workload)


@contextlib.contextmanager
def receiver(address: str, workload: Workload) -> Iterator[_Receiver]:
    """Receive in this process."""
    import redis

    with redis.Redis(unix_socket_path=address) as client:
        yield _Receiver(client, workload)
