"""Common parts of the tests of operators' commands: the real command line, buses in odd states.

Invariant: a command runs as a separate process, like a user's; its output is the user's view. Wrong
usage may run in the test's process: the command ends before any action.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fork_server import Forked, Streams, fork

import shmbus
from shmbus.cli import main
from shmbus_ext import _core

#: Far beyond any command here; only a hang reaches the limit.
COMMAND_TIMEOUT_S = 60

# Puts a number of complete groups of 4, and a single sample of one more, reports, and waits.
WORKER = """
import sys, time, numpy as np, shmbus
producer = shmbus.Producer(sys.argv[1], label=sys.argv[3])
for number in range(int(sys.argv[2])):
    for index in range(4):
        producer.put(f"{sys.argv[3]}-{number}", group_size=4, index=index, score=index,
                     tokens=np.arange(64, dtype=np.int32))
producer.put(f"{sys.argv[3]}-open", group_size=4, index=1, tokens=np.arange(64, dtype=np.int32))
print("ready", flush=True)
time.sleep(600)
"""


#: The name from `bus_name`: a process id and a unique number.
TEST_BUS = re.compile(r"\btest-\d+-\d+-[0-9a-f]{8}")


class Result(NamedTuple):
    status: int
    out: str
    err: str
    pid: int

    def left_behind(self) -> list[str]:
        """Names in shared memory with its pid, except for tests' own, with similar numbers."""
        return [
            name
            for name in os.listdir("/dev/shm")
            if re.search(rf"-{self.pid}(?!\d)", TEST_BUS.sub("", name))
        ]

    def json(self) -> Any:
        return json.loads(self.out)


def usage(*arguments: str) -> Result:
    """Run a command line in this process: wrong usage, or a look, which leaves nothing behind."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([*arguments])
        except SystemExit as ended:
            status = int(ended.code or 0)
    return Result(status, out.getvalue(), err.getvalue(), os.getpid())


def cli(*arguments: str, env: dict[str, str] | None = None, stdin: str = "") -> Result:
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, name) for name in Streams._fields]
        for file, text in zip(files, (stdin, "", ""), strict=True):
            file.write_text(text)
        process = start(["-m", "shmbus.cli"], [*arguments], env, Streams(*map(str, files)))
        try:
            status = process.wait(COMMAND_TIMEOUT_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
        _, out, err = (file.read_text() for file in files)
    assert "Traceback" not in err, err
    return Result(status, out, err, process.pid)


def start(
    program: list[str], arguments: list[str], env: dict[str, str] | None, streams: Streams
) -> Forked | subprocess.Popen[bytes]:
    if forked := fork(program, arguments, Path.cwd(), streams, program[-1], env or {}):
        return forked
    with open(streams[0]) as given, open(streams[1], "w") as out, open(streams[2], "w") as err:
        return subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdin=given, stdout=out, stderr=err, env={**os.environ, **(env or {})},
        )  # fmt: skip


def segment_path(name: str) -> Path:
    return Path("/dev/shm") / f"shmbus.{name}"


def children_of(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(n)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for n in (task / "children").read_text().split()
    ]


def is_gone(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def put_group(producer: shmbus.Producer, instance_id: str, size: int = 4, skip: int = -1) -> None:
    for index in range(size):
        if index != skip:
            tokens = np.arange(64, dtype=np.int32)
            producer.put(instance_id, group_size=size, index=index, score=index, tokens=tokens)


def put_until_moved(producer: shmbus.Producer, consumer: shmbus.Consumer) -> None:
    """Leave stragglers behind while the bus fills, until the collector moves one."""
    number = 0
    while consumer.stats().moved == 0:
        number += 1
        put_group(producer, f"straggler-{number}", size=2, skip=1)
        for filler in range(8):
            body = np.zeros(1500, np.int8)
            producer.put(f"f{number}.{filler}", group_size=1, index=0, b=body, timeout=10)
        consumer.ack(consumer.take(64, timeout=0.01))
        # A single thread plays both sides: leave the collector time to make room.
        time.sleep(0.001 if number < 200 else 0.06)
        assert number < 300


def write_at(name: str, position: int, data: bytes) -> None:
    with segment_path(name).open("r+b") as file:
        file.seek(position)
        file.write(data)


def header_offset(field: str) -> int:
    layout = _core.layout()["bus_header"]
    return layout["offsets"][layout["names"].index(field)]


def data_offset(name: str) -> int:
    raw = segment_path(name).read_bytes()[: _core.HEADER_BYTES]
    at = header_offset("data_offset")
    return int.from_bytes(raw[at : at + 8], "little")
