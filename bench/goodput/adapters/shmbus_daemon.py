"""shmbus through its daemon: `shmbus serve` groups, and the trainer leases."""

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.goodput.adapters import About, Link, served
from bench.goodput.adapters.shmbus_embedded import RETRIES, SHMBUS_FAIRNESS, bus, train, work
from bench.goodput.scenario import Scenario

__all__ = ["ABOUT", "link", "train", "work"]

ABOUT: Final = About(
    title="shmbus, through the daemon", packages=("shmbus", "numpy"), offers=True,
    fairness=SHMBUS_FAIRNESS,
)  # fmt: skip


@contextlib.contextmanager
def link(scenario: Scenario, root: Path) -> Iterator[Link]:
    """Create a bus, and serve it."""
    from shmbus.segment.names import socket_path

    with bus() as name:
        serve = [sys.executable, "-m", "shmbus", "serve", name, "--sample-retries", str(RETRIES)]
        path = Path(socket_path(name))

        def ready() -> bool:
            with socket.socket(socket.AF_UNIX) as probe:
                return probe.connect_ex(str(path)) == 0

        with served(serve, root / "daemon.log", ready) as server:
            yield Link((name, name, True), {"daemon": server.again})
