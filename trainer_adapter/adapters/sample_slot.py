"""Where the sample of an environment goes: a request's place, or one that the caller names.

Invariant: a sample that cannot be trained on is reported as failed at its place, so that its group
never waits for it, and it alone is asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import shmbus


class Unusable(Exception):
    """A sample that failed where it was made; its text says why."""


@dataclass(frozen=True)
class Place:
    """A sample's place in its group."""

    #: Whose answer it is; then the rest is the request's.
    request: shmbus.Request | None
    instance_id: str | int
    group_size: int
    index: int
    round: int | None
    split: str

    def put(self, producer: shmbus.Producer, record: dict[str, Any], timeout: float | None) -> bool:
        """Put the sample."""
        if self.request is not None:
            return producer.requests.answer(self.request, timeout=timeout, **record)
        producer.put(
            self.instance_id, group_size=self.group_size, index=self.index, round=self.round,
            split=self.split, timeout=timeout, **record,
        )  # fmt: skip
        return True

    def fail(self, producer: shmbus.Producer, reason: str, timeout: float | None) -> None:
        """Report that the sample failed."""
        if self.request is not None:
            producer.requests.fail(self.request, reason, timeout=timeout)
            return
        producer.fail(
            self.instance_id, self.index, reason, group_size=self.group_size, round=self.round,
            split=self.split, timeout=timeout,
        )  # fmt: skip


def place_of(
    request: shmbus.Request | None,
    instance_id: str | int | None,
    group_size: int | None,
    index: int | None,
    round: int | None,
    split: str | None,
) -> Place:
    """Say where a sample goes."""
    if request is not None and not isinstance(request, shmbus.Request):
        raise TypeError(
            f"request: expected what requests.next gave, got {type(request).__name__}; leave it "
            "out to name the place"
        )
    named = {"instance_id": instance_id, "group_size": group_size, "index": index}
    if request is not None:
        given = [name for name, value in {**named, "round": round}.items() if value is not None]
        if given:
            raise TypeError(f"put_episode: {given[0]} is the request's; leave it out")
        return Place(
            request, request.instance_id, request.group_size, request.index, request.round,
            request.split,
        )  # fmt: skip
    if instance_id is None or group_size is None or index is None:
        missing = next(name for name, value in named.items() if value is None)
        raise TypeError(f"put_episode: expected a request, or {missing} beside the others; give it")
    return Place(None, instance_id, group_size, index, round, split or "train")
