"""TransferQueue, verl's store: keys with tags, listed by the trainer and cleared when trained."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.contenders import ray_objects
from bench.goodput.adapters import About, End, Link, kill_one
from bench.goodput.party import Stub
from bench.goodput.scenario import Scenario

__all__ = ["ABOUT", "link", "train", "work"]

ABOUT: Final = About(
    title="TransferQueue, key-value interface", packages=("TransferQueue", "ray", "torch"),
    environment="ray",
    fairness="a key an answer, tagged by group; keys are cleared after the checkpoint, later than "
    "verl does; promises nothing after the death of a storage unit",
)  # fmt: skip
PARTITION: Final = "train"
POLL_S: Final = 0.02


def _attach(address: str) -> Any:
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    ray_objects.attach(address)
    import transfer_queue

    transfer_queue.init()
    return transfer_queue


@contextlib.contextmanager
def link(scenario: Scenario, root: Path) -> Iterator[Link]:
    """Run Ray, controller and storage units."""
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    with ray_objects.cluster() as address:
        import transfer_queue

        transfer_queue.init()
        yield Link(address, {"transport": lambda _: kill_one(b"ray::SimpleStorageUnit")})
    # In place of transfer_queue.close(), which waits for killed units for ever.
    for name in [name for name in sys.modules if name.startswith("transfer_queue")]:
        del sys.modules[name]


def work(address: Any, stub: Stub) -> None:
    """Put answers, each under a key."""
    queue, plan = _attach(address), stub.scenario
    # Trained keys stay until the checkpoint.
    most = (plan.ahead + plan.save_every) * plan.step_samples
    for group, answers in stub.groups():
        while len(queue.kv_list(PARTITION).get(PARTITION, {})) >= most and not stub.over:
            time.sleep(POLL_S)
        _put(queue, group, answers)
        stub.handed(*answers)


def _put(queue: Any, group: str, answers: list[NDArray[Any]]) -> None:
    import torch
    from tensordict import TensorDict

    rows = [torch.from_numpy(tokens) for tokens in answers]
    tokens = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    keys = [f"{group}/{index}" for index in range(len(answers))]
    tags = [{"group": group}] * len(answers)
    queue.kv_batch_put(keys, PARTITION, TensorDict({"tokens": tokens}, len(answers)), tags)


class _End(End):
    def __init__(self, queue: Any, scenario: Scenario, trained: set[str]) -> None:
        self._queue, self._scenario = queue, scenario
        self._done: set[str] = trained
        self._taken: set[str] = set()

    def take(self, timeout_s: float) -> list[NDArray[Any]]:
        """Return the answers of one complete group."""
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit:
            groups: dict[str, list[str]] = {}
            for key, tag in self._queue.kv_list(PARTITION).get(PARTITION, {}).items():
                # A key is listed before its tag.
                if "group" in tag and key not in self._taken and key not in self._done:
                    groups.setdefault(tag["group"], []).append(key)
            for keys in groups.values():
                if len(keys) == self._scenario.group_size:
                    found = self._queue.kv_batch_get(keys, PARTITION, ["tokens"])["tokens"]
                    self._taken.update(keys)
                    return [np.asarray(each, np.int32) for each in found.unbind(0)]
            time.sleep(POLL_S)
        return []

    def state(self) -> Any:
        """Return the trained keys before their removal."""
        return self._taken

    def saved(self) -> None:
        """Clear the trained keys."""
        if self._taken:
            self._queue.kv_clear(list(self._taken), PARTITION)
        self._done, self._taken = self._taken, set()


@contextlib.contextmanager
def train(address: Any, stub: Stub, state: Any) -> Iterator[_End]:
    """Attach, and clear the keys of the checkpoint."""
    queue = _attach(address)
    trained: set[str] = state or set()
    if left := trained & set(queue.kv_list(PARTITION).get(PARTITION, {})):
        queue.kv_clear(list(left), PARTITION)
    yield _End(queue, stub.scenario, trained)
