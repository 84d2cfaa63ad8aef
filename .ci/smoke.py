"""A tiny end-to-end run of an installed shmbus, in an environment without PyTorch.

Prints nothing; exit status 0 proves an import of shmbus without torch, and a group of two
trajectories on the whole way from put to acknowledged.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder


class TorchWatch(MetaPathFinder):
    """Notes every attempt to import torch, even within a try block."""

    attempts = 0

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        """Find nothing; count."""
        if fullname.partition(".")[0] == "torch":
            self.attempts += 1


def main() -> None:
    """Import, send, receive, acknowledge, and check the leftovers."""
    watch = TorchWatch()
    sys.meta_path.insert(0, watch)
    import shmbus

    assert watch.attempts == 0, "import shmbus tried to import torch"

    import numpy as np

    name = f"smoke-{os.getpid()}"
    tokens = np.arange(2048, dtype=np.int32)
    try:
        with (
            shmbus.Bus.create(name, capacity="64MiB", max_producers=4),
            shmbus.Producer(name) as producer,
            shmbus.Consumer(name) as consumer,
        ):
            for index in range(2):
                producer.put(
                    "prompt-0",
                    group_size=2,
                    index=index,
                    score=float(index),
                    policy_version=1,
                    tokens=tokens + index,
                    timeout=5.0,
                )
            groups = consumer.take(max_groups=1, timeout=5.0)
            assert len(groups) == 1, f"expected one complete group, got {len(groups)}"
            group = groups[0]
            assert group.instance_id == "prompt-0", group.instance_id
            assert group.size == 2, group.size
            for index, trajectory in enumerate(group):
                assert trajectory.index == index, trajectory.index
                assert np.array_equal(trajectory["tokens"], tokens + index)
            group.ack()
            assert consumer.take(max_groups=1, timeout=0) == []
    finally:
        with contextlib.suppress(shmbus.BusNotFoundError):
            shmbus.unlink(name)
    assert not os.path.exists(f"/dev/shm/shmbus.{name}"), "the segment is still there"


if __name__ == "__main__":
    main()
