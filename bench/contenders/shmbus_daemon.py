"""shmbus through its daemon: `shmbus serve` reads and groups, the consumer leases from it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.contenders import shmbus_embedded
from bench.contenders.base import Contender, started
from bench.contenders.shmbus_embedded import receiver, sender
from bench.workload import Timed, Workload

__all__ = ["CONTENDER", "link", "measure_packed", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="shmbus-daemon",
    title="shmbus, through the daemon",
    packages=("shmbus", "numpy"),
    per_second=250_000.0,
    begin_s=1.2,
    groups="complete groups only, by instance_id",
    copies=1,
    copied="into the ring",
    lends=True,
    favour="nothing: it is the embedded one's ring, with a third process on the same cores",
    lasting=False,
)


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[str]:
    """Create a bus, and serve it."""
    paths = importlib.import_module("shmbus.control.socket_path")
    with shmbus_embedded.link(workload) as name:
        argv = [sys.executable, "-m", "shmbus", "serve", name, "--log-level", "warning"]
        with started(argv, Path(paths.socket_path(name)).exists):
            yield name


def measure_packed(workload: Workload) -> Timed:
    """Move a workload into the batches of ``OnlineDataHandler``."""
    with link(workload) as name:
        timed: Timed = importlib.import_module("bench.rows.packed").measure_over(name, workload)
    return timed
