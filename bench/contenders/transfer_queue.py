"""TransferQueue: kv_batch_put and kv_batch_get, on its own storage units, over Ray and zmq."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.contenders import mp_queue, ray_objects
from bench.contenders.base import Contender, Received
from bench.workload import Source, Workload

__all__ = ["CONTENDER", "host", "link", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="TransferQueue",
    title="TransferQueue, kv_batch_put and get",
    packages=("TransferQueue", "ray", "tensordict", "torch"),
    environment="ray",
    per_second=1_500.0,
    copies=6,
    copied="into a batch, into the socket, out of it into the storage unit, into the answer's "
    "socket, out of it, out of the batch",
    favour="64 trajectories a call; the keys are handed to the consumer by a queue beside it, so "
    "that it need not list them; tensors of one length are stacked",
)

PARTITION: Final = "train"
FIELDS: Final = ("tokens", "loss_mask", "logprobs")
#: Trajectories of a call.
BATCH: Final = 64


@contextlib.contextmanager
def host() -> Iterator[None]:
    """Run Ray, controller and storage for every link of this process."""
    with _storage() as address:
        _running.append(address)
        try:
            yield
        finally:
            _running.pop()


_running: list[str] = []


@contextlib.contextmanager
def _storage() -> Iterator[str]:
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

    with ray_objects.cluster() as address:
        import transfer_queue

        transfer_queue.init()
        try:
            yield address
        finally:
            transfer_queue.close()


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[Any]:
    """Make the queue of keys, and without a host the rest."""
    room = max(1, workload.room // BATCH)
    with contextlib.nullcontext(_running[0]) if _running else _storage() as address:
        yield address, multiprocessing.get_context("spawn").Queue(room)


def _attach(address: str) -> Any:
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    ray_objects.attach(address)
    import transfer_queue

    transfer_queue.init()
    return transfer_queue


class _Sender:
    def __init__(self, transfer_queue: Any, keys: Any, workload: Workload) -> None:
        import tensordict
        import torch

        self._torch = torch
        self._tensordict = tensordict.TensorDict
        self._put = transfer_queue.kv_batch_put
        self._keys = keys
        self._tags = {"score": 1.0, "policy_version": 3}
        self._held: list[tuple[str, Source]] = []
        self._number = 0

    def send(self, instance_id: str, index: int, source: Source) -> None:
        # A repeated prompt needs a new key, to keep its earlier samples.
        self._held.append((f"{instance_id}/{index}/{self._number}", source))
        self._number += 1
        if len(self._held) >= BATCH:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        keys = [key for key, _ in self._held]
        columns = zip(*[source for _, source in self._held], strict=True)
        fields = {
            name: self._torch.stack([self._torch.from_numpy(array) for array in column])
            for name, column in zip(FIELDS, columns, strict=True)
        }
        batch = self._tensordict(fields, batch_size=len(keys))
        meta = self._put(keys, PARTITION, batch, [self._tags] * len(keys))
        self._held = []
        self._keys.put(meta)


class _Receiver(mp_queue.QueueReceiver):
    def __init__(self, transfer_queue: Any, keys: Any) -> None:
        super().__init__(keys)
        self._transfer_queue = transfer_queue
        self._metas: list[Any] = []

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        return [one for meta in self.get(timeout_s) for one in self._fetch(meta)]

    def _fetch(self, meta: Any) -> list[Received]:
        self._metas.append(meta)
        batch = self._transfer_queue.kv_batch_get_by_meta(meta)
        columns = [batch[name].unbind(0) for name in FIELDS]
        received = []
        for key, *tensors in zip(meta.keys, *columns, strict=True):
            instance_id, index, _ = key.rsplit("/", 2)
            received.append((instance_id, int(index), tuple([one.numpy() for one in tensors])))
        return received

    def done(self) -> None:
        for meta in self._metas:
            self._transfer_queue.kv_clear(meta.keys, PARTITION)
        self._metas = []


@contextlib.contextmanager
def sender(address: Any, workload: Workload, number: int) -> Iterator[_Sender]:
    """Send from this process, a driver by itself."""
    ray_address, keys = address
    yield _Sender(_attach(ray_address), keys, workload)
    keys.close()
    keys.join_thread()


@contextlib.contextmanager
def receiver(address: Any, workload: Workload) -> Iterator[_Receiver]:
    """Receive in this process, a driver by itself."""
    ray_address, keys = address
    yield _Receiver(_attach(ray_address), keys)
