"""Starts the suite's child programs as forks of a process that has imported what they need.

A fresh interpreter needs a quarter of a second of processor to import NumPy and shmbus, and one and
a quarter with torch; hundreds of children in a run of the suite did nothing else. A fork of a
process that has done so, and nothing more, begins in a hundredth of that.

Invariants:

- A child is a process of its own, as one that was executed: its script is `__main__`, at the top of
  its stack; its arguments, directory, streams and environment are its own, and it ends as an
  interpreter does, but that no destructor of a C++ library runs. Signals, locks and descriptors
  know no difference.
- The workers of a run (pytest-xdist) share servers, which import at the first request and end with
  the process that started them.
- The server has one thread, and no handle, segment, loop or socket of shmbus is open in it: there
  is nothing for a child to inherit but modules.
- What only a fresh interpreter can do is left to one: another environment, what an interpreter does
  at its start, and builds whose points are set before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from shmbus import cli

__all__ = ["FUNCTIONS", "TEMPLATE", "Forked", "Streams", "end_servers", "fork"]

#: A request: arguments and an environment.
REQUEST_BYTES = 1 << 20

#: What pytest writes for each test, and what an import of Ray leaves behind.
NOT_READ = frozenset({"PYTEST_CURRENT_TEST", "RAY_CLIENT_MODE"})

#: What nothing reads before a child's own imports: children that have these are forked, too.
READ_LATER = frozenset({"PYTHONPATH", "GLOO_SOCKET_IFNAME"})

#: What every child needs, and what some need beside it.
COMMANDS = tuple(f"shmbus.cli.{module}" for module in dict.fromkeys(cli._COMMANDS.values()))
PLAIN = ("uvloop", "shmbus.handles.consumer", "shmbus.handles.feeder", *COMMANDS)
# With what torch imports at the first optimizer or loaded tensor, in as much time as all the rest.
TORCH = (*PLAIN, "torch._dynamo", "trainer_adapter.handler.handler")
HTTP = (*PLAIN, "aiohttp.web", "shmbus.gateway.server")
#: Programs with one of these words need them.
TORCH_WORDS = ("torch", "trainer_adapter", "shmbus.engines", "shmbus.tensors", "shmbus.weights")
HTTP_WORDS = ("shmbus.gateway", "shmbus.web", '"proxy"')

#: What children that run a function need; tests' own modules are not on the path of their template.
FUNCTIONS = (
    "aiohttp.web",
    "bench.contest.child",
    "pytest",
    "sglang.srt.managers.io_struct",
    "shmbus.engines",
    "shmbus.relay.coordinator_party",
    "shmbus.relay.mirror_party",
    "shmbus.relay.sink_party",
    "shmbus.relay.source_party",
    "shmbus.relay.weights_party",
    "shmbus.tensors",
    "shmbus.weights.shared_model",
    "trainer_adapter.handler.handler",
)
#: Their context. A process has one template, which imports what was set last before it starts: so
#: all set the same.
TEMPLATE = multiprocessing.get_context("forkserver")
TEMPLATE.set_forkserver_preload([*FUNCTIONS])


def modules_for(program: str, arguments: list[str]) -> tuple[str, ...]:
    """What a program, by its text or its module's name, will import."""
    if "demo" in arguments or any(word in program for word in TORCH_WORDS):
        return TORCH
    return HTTP if any(word in program for word in HTTP_WORDS) else PLAIN


def environment() -> dict[str, str]:
    """This process's, without what no module of a server reads."""
    return {name: value for name, value in os.environ.items() if name not in NOT_READ}


class Streams(NamedTuple):
    """The files that are a child's streams; it writes from their beginning."""

    input: str
    output: str
    errors: str


class Forked:
    """A child of the server, with the part of `subprocess.Popen` that the suite uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._lock = threading.Lock()
        # It stays this process's number, alive or dead, until the server has reaped it.
        self._end = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._reap(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._reap(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._has_ended(timeout):
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._server.ask({"reap": self.pid})
                    os.close(self._end)
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))


class ForkServer:
    """The side of the server that a test talks to; `address` is where the server listens."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        self._asked = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
        self._socket.connect(address)

    def start(
        self,
        program: list[str],
        arguments: list[str],
        directory: Path,
        streams: Streams,
        more: dict[str, str],
    ) -> Forked:
        what = {"program": program, "arguments": arguments, "directory": str(directory)}
        given = {**os.environ, **more}
        return Forked(self, self.ask({**what, "streams": streams, "environment": given}))

    def ask(self, request: dict[str, Any]) -> Any:
        with self._lock:
            self._asked += 1
            self._socket.send(json.dumps({**request, "number": self._asked}).encode())
            while data := self._socket.recv(REQUEST_BYTES):
                number, answer = json.loads(data)
                # A watchdog may have ended the test that waited for an earlier one.
                if number == self._asked:
                    return answer
        raise ChildProcessError("the fork server ended")

    def close(self) -> None:
        self._socket.close()


class OwnServer(ForkServer):
    """A server that starts here, and ends with `close` or with this process."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # a name of the kernel's choice, without a file
            listener.listen()
            self.address: str = listener.getsockname().decode()
            argv = [sys.executable, "-u", "-X", "faulthandler", __file__]
            self._process = subprocess.Popen(
                [*argv, str(listener.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )
            super().__init__(self.address)

    def close(self) -> None:
        # By a word, and not by the end of the connection: a forked child of this process may still
        # hold one end.
        with contextlib.suppress(ConnectionError):  # it has died, and a test has told so
            self._socket.send(json.dumps({"end": True}).encode())
        self._process.wait()
        super().close()


_servers: dict[tuple[str, ...], ForkServer] = {}
_environment: dict[str, str] = {}


def share_servers() -> dict[str, str]:
    """Start servers for other processes, and return the address of each by its modules."""
    for modules in (PLAIN, TORCH, HTTP):
        if modules not in _servers:
            _servers[modules] = OwnServer(modules)
    return {" ".join(modules): server.address for modules, server in _servers.items()}


def use_servers(addresses: dict[str, str]) -> None:
    """Have children be forked by servers that another process shares."""
    _servers.update({tuple(words.split()): ForkServer(at) for words, at in addresses.items()})


def accept_environment() -> None:
    """Have children of this environment be forked; modules may read it when they are imported."""
    _environment.update(environment())


def fork(
    program: list[str],
    arguments: list[str],
    directory: Path,
    streams: Streams,
    text: str,
    more: dict[str, str],
) -> Forked | None:
    """Start ``[path of a script]`` or ``["-m", module]`` by a server, which starts if need be.

    `text` says what the program imports; `more` is what its environment has beside this process's.
    Returns None if no server was accepted for that environment.
    """
    if environment() != _environment or not more.keys() <= READ_LATER:
        return None
    needs = modules_for(text, arguments)
    if needs not in _servers:
        _servers[needs] = OwnServer(needs)
    return _servers[needs].start(program, arguments, directory, streams, more)


def end_servers() -> None:
    while _servers:
        _servers.popitem()[1].close()


# --- in the server


def load(modules: list[str], environment: dict[str, str]) -> None:
    """Import what children need, as they would in this environment."""
    os.environ.clear()
    # Else NumPy's library of matrices starts threads when it is imported.
    os.environ.update({**environment, "OPENBLAS_NUM_THREADS": "1"})
    # No child compiles; and what Triton's library says of objects that outlive it would be printed.
    sys.modules["triton"] = None  # type: ignore[assignment]
    for name in modules:
        # What an extra lacks here is said by the child that imports it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    del sys.modules["triton"]
    # What was imported is no child's garbage: one that ends would else visit all of it, and have
    # each page copied for that. Children with torch ended in a second of processor.
    gc.freeze()


def serve(listener: socket.socket, modules: list[str]) -> dict[str, Any]:
    """Fork and reap for all who connect; returns in each child, with what it shall run.

    The first one who connects is the process that started this, and ends it.
    """
    owner, _ = listener.accept()
    open_sockets = [listener, owner]
    loaded = False
    while True:
        for each in select.select(open_sockets, [], [])[0]:
            if each is listener:
                open_sockets.append(listener.accept()[0])
                continue
            try:
                data = each.recv(REQUEST_BYTES)
            except ConnectionError:
                data = b""
            request: dict[str, Any] = json.loads(data or "{}")
            if each is owner and (not data or "end" in request):
                sys.exit(0)
            if not data:
                open_sockets.remove(each)
                each.close()
                continue
            if "reap" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
            else:
                if not loaded:
                    load(modules, request["environment"])
                    loaded = True
                answer = os.fork()
                if answer == 0:
                    for each in open_sockets:
                        each.close()
                    return request
            with contextlib.suppress(ConnectionError):
                each.send(json.dumps([request["number"], answer]).encode())


def become(request: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate(request["streams"]):
        # Each has its end where the other one's is, if both are one file.
        how = os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY
        opened = os.open(path, how)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    program = request["program"]
    # A script finds what lies beside it, and a module what lies in the directory.
    sys.path[0] = os.path.dirname(program[0]) or request["directory"]
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [place for place in places if place and place not in sys.path]
    sys.argv = [program[-1], *request["arguments"]]


def main_of(path: str) -> tuple[CodeType, dict[str, Any]]:
    """Return a script's code, and the `__main__` that it runs in."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = path
    return compile(Path(path).read_bytes(), path, "exec"), vars(module)


if __name__ == "__main__":
    # A Ctrl-C is for the suite, which then ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The end of a process takes what a library holds; torch's destructors took as long as all else.
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    todo = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    become(todo)
    if todo["program"][0] == "-m":
        runpy.run_module(todo["program"][1], run_name="__main__", alter_sys=True)
    else:
        exec(*main_of(todo["program"][0]))
