"""shmbus, embedded: prompts from the trainer, answers of any worker, batches by the handler."""

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.goodput.adapters import About, End, Link
from bench.goodput.party import Stub
from bench.goodput.scenario import Scenario

__all__ = ["ABOUT", "SHMBUS_FAIRNESS", "bus", "link", "train", "work"]

SHMBUS_FAIRNESS: Final = (
    "the trainer offers prompts, a failed sample is tried again, batches are acknowledged after "
    "the checkpoint; an answer in a dying worker's hands is generated anew"
)
ABOUT: Final = About(
    title="shmbus, embedded", packages=("shmbus", "numpy"), offers=True, fairness=SHMBUS_FAIRNESS
)
CAPACITY: Final = "8MiB"
NEXT_S: Final = 0.5
ATTACH_S: Final = 60.0
RETRIES: Final = 16


@contextlib.contextmanager
def bus(suffix: str = "") -> Iterator[str]:
    """Create a bus; yield the name."""
    import shmbus

    name = f"goodput-{os.getpid()}-{secrets.token_hex(3)}{suffix}"
    shmbus.Bus.create(name, CAPACITY).close()
    try:
        yield name
    finally:
        shmbus.unlink(name)


@contextlib.contextmanager
def link(scenario: Scenario, root: Path) -> Iterator[Link]:
    """Create the bus."""
    with bus() as name:
        yield Link((name, name, False))


def work(address: Any, stub: Stub) -> None:
    """Answer prompts."""
    import shmbus

    with shmbus.Producer(address[0], wait=ATTACH_S) as producer:
        while not stub.over:
            request = producer.requests.next(timeout=NEXT_S)
            if request is None:
                continue
            tokens = stub.answer()
            size = len(tokens)
            wanted = producer.requests.answer(
                request, score=float(request.index), policy_version=0, tokens=tokens,
                loss_mask=np.ones(size, np.uint8), logprobs=np.zeros(size, np.float32),
            )  # fmt: skip
            if wanted:
                stub.handed(tokens)


class _End(End):
    def __init__(self, handler: Any, stub: Stub, offered: int) -> None:
        self._handler = handler
        handler.offer(
            self._prompts(stub, offered), ahead=stub.scenario.ahead,
            group_size=stub.scenario.group_size,
        )  # fmt: skip

    @staticmethod
    def _prompts(stub: Stub, offered: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in itertools.count():
            if number >= offered and stub.stopping:
                return
            yield number, {}

    def take(self, timeout_s: float) -> list[NDArray[Any]]:
        """Return the answers of a batch."""
        try:
            batch = self._handler.next_batch(timeout_s)
        except TimeoutError:
            return []
        borders = batch.cu_seqlens.tolist()
        return [batch.tokens[a:b].numpy() for a, b in itertools.pairwise(borders)]

    def state(self) -> Any:
        """Return the handler's state."""
        return self._handler.state_dict()

    def saved(self) -> None:
        """Acknowledge all batches."""
        for batch in list(self._handler.out):
            self._handler.ack(batch)


@contextlib.contextmanager
def train(address: Any, stub: Stub, state: Any) -> Iterator[_End]:
    """Open the handler, at the checkpoint."""
    from trainer_adapter import OnlineDataHandler

    _, name, daemon = address
    # A daemon has the policy of its command line.
    policy: Any = {} if daemon else {"sample_retries": RETRIES}
    with OnlineDataHandler(
        name, groups_per_batch=stub.scenario.groups_a_step, daemon=daemon, **policy
    ) as handler:
        if state is not None:
            handler.load_state_dict(state)
        yield _End(handler, stub, state["offer"]["position"] if state else 0)
