"""Groups of training and of evaluation for one trainer, with a daemon or without.

Invariant: without a daemon one Consumer takes every split, as the only reader; with a daemon each
split gets a separate Consumer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import shmbus
from shmbus.segment.names import check_name

#: Options reserved for an adapter, with the reason.
BY_CALLS: Final = {"split": "training and evaluation are told apart by the trainer's calls"}


def check_options(bus: str, options: dict[str, Any], taken: Mapping[str, str] = BY_CALLS) -> None:
    """Refuse an invalid bus, an unknown consumer option, or an option reserved for the adapter."""
    check_name(bus)
    for name in taken.keys() & options.keys():
        raise TypeError(f"{name}: {taken[name]}; leave it out")
    inspect.signature(shmbus.Consumer).bind(bus, **options)


class SplitConsumer:
    """Consumers of a bus by split, each attached at its first use."""

    def __init__(self, bus: str, **options: Any) -> None:
        check_options(bus, options)
        self._bus: Final = bus
        self._options: Final = options
        self._attached: dict[str, shmbus.Consumer] = {}

    @property
    def consumer(self) -> shmbus.Consumer:
        """The Consumer of "train"."""
        return self._of("train")

    def _of(self, split: str) -> shmbus.Consumer:
        if split not in self._attached:
            self._attached[split] = shmbus.Consumer(self._bus, **self._options, split=split)
        return self._attached[split]

    def take(
        self, split: str, max_groups: int, timeout: float
    ) -> tuple[shmbus.Consumer, list[shmbus.Group]]:
        """Take groups of a split."""
        if split != "train" and not self.consumer.has_daemon:
            return self.consumer, self.consumer.take(max_groups, timeout, split=split)
        consumer = self._of(split)
        return consumer, consumer.take(max_groups, timeout)

    def late(self, what: str, timeout_s: float) -> TimeoutError:
        """Return the error for missing groups, with the state of the requests."""
        requests = self.consumer.stats().requests
        return TimeoutError(
            f"bus {self._bus!r}: {what} did not come in {timeout_s:g} s; requests: {requests.open} "
            f"open, {requests.claimed} with workers; `shmbus status {self._bus}` shows the workers"
        )

    def close(self) -> None:
        """Leave the bus; a later use attaches again."""
        while self._attached:
            self._attached.popitem()[1].close()
