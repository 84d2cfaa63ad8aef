"""Retry requests: the collector's side of the retry table.

The table lies in the segment. So retries need no connection to producers, work with and without a
daemon, and survive either side: the collector owns a request, a producer its claim, and each side
repairs the remains of its dead peer.

Invariants
----------
- The table lists the stash's open requests; an ended request leaves before the next poll of the
  ring.
- A request is published after its backoff. While the lane is paused for like failures, a worker
  takes a sample only with the pause's row, published anew for each sample.
- At its deadline a request is taken back by a compare-and-swap against its claimant's answer.
- A claim counts as a failed attempt only after its producer's death and a read of its commits.
  A closing producer gives its claims back.
- Requests of an earlier collector keep their attempts: a failure found again takes its request
  over. The rest leaves after a full read of the ring.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from typing import Any

from shmbus.base import limits
from shmbus.base.arguments import fit_text
from shmbus.base.format import show_duration
from shmbus.base.ledger import LanePauseStatus
from shmbus.data.keys import make_key, split_key
from shmbus.stash.failures import Request
from shmbus.stash.stash import Stash
from shmbus_ext import _core

_At = tuple[Hashable, int]
_log = logging.getLogger("shmbus.requests")


class Retries:
    """Publishes a stash's open requests, and fails the requests of dead producers."""

    def __init__(self, segment: _core.Segment, stash: Stash[_core.Trajectory]) -> None:
        self._segment = segment
        self._stash = stash
        self._failures = stash.failures
        self._requests: dict[int, Request] = {}
        self._row_of: dict[_At, int] = {}
        self._taken_over: dict[_At, tuple[int, int]] = {}
        self._free: list[int] = []
        #: Pausing row of the lane, and its start, in Unix ns; None while the lane is open.
        self._pause: tuple[int, int] | None = None
        #: Producers that died with a claim, by row; the claims fail after a full read of the ring.
        self._dead_claims: dict[int, int] = {}
        _, self._failed_before = _core.retry_noted(segment)
        self._failures.take_back = self._take_back
        self._begin()

    def _begin(self) -> None:
        """Note claims and attempts of an earlier collector's requests; free the other rows."""
        claimed: set[int] = set()
        requests = _core.retry_requests(self._segment)
        for row, _, claimant, id_, round, split, _, _, index, attempt, reason, _ in requests:
            if attempt == _core.RETRY_PAUSE and self._pause is None:
                self._pause = (row, round or 0)
                self._failures.lane.restore(reason, 0.0)
                claimed.add(row)
                continue
            at = (make_key(id_, round, split), index)
            self._failures.earlier_attempts[at] = attempt
            if claimant:
                self._taken_over[at] = (row, attempt)
                claimed.add(row)
        for row in range(_core.RETRY_ENTRIES - 1, -1, -1):
            if row not in claimed:
                _core.retry_withdraw(self._segment, row)
                self._free.append(row)
        self._failures.dirty = bool(self._failures.earlier_attempts)

    def _take_back(self, request: Request) -> bool | None:
        row = self._row_of.get((request.key, request.index))
        return row is None or _core.retry_take_back(self._segment, row)

    def check_claimants(self) -> None:
        """Note claims of dead producers, for a later update. Call it after a sweep."""
        if not (self._requests or self._failures.groups):
            return
        # In this order: by now a producer with a claim holds a slot, or left it.
        claims = {row: claimant - 1 for row, _, claimant, *_ in _core.retry_requests(self._segment)}
        rows = self._segment.producers()
        alive = {row[2] for row in rows if row[1] == _core.SLOT_ACTIVE}
        self._failures.lane.workers = len(alive)
        if self._pause is not None:
            claims.pop(self._pause[0], None)
        self._dead_claims = {
            row: claimant
            for row, claimant in claims.items()
            if claimant >= 0 and claimant not in alive
        }
        if self._dead_claims:
            self._failures.dirty = True

    def update(self, now_s: float, *, drained: bool) -> None:
        """Publish new requests and withdraw old ones. `drained`: the ring was read to its end."""
        failures = self._failures
        failures.look_for_due(now_s)
        failures.dirty = False
        if self._dead_claims and drained:
            self._fail_dead_claims(now_s)
        for at, row in list(self._row_of.items()):
            if failures.requests.get(at) is not self._requests[row]:
                del self._row_of[at], self._requests[row]
                self._withdraw(row)
        probe = self._update_pause(now_s)
        for at in list(self._taken_over):
            if at not in self._row_of and (request := failures.requests.get(at)) is not None:
                self._request(request, now_s)
        if self._free and probe is not None:
            self._request(probe, now_s)
        # Without a free row, the next request that ends makes room.
        while self._free and (request := failures.take_ready()) is not None:
            self._request(request, now_s)
        if drained:
            for row, _ in self._taken_over.values():
                self._withdraw(row)
            self._taken_over.clear()
            failures.earlier_attempts.clear()
        # The remaining work waits for a full read of the ring.
        failures.dirty = bool(self._dead_claims or failures.earlier_attempts)
        failed = self._failed_before + self._stash.given_up
        rows = len(self._requests) + (self._pause is not None)
        _core.retry_note(self._segment, rows, failed)

    # -- the pause of the lane --------------------------------------------------------------------

    @property
    def lane_pause(self) -> LanePauseStatus | None:
        """The lane's pause, in which workers get a sample at a time; None while open."""
        reason = self._failures.lane.reason
        if reason is None or self._pause is None:
            return None
        return LanePauseStatus(reason=reason, since_unix_s=self._pause[1] / 1e9)

    def _update_pause(self, now_s: float) -> Request | None:
        """Open or pause the lane; return the failed sample that may be the next probe."""
        lane = self._failures.lane
        if not lane.paused:
            if self._pause is not None:
                paused_s = time.time() - self._pause[1] / 1e9
                _log.warning("requests go on after %s: a sample came", show_duration(paused_s))
                self._withdraw(self._pause[0])
                self._pause = None
            return None
        if now_s < lane.probe_due_s:
            return None
        rows = {row[0]: row for row in _core.retry_requests(self._segment)}
        if self._pause is None:
            self._pause = (self._take_row(), time.time_ns())
            _log.warning("requests pause: %s", lane.reason)
        elif self._pause[0] in rows and not rows[self._pause[0]][2]:
            lane.probe_due_s = now_s + limits.REQUEST_WAIT_S  # no worker took the probe
            return None
        row, since_ns = self._pause
        assert lane.reason is not None
        _core.retry_publish(
            self._segment, row, time.monotonic_ns(), "-", since_ns, _core.SPLIT_TRAIN,
            0, 0, 0, _core.RETRY_PAUSE, _text(lane.reason),
        )  # fmt: skip
        lane.probe(now_s)
        return self._next_probe(rows)

    def _take_row(self) -> int:
        """Return a free row, or a row whose request can be published again later."""
        if not self._free:
            at, row = next(iter(self._row_of.items()))
            self._failures.put_back(self._requests.pop(row))
            del self._row_of[at]
            self._withdraw(row)
        return self._free.pop()

    def _next_probe(self, rows: dict[int, Any]) -> Request | None:
        """Return the failed sample with the longest wait, unless a row already offers a probe."""
        in_lane = self._failures.in_lane
        if any(
            not rows[row][2] and in_lane(self._requests[row].key)
            for row in self._requests.keys() & rows.keys()
        ):
            return None
        return self._failures.next_probe()

    def _withdraw(self, row: int) -> None:
        _core.retry_withdraw(self._segment, row)
        self._free.append(row)

    def _request(self, request: Request, now_s: float) -> None:
        at = (request.key, request.index)
        row, attempt = self._taken_over.pop(at, (-1, 0))
        if row >= 0 and attempt != request.attempt:
            self._withdraw(row)
            row = -1
        if row < 0:
            if not self._free:
                return
            row = self._free.pop()
            publish_row(self._segment, row, split_key(request.key), request, request.late)
        self._requests[row] = request
        self._row_of[at] = row
        self._failures.publish(request, now_s)

    def _fail_dead_claims(self, now_s: float) -> None:
        """Fail claims of producers that died before the full read of the ring."""
        for row, _, claimant, *_ in _core.retry_requests(self._segment):
            request = self._requests.get(row)
            # A closed producer gave its claim back meanwhile.
            if request is not None and self._dead_claims.get(row) == claimant - 1:
                reason = f"producer {claimant - 1} died while it had it"
                self._stash.fail_request(request, reason, now_s)
        self._dead_claims.clear()


def publish_row(
    segment: _core.Segment,
    row: int,
    group: tuple[str, int | None, int],
    sample: Any,
    late: bool = False,
) -> None:
    """Offer producers a failed sample, a Request or a relay's MissingSample."""
    id_, round, split = group
    _core.retry_publish(
        segment,
        row,
        # Grows over collectors too: a claim always refers to the request its producer saw.
        time.monotonic_ns(),
        id_,
        _core.NO_ROUND if round is None else round,
        split,
        sample.group_size,
        sample.need,
        sample.index,
        sample.attempt,
        _text(sample.reason),
        late,
    )


def _text(reason: str) -> bytes:
    """Encode a reason, cut to the room of a row."""
    return fit_text("reason", reason, _core.RETRY_REASON_BYTES).encode()
