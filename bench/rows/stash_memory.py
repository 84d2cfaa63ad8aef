"""Memory of a stashed trajectory in the consumer: its C object, and everything else.

A producer sends groups that lack their last sample, sample by sample over all groups, so that each
one stays in the stash with everything that the consumer keeps for it. Counted is the growth of the
process's anonymous memory; the ring is shared memory, and not in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import shmbus
from bench.failures import MeasurementError
from bench.processes import STALL_S, Role, run_together
from bench.rows.row import Row
from bench.sending import temporary_bus
from bench.workload import GROUP_SIZE
from shmbus_ext import _core

__all__ = ["measure"]

#: Tokens of each: few, since a million of them have to lie in the ring at once.
TOKENS: Final = 4
#: Trajectories of one put_many.
BATCH: Final = 512
#: The instance id of the one group that becomes complete, behind all others.
LAST: Final = "last"


def measure(trajectories: int, capacity: str) -> Row:
    """Stash so many trajectories and say what one takes, or why there is no room for them."""
    title = f"memory of a stashed trajectory, {trajectories:,} of them in open groups"
    try:
        with temporary_bus(capacity) as name:
            (grown, stashed), _ = run_together(
                [Role(_stash, (name,)), Role(_send, (name, trajectories))]
            )
    except shmbus.CapacityError as error:
        return Row(name="stash-memory", title=title, measured="", skipped=str(error))
    each = grown / stashed
    own = _core.TRAJECTORY_BYTES
    return Row(
        name="stash-memory",
        title=title,
        measured=f"{each:.0f} bytes: Trajectory object {own}, all the rest {each - own:.0f}",
        value=each,
        figures={
            "trajectories": stashed,
            "anonymous_memory_bytes": grown,
            "bytes_per_trajectory": each,
            "trajectory_object_bytes": own,
            "rest_bytes_per_trajectory": each - own,
        },
    )


def _anonymous_bytes() -> int:
    """Memory of this process that is in no file and in no shared memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise MeasurementError("/proc/self/status has no RssAnon; the kernel is older than 4.5")


def _send(start: Callable[[], None], name: str, trajectories: int) -> None:
    arrays: dict[str, Any] = {
        "tokens": np.arange(TOKENS, dtype=np.int32),
        "loss_mask": np.ones(TOKENS, np.uint8),
        "logprobs": np.zeros(TOKENS, np.float32),
    }
    groups = -(-trajectories // (GROUP_SIZE - 1))
    with shmbus.Producer(name) as producer:
        start()
        for index in range(GROUP_SIZE - 1):
            for first in range(0, groups, BATCH):
                items = [
                    {"instance_id": f"prompt-{number}", "group_size": GROUP_SIZE, "index": index}
                    | arrays
                    for number in range(first, min(first + BATCH, groups))
                ]
                producer.put_many(items, timeout=STALL_S)
        producer.put(LAST, group_size=1, index=0, timeout=STALL_S, **arrays)


def _stash(start: Callable[[], None], name: str) -> tuple[int, int]:
    with shmbus.Consumer(name) as consumer:
        consumer.take(timeout=0.0)
        gc.collect()
        before = _anonymous_bytes()
        start()
        groups = consumer.take(timeout=STALL_S)
        if [group.instance_id for group in groups] != [LAST]:
            raise MeasurementError(f"expected the last group only, got {groups}")
        gc.collect()
        grown = _anonymous_bytes() - before
        return grown, consumer.stats().stashed
