"""Ray: ray.put by the producers, ray.get by the consumer, and an actor that hands over the refs."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.contenders.base import Contender, Received, Receiver
from bench.workload import Source, Workload

__all__ = ["CONTENDER", "attach", "cluster", "host", "link", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="ray",
    title="Ray, put and get",
    packages=("ray", "numpy"),
    environment="ray",
    per_second=4_000.0,
    copies=1,
    copied="into the object store",
    favour="eight trajectories an object; refs go through one actor, several at a time; the "
    "producer does not wait for each of its calls; objects that died with their owner are left "
    "out, and the run goes on; no dashboard",
    ordered=False,
)

NAMESPACE: Final = "shmbus-bench"
MAILBOX: Final = "mailbox"
#: Loopback address of every server, out of reach of the network. Without a variable named for
#: other uses, Ray replaces the address by the machine's.
LOOPBACK: Final = "127.0.0.1"
NO_CLUSTER: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
#: Trajectories of an object: a group's worth.
OBJECT: Final = 8
#: A producer's unanswered calls to the mailbox.
UNDER_WAY: Final = 8
#: Bytes of the object store: room for the largest measured capacity, and to spare.
OBJECT_STORE_BYTES: Final = 1 << 30


class _Mailbox:
    """Runs as an actor: holds refs until the consumer asks for them."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._refs: list[Any] = []
        self._changed = asyncio.Condition()
        self._over = asyncio.Event()

    async def push(self, refs: list[Any]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._refs) < self._room)
            self._refs += refs
            self._changed.notify_all()

    async def pull(self, timeout_s: float | None) -> list[Any]:
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._refs), timeout_s)
            refs, self._refs = self._refs, []
            self._changed.notify_all()
            return refs

    async def end(self) -> None:
        self._over.set()

    async def wait_for_end(self) -> None:
        await self._over.wait()


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Run a Ray of one node on the loopback interface; yield its address."""
    os.environ.update(NO_CLUSTER)
    import ray

    # Short, since Ray makes the paths of its Unix sockets from the folder's.
    with tempfile.TemporaryDirectory(prefix="shmbus-ray-") as directory:
        context = ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            namespace=NAMESPACE,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address=LOOPBACK,
            _temp_dir=directory,
        )
        try:
            yield context.address_info["address"]
        finally:
            ray.shutdown()


@contextlib.contextmanager
def host() -> Iterator[None]:
    """Run Ray for every link of this process: a start takes seconds."""
    with cluster() as address:
        _running.append(address)
        try:
            yield
        finally:
            _running.pop()


_running: list[str] = []


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[str]:
    """Run the mailbox, and without a host Ray as well."""
    import ray

    with contextlib.nullcontext(_running[0]) if _running else cluster() as address:
        room = max(1, workload.room // OBJECT)
        actor = ray.remote(num_cpus=0)(_Mailbox)
        mailbox = actor.options(name=MAILBOX, max_concurrency=1000).remote(room)
        ray.get(mailbox.push.remote([]))
        try:
            yield address
        finally:
            ray.kill(mailbox)


def attach(address: str) -> None:
    """Make this process a driver of a running cluster, on the loopback interface too."""
    os.environ.update(NO_CLUSTER)
    import ray

    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address=LOOPBACK,
    )


def _attach(address: str) -> Any:
    import ray

    attach(address)
    return ray.get_actor(MAILBOX)


class _Sender:
    def __init__(self, mailbox: Any, workload: Workload) -> None:
        import ray

        self._ray = ray
        self._mailbox = mailbox
        self._size = OBJECT if workload.bytes_each < 1 << 20 else 1
        self._held: list[Any] = []
        self._under_way: list[Any] = []

    def send(self, instance_id: str, index: int, source: Source) -> None:
        self._held.append((instance_id, index, 1.0, 3, source))
        if len(self._held) >= self._size:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        ref = self._ray.put(self._held)
        self._held = []
        self._under_way.append(self._mailbox.push.remote([ref]))
        if len(self._under_way) >= UNDER_WAY:
            _, self._under_way = self._ray.wait(self._under_way, num_returns=1)


class _Receiver(Receiver):
    # An object goes with the last array over its memory.
    def __init__(self, mailbox: Any) -> None:
        import ray

        self._ray = ray
        self._mailbox = mailbox

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        refs = self._ray.get(self._mailbox.pull.remote(timeout_s))
        try:
            objects = self._ray.get(refs)
        except self._ray.exceptions.ObjectLostError:
            objects = self._what_is_left(refs)
        return [(one[0], one[1], one[-1]) for held in objects for one in held]

    def _what_is_left(self, refs: Sequence[Any]) -> list[Any]:
        """Get the refs with a living owner."""
        objects = []
        for ref in refs:
            with contextlib.suppress(self._ray.exceptions.ObjectLostError):
                objects.append(self._ray.get(ref))
        return objects


@contextlib.contextmanager
def sender(address: str, workload: Workload, number: int) -> Iterator[_Sender]:
    """Send from this process, a driver of its own."""
    import ray

    mailbox = _attach(address)
    yield _Sender(mailbox, workload)
    # An object dies with its owner, even before the consumer's fetch.
    ray.get(mailbox.wait_for_end.remote())
    ray.shutdown()


@contextlib.contextmanager
def receiver(address: str, workload: Workload) -> Iterator[_Receiver]:
    """Receive in this process, a driver of its own."""
    import ray

    mailbox = _attach(address)
    yield _Receiver(mailbox)
    ray.get(mailbox.end.remote())
    ray.shutdown()
