"""Starts child programs of the suite as forks of processes with preloaded imports.

Imports take a quarter of a second, five quarters with torch; a fork begins in a hundredth.

Invariants:

- A child equals an executed process: its script is `__main__`, at the top of its stack; it owns
  arguments, directory, streams and environment, and ends like an interpreter, without destructors
  of C++ libraries. Signals, locks and descriptors behave the same.
- The workers of a run (pytest-xdist) share servers, which import at the first request and end with
  their starting process.
- A server has a single thread, and no open handle, segment, loop or socket of shmbus: a child
  inherits only modules.
- Fresh interpreters serve the rest: different environments, effects of an interpreter's start, and
  builds with points set beforehand.
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

#: A request: arguments and an environment.
REQUEST_BYTES = 1 << 20

#: Set by pytest for a test, or left behind by an import of Ray.
NOT_READ = frozenset({"PYTEST_CURRENT_TEST", "RAY_CLIENT_MODE"})

#: Read only after a child's own imports: children with these variables are forked, too.
READ_LATER = frozenset({"PYTHONPATH", "GLOO_SOCKET_IFNAME"})

#: Modules for every child, then for some.
COMMANDS = tuple(f"shmbus.cli.{module}" for module in dict.fromkeys(cli._COMMANDS.values()))
PLAIN = ("uvloop", "shmbus.handles.consumer", "shmbus.handles.feeder", *COMMANDS)
# Includes torch's imports at the first optimizer or loaded tensor: half of the whole time.
TORCH = (*PLAIN, "torch._dynamo", "trainer_adapter.handler.handler")
HTTP = (*PLAIN, "aiohttp.web", "shmbus.gateway.atropos_routes")
#: Words in a program that ask for these modules.
TORCH_WORDS = ("torch", "trainer_adapter", "shmbus.engines", "shmbus.tensors", "shmbus.weights")
HTTP_WORDS = ("shmbus.gateway", "shmbus.web", '"proxy"')

#: Modules for children that run a function; their template's path lacks the tests' own modules.
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
#: Their context. A process has a single template with the modules set last before its start: every
#: caller sets the same.
TEMPLATE = multiprocessing.get_context("forkserver")
TEMPLATE.set_forkserver_preload([*FUNCTIONS])


def modules_for(program: str, arguments: list[str]) -> tuple[str, ...]:
    """Return a program's imports, by its text or its module's name."""
    if "demo" in arguments or any(word in program for word in TORCH_WORDS):
        return TORCH
    return HTTP if any(word in program for word in HTTP_WORDS) else PLAIN


def environment() -> dict[str, str]:
    """Return this process's environment, without variables unread by modules of a server."""
    return {name: value for name, value in os.environ.items() if name not in NOT_READ}


class Streams(NamedTuple):
    """Files for a child's streams; the child writes from their beginning."""

    input: str
    output: str
    errors: str


class Forked:
    """A child of the server, with the suite's part of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._lock = threading.Lock()
        # The pid stays valid, alive or dead, until the server reaps the child.
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
    """A test's side of the server listening at `address`."""

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
                # A watchdog may have ended an earlier waiting test.
                if number == self._asked:
                    return answer
        raise ChildProcessError("the fork server ended")

    def close(self) -> None:
        self._socket.close()


class OwnServer(ForkServer):
    """A server started here, until `close` or the end of this process."""

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
        # Say so: the end of the connection would not do, since a forked child of this process may
        # still hold an end.
        with contextlib.suppress(ConnectionError):  # dead already, and reported by a test
            self._socket.send(json.dumps({"end": True}).encode())
        self._process.wait()
        super().close()


_servers: dict[tuple[str, ...], ForkServer] = {}
_environment: dict[str, str] = {}


def share_servers() -> dict[str, str]:
    """Start servers for other processes; return their addresses by modules."""
    for modules in (PLAIN, TORCH, HTTP):
        if modules not in _servers:
            _servers[modules] = OwnServer(modules)
    return {" ".join(modules): server.address for modules, server in _servers.items()}


def use_servers(addresses: dict[str, str]) -> None:
    """Use the servers of another process for forks of children."""
    _servers.update({tuple(words.split()): ForkServer(at) for words, at in addresses.items()})


def accept_environment() -> None:
    """Allow forks for children of this environment, which modules may read during their import."""
    _environment.update(environment())


def fork(
    program: list[str],
    arguments: list[str],
    directory: Path,
    streams: Streams,
    text: str,
    more: dict[str, str],
) -> Forked | None:
    """Start ``[path of a script]`` or ``["-m", module]`` by a server, itself started on demand."""
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
    """Import the children's modules in their environment."""
    os.environ.clear()
    # Otherwise NumPy's matrix library starts threads during its import.
    os.environ.update({**environment, "OPENBLAS_NUM_THREADS": "1"})
    # No child compiles; Triton's library would print about objects that outlive it.
    sys.modules["triton"] = None  # type: ignore[assignment]
    for name in modules:
        # A child reports a missing extra at its own import.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    del sys.modules["triton"]
    # Keep imports out of the children's garbage collection: a visit at the end copies every page;
    # children with torch ended in a second of processor.
    gc.freeze()


def serve(listener: socket.socket, modules: list[str]) -> dict[str, Any]:
    """Fork and reap for every connection; return in each child, with its task."""
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
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    for number, path in enumerate(request["streams"]):
        # Streams to a common file share their position.
        how = os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY
        opened = os.open(path, how)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    program = request["program"]
    # A script imports from its own folder, a module from the working directory.
    sys.path[0] = os.path.dirname(program[0]) or request["directory"]
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [place for place in places if place and place not in sys.path]
    sys.argv = [program[-1], *request["arguments"]]


def main_of(path: str) -> tuple[CodeType, dict[str, Any]]:
    """Return a script's code and its `__main__`."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = path
    return compile(Path(path).read_bytes(), path, "exec"), vars(module)


if __name__ == "__main__":
    # A Ctrl-C is for the suite, which then ends this server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The end of a process frees a library's memory; torch's destructors took as long as the rest.
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    todo = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    become(todo)
    if todo["program"][0] == "-m":
        runpy.run_module(todo["program"][1], run_name="__main__", alter_sys=True)
    else:
        exec(*main_of(todo["program"][0]))
