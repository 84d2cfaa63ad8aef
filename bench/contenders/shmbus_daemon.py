"""shmbus through its daemon: `shmbus serve` reads and groups, the consumer leases groups."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Final

from bench.contenders import shmbus_embedded
from bench.contenders.base import Contender
from bench.contenders.shmbus_embedded import receiver, sender
from bench.workload import Workload

__all__ = ["CONTENDER", "link", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="shmbus-daemon",
    title="shmbus, through the daemon",
    packages=("shmbus", "numpy"),
    per_second=250_000.0,
    copies=1,
    copied="into the ring",
    favour="nothing: it is the embedded one's ring, with a third process on the same cores",
)


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[str]:
    """Create and serve a bus."""
    # Imported late: environments without shmbus read the registry.
    sending = importlib.import_module("bench.sending")
    with shmbus_embedded.link(workload) as name, sending.serving(name):
        yield name
