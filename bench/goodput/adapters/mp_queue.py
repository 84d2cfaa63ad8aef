"""`multiprocessing.Queue`: a pickle of each group, through a pipe."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.goodput.adapters import About, Link, QueueEnd
from bench.goodput.party import Stub
from bench.goodput.scenario import Scenario
from bench.processes import context

__all__ = ["ABOUT", "link", "train", "work"]

ABOUT: Final = About(
    title="multiprocessing.Queue", packages=("numpy",),
    fairness="a group a message; promises nothing after a kill: a taken message is gone, and a "
    "lock dies with its holder",
)  # fmt: skip


@contextlib.contextmanager
def link(scenario: Scenario, root: Path) -> Iterator[Link]:
    """Make the queue."""
    yield Link(context().Queue(scenario.ahead_groups))


def work(address: Any, stub: Stub) -> None:
    """Put groups."""
    for _, answers in stub.groups():
        address.put(answers)
        stub.handed(*answers)
    address.close()
    address.join_thread()


@contextlib.contextmanager
def train(address: Any, stub: Stub, state: Any) -> Iterator[QueueEnd]:
    """Get groups."""
    yield QueueEnd(lambda timeout_s: address.get(True, timeout_s))
