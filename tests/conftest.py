"""Common parts of the suite: bus names, child processes, seeds and deadlines.

Invariants:

- A run leaves no segment behind: bus names carry the pid of their run, or of its worker, and a
  segment of such a name fails the run.
- Files of tests run beside each other: a test looks only at its own names and pids.
- A run ends only its own processes.
- A wait has a deadline, and an error with the awaited event.
"""

import contextlib
import fcntl
import gc
import importlib.util
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fork_server import (
    Forked,
    Streams,
    accept_environment,
    end_servers,
    fork,
    share_servers,
    use_servers,
)

from shmbus import Bus, BusFullError, Consumer, Feeder, Group, Producer, Request
from shmbus.client.daemon_client import DaemonClient
from shmbus.segment.names import remove_dead_socket

# A shell's background job ignores Ctrl-C, as would its children; tests that interrupt children
# would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers (make test) share the files and have a core each at most: a second thread of torch would
# wait for the core, spinning.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
SHM_DIR = Path("/dev/shm")
SEGMENT_PREFIX = "shmbus."
RUN_PREFIX = f"test-{os.getpid()}-"

# Long enough for a loaded machine to start an interpreter with torch.
DEFAULT_DEADLINE_S = 60.0
# Factor of deadlines for a build slowed by a sanitizer.
PATIENCE = float(os.environ.get("SHMBUS_TEST_PATIENCE", "1"))
# Short beside any deadline, long enough to leave the processor to the awaited process.
POLL_INTERVAL_S = 0.005

Value = TypeVar("Value")


def _has(*names: str) -> bool:
    # A mere folder of the name, anywhere on the path, is no package.
    found = map(importlib.util.find_spec, names)
    return all(spec is not None and spec.origin is not None for spec in found)


# Environments of other projects lack extras of shmbus; see `make test-peers`.
_NEEDS = {"engines": ("aiohttp",), "gateway": ("aiohttp",), "web": ("aiohttp",)}
# A folder of tests/peers bears the name of its required package, with two exceptions.
_PACKAGES = {"atropos": "atroposlib", "recorder": "anthropic"}
_NEEDS |= {
    f"peers/{folder.name}": (_PACKAGES.get(folder.name, folder.name),)
    for folder in (ROOT / "tests/peers").iterdir()
}
_BROWSED = ("browser", "busy_page", "narrow_pages", "page_names", "site")
_NEEDS |= dict.fromkeys((f"web/test_{name}.py" for name in _BROWSED), ("playwright",))
collect_ignore = [folder for folder, needs in _NEEDS.items() if not _has(*needs)]
# Clusters of several nodes take the longest; `make test-relay` names their folder.
collect_ignore.append("peers/ray")


def wait_until(
    predicate: Callable[[], Value], timeout: float = DEFAULT_DEADLINE_S, what: str = ""
) -> Value:
    """Call `predicate` until its result is true, and return the result; `timeout` is in seconds."""
    deadline = time.monotonic() + timeout * PATIENCE
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            awaited = what or getattr(predicate, "__qualname__", repr(predicate))
            raise TimeoutError(f"waited {timeout:g} s for: {awaited}; last result: {value!r}")
        time.sleep(POLL_INTERVAL_S)


def open_descriptors() -> Counter[str]:
    """Targets of this process's descriptors: memory files by name, sockets by number."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        # The directory's own descriptor closed by now.
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return found


def takes_long(item: pytest.Item) -> bool:
    """Whether a test is marked slow, or has a longer watchdog than the default."""
    watchdog = item.get_closest_marker("timeout")
    return bool(item.get_closest_marker("slow")) or (
        watchdog is not None and watchdog.args[0] > float(item.config.getini("timeout") or 0)
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have long files run first, deadlines wait, and tests marked gpu skip without a device."""
    # A long file at the end would leave the remaining workers idle.
    long = {item.path for item in items if takes_long(item)}
    items.sort(key=lambda item: item.path not in long)
    for item in items:
        marker = item.get_closest_marker("timeout")
        if marker is not None and PATIENCE != 1:
            item.add_marker(pytest.mark.timeout(marker.args[0] * PATIENCE), append=False)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not importlib.import_module("torch").cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Accept the state after the imports of tests: their children's environment, no garbage."""
    accept_environment()
    if IS_WORKER:
        use_servers(session.config.workerinput["fork_servers"])  # type: ignore[attr-defined]
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Fail a file whose import leaves a socket open: its ResourceWarning comes after all tests."""
    before = open_descriptors()
    report = yield
    left = [name for name in open_descriptors() - before if name.startswith("socket:")]
    if left:
        report.outcome, report.longrepr = "failed", f"{collector.nodeid}: open: {left}"
    return report


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """Take back a test's changes of the environment, and its libraries'."""
    before = {**os.environ}
    yield
    if {**os.environ} != before:
        os.environ.clear()
        os.environ.update(before)


# --- buses

_bus_numbers = itertools.count()


def segments_named(prefix: str) -> list[Path]:
    patterns = (f"{SEGMENT_PREFIX}{prefix}*", f"shmbus-{prefix}*.sock", f"shmbus-*.{prefix}*")
    return sorted({path for pattern in patterns for path in SHM_DIR.glob(pattern)})


@pytest.fixture
def bus_name() -> Iterator[str]:
    """A unique name; its segment is removed after the test."""
    name = f"{RUN_PREFIX}{next(_bus_numbers)}-{secrets.token_hex(4)}"
    yield name
    # A test that kills a bus's owner can't remove the bus the regular way.
    for path in segments_named(name):
        bus = path.name.removeprefix("shmbus-").removesuffix(".sock")
        if name in (bus, bus.partition(".")[2]) or path.name.startswith(f"{SEGMENT_PREFIX}{name}."):
            path.unlink(missing_ok=True)
    for kind in ("channel", "weights", "shared"):
        remove_dead_socket(kind, name)


_left_behind: list[str] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    end_servers()
    for path in segments_named(RUN_PREFIX):
        _left_behind.append(path.name)
        path.unlink(missing_ok=True)
    if IS_WORKER:
        session.config.workeroutput["left_behind"] = _left_behind  # type: ignore[attr-defined]
    elif _left_behind and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Share the fork servers among the workers: a start takes seconds of processor."""
    node.workerinput["fork_servers"] = share_servers()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over a worker's list of leftovers: its own exit status counts for nothing."""
    _left_behind.extend(getattr(node, "workeroutput", {}).get("left_behind", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_behind:
        terminalreporter.section("segments left behind", red=True, bold=True)
        for name in _left_behind:
            terminalreporter.line(f"{SHM_DIR / name} (removed now; some test did not)")


# --- randomness


@pytest.fixture
def seed() -> int:
    """A fresh seed, or SHMBUS_TEST_SEED's; pytest shows the seed of a failed test."""
    given = os.environ.get("SHMBUS_TEST_SEED")
    value = int(given, 0) if given else secrets.randbits(32)
    print(f"seed {value}; SHMBUS_TEST_SEED={value} plays it again")
    return value


# --- processes


class Child:
    """A process of a test, with its output so far on either stream."""

    def __init__(self, popen: subprocess.Popen[bytes] | Forked, log: Path) -> None:
        self.popen = popen
        # A file rather than a pipe: a talkative child never waits for the test to read.
        self._log = log

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def expect(self, line: str, timeout: float = DEFAULT_DEADLINE_S) -> None:
        """Wait for the whole line `line`; a child that ends without it is an error."""

        def printed_or_ended() -> bool:
            return line in self._whole_lines() or not self.running

        wait_until(printed_or_ended, timeout, f"{line!r} from a child\n{self.output()}")
        if line not in self._whole_lines():
            raise AssertionError(
                f"a child ended with status {self.popen.returncode} before it printed {line!r}:\n"
                f"{self.output()}"
            )

    def _whole_lines(self) -> list[str]:
        return self.output().split("\n")[:-1]

    def send_signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def wait(self, timeout: float = DEFAULT_DEADLINE_S) -> int:
        try:
            return self.popen.wait(timeout * PATIENCE)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"waited {timeout:g} s for the end of a child that printed:\n{self.output()}"
            ) from None

    def finish(self, timeout: float = DEFAULT_DEADLINE_S) -> str:
        """Wait for its end, require exit status 0, and return its output."""
        status = self.wait(timeout)
        if status != 0:
            raise AssertionError(f"a child ended with status {status}:\n{self.output()}")
        return self.output()


def execute(arguments: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    # Unbuffered, to show a line as soon as printed; and with the stacks of a child killed by a
    # signal.
    argv = [sys.executable, "-u", "-X", "faulthandler", *arguments]
    with log.open("wb") as stream:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            cwd=log.parent,
        )


class Spawner:
    """Starts Python processes, and ends them with the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: list[Child] = []

    def script(
        self,
        text: str,
        *args: object,
        env: dict[str, str] | None = None,
        fresh: bool = False,
        until: str = "",
    ) -> Child:
        """Start `text` with `args` in its `sys.argv[1:]`, and wait until it prints `until`."""
        path = self._directory / f"child-{len(self._children)}.py"
        path.write_text(text)
        child = self._start([str(path)], text, args, env, fresh)
        if until:
            child.expect(until)
        return child

    def holder(self, text: str, *args: object) -> Child:
        """Start `text`, and return after its last line; its segments stay until the kill."""
        end = "import time\nprint('holds', flush=True)\ntime.sleep(600)\n"
        return self.script(f"{text.rstrip()}\n{end}", *args, until="holds")

    def file(self, path: Path, *args: object, env: dict[str, str] | None = None) -> Child:
        return self._start([str(path)], path.read_text(), args, env, fresh=False)

    def module(
        self, name: str, *args: object, env: dict[str, str] | None = None, fresh: bool = False
    ) -> Child:
        found = None if name.startswith("shmbus") else importlib.util.find_spec(name)
        text = Path(found.origin).read_text() if found and found.origin else name
        return self._start(["-m", name], text, args, env, fresh)

    def _start(
        self,
        program: list[str],
        text: str,
        args: tuple[object, ...],
        env: dict[str, str] | None,
        fresh: bool,
    ) -> Child:
        arguments = [*map(str, args)]
        log = self._directory / f"child-{len(self._children)}.log"
        log.touch()
        streams = Streams(os.devnull, str(log), str(log))
        forked = not fresh and fork(program, arguments, log.parent, streams, text, env or {})
        child = Child(forked or execute([*program, *arguments], log, env or {}), log)
        self._children.append(child)
        return child

    def end_all(self) -> None:
        for number, child in enumerate(self._children):
            if child.running:
                child.kill()
            # Captured by pytest, and shown for a failed test.
            print(f"--- child {number}, exit status {child.popen.returncode}\n{child.output()}")


SERVE = "import sys; from shmbus.cli import main; sys.exit(main())"


class Daemon:
    def __init__(self, spawner: Spawner, name: str, options: tuple[object, ...]) -> None:
        self.name = name
        self._spawner = spawner
        self._options = options
        self.child = self.start()

    def start(self) -> Child:
        self.child = self._spawner.script(SERVE, "serve", self.name, *self._options)
        wait_until(
            lambda: " serving " in self.child.output() or not self.child.running,
            what=f"the daemon of {self.name} to serve",
        )
        if not self.child.running:
            raise AssertionError(f"the daemon ended:\n{self.child.output()}")
        return self.child

    def kill(self) -> None:
        self.child.kill()

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> str:
        self.child.send_signal(signal.SIGTERM)
        return self.child.finish()


@pytest.fixture
def daemon(spawn: Spawner, bus_name: str) -> Callable[..., Daemon]:
    """Start a daemon: `daemon("--capacity", "16MiB")`; it is killed after the test."""

    def start(*options: object, name: str = bus_name) -> Daemon:
        return Daemon(spawn, name, options)

    return start


def _servers(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Start servers; a logged traceback fails the test."""
    made: list[Any] = []

    def start(*given: object, **named: str) -> Any:
        made.append(make(*given, **named))
        return made[-1]

    yield start
    for each in made:
        assert "Traceback" not in each.child.output(), each.child.output()


@pytest.fixture
def gateway_of(spawn: Spawner, bus_name: str) -> Iterator[Callable[..., Any]]:
    """Start a gateway: `gateway_of("--create", "1MiB")`; it is killed after the test."""
    from gateways import Gateway

    yield from _servers(lambda *options, name=bus_name: Gateway(spawn, name, options))


@pytest.fixture
def gateway(gateway_of: Callable[..., Any]) -> Any:
    return gateway_of("--create", "16MiB")


@pytest.fixture
def web(spawn: Spawner) -> Iterator[Callable[..., Any]]:
    """Start the server of the page: `web(bus_name)`; it is killed after the test."""
    from pages import Web

    yield from _servers(lambda *names: Web(spawn, names))


def client_of(consumer: Consumer) -> DaemonClient:
    """Return the client of a Consumer that found a daemon: the suite's hook into their dialogue."""
    source = consumer._source
    assert isinstance(source, DaemonClient)
    return source


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    """A small bus."""
    with Bus.create(bus_name, capacity="4MiB", max_producers=4) as handle:
        yield handle


@pytest.fixture
def producer(bus: Bus) -> Iterator[Producer]:
    with Producer(bus.name) as handle:
        yield handle


@pytest.fixture
def feeder(bus: Bus) -> Iterator[Feeder]:
    with Feeder(bus.name) as handle:
        yield handle


@contextlib.contextmanager
def ends_of(bus: Bus | str, **options: Any) -> Iterator[tuple[Producer, Consumer]]:
    """Both ends of a bus, or of its name, ended with the block; `options` are the consumer's."""
    name = bus if isinstance(bus, str) else bus.name
    handle = contextlib.nullcontext() if isinstance(bus, str) else bus
    with handle, Producer(name) as producer, Consumer(name, **options) as consumer:
        yield producer, consumer


@contextlib.contextmanager
def two_ranks(name: str) -> Iterator[tuple[Consumer, Consumer]]:
    with (
        Consumer(name, rank=0, world_size=2) as zero,
        Consumer(name, rank=1, world_size=2) as one,
    ):
        yield zero, one


def next_request(producer: Producer, timeout: float = DEFAULT_DEADLINE_S) -> Request:
    request = producer.requests.next(timeout)
    assert request is not None
    return request


def next_retry(producer: Producer) -> Request:
    """Wait for the retry request of a failed sample."""
    (request,) = wait_until(producer.requests.retries)
    return request


def take_groups(consumer: Consumer, count: int = 1, **options: Any) -> list[Group]:
    """Take exactly so many groups, in any number of calls."""
    groups: list[Group] = []

    def have_come() -> bool:
        groups.extend(consumer.take(count - len(groups), timeout=0.1, **options))
        return len(groups) == count

    wait_until(have_come, what=f"{count} groups")
    return groups


def take_rest(consumer: Consumer) -> list[str]:
    """Take and acknowledge every complete group there is, and return their ids."""
    taken: list[str] = []
    while groups := consumer.take(64, timeout=0):
        taken += [group.instance_id for group in groups]
        consumer.ack(groups)
    return taken


def fill(put: Callable[[int], object]) -> int:
    """Call `put` with number after number until the bus is full; return the last number."""
    for number in itertools.count():
        try:
            put(number)
        except BusFullError:
            return number
    raise AssertionError


def work_until(consumer: Consumer, condition: Callable[[], object]) -> None:
    """Let the consumer work, which has no group to take, until the condition holds."""

    def holds() -> object:
        assert consumer.take(timeout=0.02) == []
        return condition()

    wait_until(holds)


def keys_of(batch: Any) -> list[str]:
    return [group.instance_id for group in batch.groups]


def train_next(handler: Any, timeout: float = 30.0) -> list[str]:
    """Acknowledge a handler's next batch, and return the ids of its groups."""
    batch = handler.next_batch(timeout)
    handler.ack(batch)
    return keys_of(batch)


@pytest.fixture
def spawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawner]:
    """Start real processes: `spawn.script(text, *args)` or `spawn.module(name, *args)`."""
    spawner = Spawner(tmp_path_factory.mktemp("children"))
    try:
        yield spawner
    finally:
        spawner.end_all()


def together(work: Callable[..., object], calls: Iterable[Any]) -> None:
    """Call a function with each value at once, in a thread each, and wait for the threads."""
    values = [*calls]
    with ThreadPoolExecutor(len(values)) as pool:
        for call in [pool.submit(work, value) for value in values]:
            call.result()


@contextlib.contextmanager
def beside(work: Callable[..., Value], *given: Any, **named: Any) -> Iterator[Future[Value]]:
    """Call a function in a thread beside the block, and wait for the call's end behind it."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(work, *given, **named)
        yield call
        call.result()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small matrices are slower on several threads, above all beside busy neighbours."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- builds


@pytest.fixture(scope="session")
def failpoint_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a tree with points in its extension, once for the workers of a run."""
    base = tmp_path_factory.getbasetemp()
    tree = (base.parent if IS_WORKER else base) / "failpoints"
    with tree.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.exists():
            half_done = tree.with_suffix(".new")
            _build_with_failpoints(half_done)
            half_done.rename(tree)
    return tree


def _build_with_failpoints(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT / "shmbus", tree / "shmbus")
    (tree / "shmbus_ext").mkdir()
    for path in (ROOT / "shmbus_ext").glob("*.py*"):
        shutil.copy(path, tree / "shmbus_ext")
    argv = [sys.executable, "setup.py", "--quiet", "build_ext"]
    argv += ["--build-lib", str(tree), "--build-temp", str(tree / "objects")]
    env = {**os.environ, "SHMBUS_FAILPOINTS": "1", "SHMBUS_SANITIZE": ""}
    subprocess.run(argv, cwd=ROOT, env=env, check=True, capture_output=True, timeout=110 * PATIENCE)
