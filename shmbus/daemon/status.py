"""What a status says of incomplete groups, and of the daemon's own process."""

from __future__ import annotations

import os
from typing import Any

from shmbus._version import VERSION
from shmbus.inspect.types import FailedSample, OpenGroup
from shmbus.stash.collector import Collector
from shmbus.stash.failures import FailingGroup
from shmbus.stash.retries import split_key

__all__ = ["open_groups"]


def open_groups(collector: Collector, count: int, now: float) -> dict[str, Any]:
    """Fields of a status that the daemon itself has no say in."""
    oldest = []
    for group in collector.stash.oldest(count):
        key, epoch = split_key(group.key)
        failed = group.failed if isinstance(group, FailingGroup) else {}
        present = {sample.index for sample in group.samples}
        oldest.append(
            OpenGroup(
                instance_id=key,
                epoch=epoch,
                size=group.size,
                present=len(present),
                missing=[index for index in range(group.size) if index not in present],
                age_s=max(0.0, now - group.born_s),
                failed=[
                    FailedSample(index, sample.attempts, sample.reason)
                    for index, sample in sorted(failed.items())
                ],
            )
        )
    return {"oldest": oldest, "pid": os.getpid(), "version": VERSION}
