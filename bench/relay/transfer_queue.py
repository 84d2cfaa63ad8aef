"""TransferQueue over the same two nodes: put by one, got by the other, through its storage units.

A sample is moved twice there: to a unit, and from that one to whoever trains on it. Its units are
on the receiver's node, so that one of the two is local, as with a relay; or on every node, as they
are by default.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import ray

from bench.relay.bounds import RECORD
from bench.relay.cluster import Account, on_side, pid_of

__all__ = ["transfer_queue"]

PARTITION: Final = "train"
TOKENS: Final = 2048
#: Trajectories of one call: fewer cost more a trajectory, more cost more memory only.
BATCH: Final = 256
#: Batches under way: one that is put, one that is got, one between them.
AT_ONCE: Final = 3
WARM_BATCHES: Final = 4
BATCHES: Final = 40
#: Units: two a node, as its configuration advises.
UNITS: Final = {"at the receiver": ("right", 2), "on all three nodes": (None, 6)}


def _client() -> Any:
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    import transfer_queue as found

    found.init()
    return found


class Receiver:
    """Gets batches, and clears them."""

    def __init__(self) -> None:
        self._queue = _client()

    def pid(self) -> int:
        """Return its process."""
        return os.getpid()

    def take(self, meta: Any) -> int:
        """Get what was put under this; return how many trajectories they are."""
        batch = self._queue.kv_batch_get_by_meta(meta)
        count = len(meta.keys)
        for name in ("tokens", "mask", "logprobs"):
            rows = batch[name].unbind(0)  # which may be one tensor, or one of each
            assert len(rows) == count and rows[-1].numel() == TOKENS
        self._queue.kv_clear(meta.keys, PARTITION)
        return count


class Sender:
    """Puts batches, and has the other side get them."""

    def __init__(self) -> None:
        self._queue = _client()
        import tensordict
        import torch

        fields = {
            "tokens": torch.zeros(BATCH, TOKENS, dtype=torch.int32),
            "mask": torch.ones(BATCH, TOKENS, dtype=torch.uint8),
            "logprobs": torch.zeros(BATCH, TOKENS),
        }
        self._batch = tensordict.TensorDict(fields, batch_size=BATCH)
        self._tags = [{"score": 1.0, "policy_version": 3}] * BATCH
        self._number = 0

    def pid(self) -> int:
        """Return its process."""
        return os.getpid()

    def send(self, receiver: Any, batches: int) -> float:
        """Put so many batches; return the seconds until the last one was got and cleared."""
        began, under_way = time.perf_counter(), []
        for _ in range(batches):
            keys = [f"{self._number}/{index}" for index in range(BATCH)]
            self._number += 1
            meta = self._queue.kv_batch_put(keys, PARTITION, self._batch, self._tags)
            under_way.append(receiver.take.remote(meta))
            if len(under_way) == AT_ONCE:
                assert ray.get(under_way.pop(0)) == BATCH
        assert ray.get(under_way) == [BATCH] * len(under_way)
        return time.perf_counter() - began


@contextmanager
def _running(resource: str | None, units: int) -> Iterator[None]:
    import transfer_queue as found

    storage = {"num_data_storage_units": units, "required_node_resource": resource}
    found.init({"backend": {"SimpleStorage": storage}})
    try:
        yield
    finally:
        found.close()


def _own_processes(made: Any) -> dict[int, str]:
    """Return the processes of its units and its controller, which are children of our raylets."""
    raylets = {
        info.process.pid for node in made.list_all_nodes() for info in node.all_processes["raylet"]
    }
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            title = (path / "cmdline").read_text()
        except OSError:
            continue
        for kind in ("SimpleStorageUnit", "TransferQueueController"):
            if parent in raylets and title.startswith("ray::") and kind in title:
                found[int(path.name)] = kind
    return found


def _measure(made: Any) -> dict[str, Any]:
    receiver, sender = on_side(Receiver, "right"), on_side(Sender, "left")
    ends = {pid_of(sender): "sender", pid_of(receiver): "receiver"}
    ray.get(sender.send.remote(receiver, WARM_BATCHES))
    account = Account(made, {**_own_processes(made), **ends})
    count = BATCHES * BATCH
    took_s, spent = account.over(
        count * RECORD, lambda: float(ray.get(sender.send.remote(receiver, BATCHES)))
    )
    for actor in (receiver, sender):
        ray.kill(actor)
    return {
        "per_s": count / took_s,
        "gb_per_s": count * RECORD / took_s / 1e9,
        "cpu_s_per_gb": spent,
    }


def transfer_queue(made: Any) -> dict[str, Any]:
    """Measure it with its units at the receiver, and on all nodes; or say why it is not there."""
    if importlib.util.find_spec("transfer_queue") is None:
        return {"left out": "TransferQueue is not installed: pip install TransferQueue"}
    said: dict[str, Any] = {}
    for where, (resource, units) in UNITS.items():
        with _running(resource, units):
            said[where] = _measure(made)
    said["per_s"] = max(said[where]["per_s"] for where in UNITS)
    return said
