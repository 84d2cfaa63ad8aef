"""Which source's producers are asked for which sample again. Pure: time is an argument.

Invariants:

- A request is with one source at a time; its next attempt goes to another one, where there is one.
- A source is told a whole list, by a number that grows: what was lost or late does no harm, and a
  list that it has confirmed need not be said again.
- The timeout of a request begins once a source has it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeAlias

from shmbus._keys import make_key, split_key
from shmbus.relay.messages import MissingSample, Wanted
from shmbus.relay.origin_head import OriginHead
from shmbus.relay.origins import bus_of
from shmbus.stash.failures import Failures, Request
from shmbus_ext import _core

__all__ = ["RetryRequests"]

_At: TypeAlias = tuple[Hashable, int]


class RetryRequests:
    """Spreads the open requests of a stash over sources.

    Parameters
    ----------
    failures : Failures
        The stash's.
    """

    def __init__(self, failures: Failures[OriginHead]) -> None:
        self._failures = failures
        #: Of each request that a source has, which one, and that source's bus.
        self._at: dict[_At, tuple[Request, str]] = {}
        self._numbers: Counter[str] = Counter()
        self._buses: tuple[str, ...] = ()
        #: Requests for which every source's table was full.
        self._waits = False

    @property
    def open(self) -> int:
        """How many samples are asked for now."""
        return len(self._at)

    def update(self, buses: Sequence[str], now_s: float) -> set[str]:
        """Ask for what has failed since, and no more for what has come or was given up.

        Parameters
        ----------
        buses : sequence of str
            Sources that can be asked.
        now_s : float
            The time.

        Returns
        -------
        set of str
            Those whose lists have changed.
        """
        buses = tuple(sorted(buses))
        if not (self._failures.dirty or self._waits or buses != self._buses):
            return set()
        self._buses = buses
        self._failures.dirty = False
        requests = self._failures.requests
        changed = set()
        for at, (request, bus) in list(self._at.items()):
            if requests.get(at) is not request or bus not in buses:
                del self._at[at]
                changed.add(bus)
        counts = Counter(bus for _, bus in self._at.values())
        open_ = {bus for bus in buses if counts[bus] < _core.RETRY_ENTRIES}
        self._waits = False
        for at, request in requests.items():
            if at in self._at:
                continue
            found = self._choose(request, open_)
            if found is None:
                self._waits = True
                break  # the next request that ends, or the next source, makes room
            self._at[at] = (request, found)
            self._failures.publish(request, now_s)
            changed.add(found)
            counts[found] += 1
            if counts[found] >= _core.RETRY_ENTRIES:
                open_.discard(found)
        self._numbers.update(changed)
        return changed

    def _choose(self, request: Request, open_: set[str]) -> str | None:
        """First where the group is made, since that worker has its prompt; then on from there."""
        count = len(self._buses)
        start = self._buses.index(home) if (home := self._home(request)) in self._buses else None
        if start is None:
            start = zlib.crc32(str(request.key).encode("utf-8", "replace"))
        for step in range(count):
            bus = self._buses[(start + request.attempt - 1 + step) % count]
            if bus in open_:
                return bus
        return None

    def _home(self, request: Request) -> str:
        group = self._failures.groups.get(request.key)
        if group is None:
            return ""
        failed = group.failed.get(request.index)
        if failed is not None and failed.report is not None:
            return bus_of(failed.report.origin)
        return next((bus_of(sample.origin) for sample in group.samples), "")

    def find(self, bus: str, sample: MissingSample) -> Request | None:
        """Return the request that a source speaks of, unless it is not with that source any more.

        Parameters
        ----------
        bus : str
            The source's.
        sample : MissingSample
            As it was asked for.

        Returns
        -------
        Request or None
            The request.
        """
        key = make_key(sample.instance_id, sample.round, _core.SPLIT_TRAIN)
        request, asked = self._at.get((key, sample.index), (None, ""))
        same = request is not None and asked == bus and request.attempt == sample.attempt
        return request if same else None

    def wanted(self, bus: str, term: int) -> Wanted:
        """Return all that a source's producers are asked for.

        Parameters
        ----------
        bus : str
            The source's.
        term : int
            The coordinator's.

        Returns
        -------
        Wanted
            The list, with its number.
        """
        samples = tuple(_sample(request) for request, at in self._at.values() if at == bus)
        return Wanted(bus, term, self._numbers[bus], samples)

    def number(self, bus: str) -> int:
        """Return the number of a source's newest list."""
        return self._numbers[bus]


def _sample(request: Request) -> MissingSample:
    instance_id, round, _ = split_key(request.key)
    return MissingSample(
        instance_id, round, request.group_size, request.need, request.index, request.attempt,
        request.reason,
    )  # fmt: skip
