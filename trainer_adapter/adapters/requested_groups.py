"""Prompts of a trainer out as requests, and their groups back: shared by the adapters.

Invariants:

- Without a daemon one Consumer takes every split, as the only reader; with a daemon each split gets
  a separate Consumer.
- A group counts as ended only after its request ended without a delivery to the caller. Open
  requests are read only after a drop: the state holds every prompt.
- A value of a data set that MessagePack lacks is named in the log, once per column.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

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


#: Instance id and round.
Key = tuple[str, int | None]
#: Seconds after a drop for a request's way to its end.
_SETTLE_S: Final = 10.0


def still_leased(groups: Iterable[shmbus.Group]) -> list[shmbus.Group]:
    """Return the groups still leased."""
    return [group for group in groups if group.state == "leased"]


class EndedGroups:
    """Finds awaited groups without a future."""

    def __init__(self, consumer: shmbus.Consumer) -> None:
        self._consumer: Final = consumer
        self._before: Final = dict(consumer.stats().dropped)
        self._dropped = sum(self._before.values())
        self._look_until_s = 0.0

    def among(self, wanted: Iterable[Key]) -> list[Key]:
        """Return the ended groups."""
        dropped = sum(self._consumer.stats().dropped.values())
        now_s = time.monotonic()
        if dropped != self._dropped:
            self._dropped = dropped
            self._look_until_s = now_s + _SETTLE_S
        if now_s > self._look_until_s:
            return []
        state = self._consumer.state_dict()
        is_open = {(each["instance_id"], each["round"]) for each in state["open"]}
        return [key for key in wanted if key not in is_open]

    def raise_for(self, wanted: Iterable[Key]) -> None:
        """Raise if a group necessary for a step ended."""
        ended = self.among(wanted)
        if ended:
            raise RuntimeError(
                f"bus {self._consumer.name!r}: the group {ended[0]!r} was asked for, and the bus "
                f"dropped it ({len(ended)} such groups; since then it dropped {self.why()}); the "
                "log names each. Stale: have workers load the weights before they sample, or raise "
                "max_policy_lag. Failed: raise sample_retries. Then ask for the step again"
            )

    def why(self) -> str:
        """Describe the drops during the life of this object."""
        counts = {
            reason: count - self._before.get(reason, 0)
            for reason, count in self._consumer.stats().dropped.items()
        }
        return ", ".join(f"{n} samples as {reason}" for reason, n in counts.items() if n > 0)


_LOG: Final = logging.getLogger("shmbus.adapters")
#: Already reported pairs of stack and column.
_named: Final[set[tuple[str, str]]] = set()


def columns_for(
    stack: str, values: Mapping[str, Any], taken: Collection[str] = ()
) -> dict[str, Any]:
    """Return the part of a data set's row fit for a request's meta."""
    found = {}
    for name, value in values.items():
        if name in taken:
            _name(stack, name, "the meta has something else by that name; rename the column")
            continue
        try:
            found[name] = msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=_plain))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            _name(stack, name, f"{error}; make it numbers, text or bytes, such as a path")
    return found


def _name(stack: str, column: str, why: str) -> None:
    if (stack, column) not in _named:
        _named.add((stack, column))
        _LOG.warning("%s: the column %r does not go to workers: %s", stack, column, why)


def _plain(value: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach()  # a tensor, maybe with a graph
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"MessagePack has no {type(value).__name__}")
