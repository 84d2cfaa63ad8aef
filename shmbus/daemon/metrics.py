"""Prometheus metrics at ``/metrics`` and a health check at ``/healthz``, over loopback HTTP.

Invariants:

- Each scrape reads the bus; nothing is cached or counted here. Histograms are the collector's, with
  fixed buckets.
- Cardinality is bounded: labels are states, kinds of reasons, splits (16 at most), ranks, producer
  slots, readers of weights and addresses of inference servers, up to `MAX_SLOTS_LABELLED` of each;
  no pid, process label, instance id or text of a reason becomes a label.
- No client delays another: a loop in a thread of its own answers requests, further threads read the
  bus, and a slow client loses its connection (`shmbus.http.server`).
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, get_args
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from shmbus import errors
from shmbus._version import VERSION
from shmbus.base import limits
from shmbus.base.closing import ClosedByWith
from shmbus.base.format import printable
from shmbus.base.ledger import REASONS
from shmbus.data.status_types import BusStatus, EngineState
from shmbus.http.access import is_loopback
from shmbus.http.server import AddressError, HttpServer, url_of
from shmbus.inspect.failure_kinds import KINDS, kind_of
from shmbus.inspect.status import read_status
from shmbus.pool.pool_status import read_pools

#: Producer slots, ranks and readers with a label of their own; the rest share a label, or have
#: none: thousands of slots do not make thousands of time series.
MAX_SLOTS_LABELLED = 64
#: Requests answered at the same time; more requests wait.
MAX_THREADS = 8
#: Connections at a time: few beside a process's default of 1,024 open files.
MAX_CONNECTIONS = 128
#: Seconds that a client may keep the server waiting: a scrape over loopback takes milliseconds.
IDLE_S = 5.0


class BusCollector(Collector):
    """Collects the metrics of a bus at each scrape."""

    def __init__(self, name: str) -> None:
        self._name = name

    def describe(self) -> list[Metric]:
        """Declare nothing: registering must not read a bus before it exists."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the bus and yield its metrics; only ``shmbus_up 0`` if the read fails."""
        up = GaugeMetricFamily(
            "shmbus_up", "Whether the bus can be read (1) or not (0).", labels=["bus"]
        )
        try:
            status = read_status(self._name, walk=False)
        except (errors.ShmbusError, OSError):
            up.add_metric([printable(self._name)], 0)
            yield up
            return
        up.add_metric([status.name], 1)
        yield up
        yield from _ledger(status)
        yield from _splits(status)
        yield from _failures(status)
        yield from _requests(status)
        yield from _delivered(status)
        yield from _waited(status)
        yield from _space(status)
        yield from _collector(status)
        yield from _producers(status)
        if status.daemon is not None:
            yield from _daemon(status)
        yield from _weights(status)
        yield from _engines(status)
        yield from _mismatch(status)


def _metric(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    status: BusStatus,
    values: Mapping[Any, float] | float,
    *labels: str,
) -> Metric:
    """Return a metric of a bus: a single value, or values by label, or by tuple of labels."""
    metric = family(name, text, labels=["bus", *labels])
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        metric.add_metric([status.name, *([key] if isinstance(key, str) else key)], value)
    return metric


_counter = functools.partial(_metric, CounterMetricFamily)
_gauge = functools.partial(_metric, GaugeMetricFamily)


def _ledger(status: BusStatus) -> Iterator[Metric]:
    ledger = status.ledger
    dropped = {reason: ledger.dropped.get(reason, 0) for reason in REASONS[1:]}
    states = {"leased": ledger.leased, "stashed": ledger.stashed, "in_ring": ledger.in_ring}
    text = "Trajectories committed by producers."
    yield _counter("shmbus_committed", text, status, ledger.committed)
    text = "Trajectories acknowledged by trainers."
    yield _counter("shmbus_acknowledged", text, status, ledger.acknowledged)
    yield _counter("shmbus_dropped", "Trajectories dropped, by reason.", status, dropped, "reason")
    text = "Trajectories not yet acknowledged or dropped, by state."
    yield _gauge("shmbus_trajectories", text, status, states, "state")


def _splits(status: BusStatus) -> Iterator[Metric]:
    ended = {}
    for split in status.splits:
        ended[split.split, "acknowledged"] = split.acknowledged
        ended[split.split, "dropped"] = split.dropped
    text = "Trajectories that left the bus, by split."
    yield _counter("shmbus_split_trajectories", text, status, ended, "split", "state")
    ready = {split.split: split.groups_ready for split in status.splits}
    text = "Complete groups that wait for a consumer, by split."
    yield _gauge("shmbus_split_groups_ready", text, status, ready, "split")
    stashed = {split.split: split.stashed for split in status.splits}
    text = "Trajectories that wait for their group or to be taken, by split."
    yield _gauge("shmbus_split_stashed", text, status, stashed, "split")


def _failures(status: BusStatus) -> Iterator[Metric]:
    text = "Groups with a sample that failed permanently."
    yield _counter("shmbus_groups_given_up", text, status, status.groups_given_up)
    taken = sum(wanted.taken_by is not None for wanted in status.wanted)
    states = {"taken": taken, "open": len(status.wanted) - taken}
    text = "Open retry requests for failed samples, by state."
    yield _gauge("shmbus_wanted_samples", text, status, states, "state")
    kinds = Counter(kind_of(wanted.reason) for wanted in status.wanted)
    by_kind = {kind: kinds[kind] for kind in KINDS}
    text = "Open retry requests for failed samples, by the kind of the last failure's reason."
    yield _gauge("shmbus_wanted_samples_by_reason", text, status, by_kind, "reason")
    text = "Whether workers get one sample at a time, since all of late failed alike."
    yield _gauge("shmbus_lane_paused", text, status, status.lane_pause is not None)
    daemon = status.daemon
    if daemon is not None and daemon.answers:
        failed = {kind: daemon.failed_attempts.get(kind, 0) for kind in KINDS}
        text = "Failed attempts of samples since the daemon began, by the kind of their reason."
        yield _counter("shmbus_failed_attempts", text, status, failed, "reason")


def _requests(status: BusStatus) -> Iterator[Metric]:
    lane, lead = status.requests, status.lead
    if lane is not None:
        text = "Samples requested of workers."
        yield _counter("shmbus_requested_samples", text, status, lane.offered)
        states = {
            "open": lane.open, "claimed": lane.claimed, "done": lane.done,
            "given_up": lane.given_up,
        }  # fmt: skip
        yield _gauge("shmbus_requests", "Requested samples, by state.", status, states, "state")
        text = "Requests that have not ended."
        yield _gauge("shmbus_requested_groups", text, status, lane.groups)
        by_split = {}
        for split, (is_open, claimed) in lane.by_split.items():
            by_split[split, "open"] = is_open
            by_split[split, "claimed"] = claimed
        text = "Requested samples that are not made yet, by split and state."
        yield _gauge("shmbus_split_requests", text, status, by_split, "split", "state")
    if lead is not None:
        kinds = {"held": lead.held, "limit": lead.limit}
        text = "Groups begun and not delivered, and how many there may be."
        yield _gauge("shmbus_lead_groups", text, status, kinds, "kind")


#: By histogram of a status: its name and help.
_HISTOGRAMS = {
    "lag": ("shmbus_policy_lag", "Versions that delivered samples were behind the trainer."),
    "age": (
        "shmbus_group_age_seconds",
        "Seconds from the first sample of a group to its delivery.",
    ),
    "length": ("shmbus_sample_tokens", "Tokens of delivered samples."),
    "score": ("shmbus_score", "Scores of delivered samples."),
    "solved": (
        "shmbus_group_solved_ratio",
        "Part of a delivered group's samples with a score of 0.5 or more.",
    ),
}


def _delivered(status: BusStatus) -> Iterator[Metric]:
    """Yield the delivery histograms; a group counts once, however often given back."""
    for histogram in status.delivered:
        name, text = _HISTOGRAMS[histogram.name]
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*histogram.bounds, math.inf], histogram.buckets, strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else repr(bound), total))
        family = HistogramMetricFamily(name, text, labels=["bus"])
        # A histogram with a bound below 0 needs no sum: the sum may fall.
        family.add_metric(
            [status.name], buckets, None if histogram.bounds[0] < 0 else histogram.sum
        )
        yield family
    text = "Groups for training that were dropped whole, for any reason."
    yield _counter("shmbus_groups_dropped", text, status, status.groups_dropped)


def _waited(status: BusStatus) -> Iterator[Metric]:
    waited = {
        ("producers", "space"): status.waited.space_s,
        ("producers", "pause"): status.waited.paused_s,
        ("producers", "lead"): status.waited.ahead_s,
        ("trainers", "groups"): status.waited.trainers_s,
    }
    text = "Seconds that producers and trainers have waited, all of them together."
    yield _counter("shmbus_waited_seconds", text, status, waited, "who", "what")


def _space(status: BusStatus) -> Iterator[Metric]:
    used = status.capacity - status.free
    for name, text, value in (
        ("shmbus_capacity_bytes", "Capacity of the bus for records, in bytes.", status.capacity),
        ("shmbus_used_bytes", "Bytes in extents that are in use.", used),
        ("shmbus_space_wanted", "Whether a producer is waiting for space.", status.space_wanted),
        ("shmbus_paused", "Whether producers are paused.", status.paused is not None),
        ("shmbus_policy_version", "Current policy version of the trainer.", status.policy_version),
        ("shmbus_age_seconds", "Seconds since the bus was created.", status.age_s),
    ):
        yield _gauge(name, text, status, float(value))


def _collector(status: BusStatus) -> Iterator[Metric]:
    collector = status.collector
    text = "Whether a live process reads the bus."
    yield _gauge("shmbus_collector_up", text, status, collector.alive)
    if collector.seen_ago_s is not None:
        text = "Seconds since the collector last polled the bus."
        yield _gauge("shmbus_collector_lag_seconds", text, status, collector.seen_ago_s)
    text = "Bytes held by stragglers that the collector has moved."
    yield _gauge("shmbus_straggler_bytes", text, status, collector.stragglers_bytes)
    if status.daemon is None or not status.daemon.answers:
        states = {"leased": collector.leased_groups, "stashed": collector.stashed_groups}
        yield _gauge("shmbus_groups", "Groups in the collector, by state.", status, states, "state")


def _producers(status: BusStatus) -> Iterator[Metric]:
    states = {"alive": 0.0, "dead": 0.0, "closed": 0.0, "gone": 0.0}
    committed: Counter[str] = Counter()
    held: Counter[str] = Counter()
    waited: dict[str, float] = {}
    for producer in status.producers:
        states[producer.state] += 1
        # The number of slots is bounded; a slot's next owner continues its counter.
        slot = _label(producer.slot)
        committed[slot] += producer.committed
        held[slot] += producer.held_bytes
        waited[slot] = waited.get(slot, 0) + producer.waited_s
    yield _gauge("shmbus_producers", "Producer slots by state.", status, states, "state")
    text = "Trajectories committed, by producer slot."
    yield _counter("shmbus_producer_committed", text, status, committed, "slot")
    text = "Seconds waited for space, in pauses and for the bound on groups, by producer slot."
    yield _counter("shmbus_producer_waited_seconds", text, status, waited, "slot")
    text = "Samples that workers gave back unmade."
    released = sum(producer.released for producer in status.producers)
    yield _counter("shmbus_samples_released", text, status, released)
    text = "Ring bytes held, by producer slot."
    yield _gauge("shmbus_producer_held_bytes", text, status, held, "slot")


def _daemon(status: BusStatus) -> Iterator[Metric]:
    daemon = status.daemon
    assert daemon is not None
    yield _gauge("shmbus_daemon_up", "Whether the daemon answers.", status, daemon.answers)
    if not daemon.answers:
        return
    info = InfoMetricFamily("shmbus_daemon", "Version of the daemon.", labels=["bus"])
    info.add_metric([status.name], {"version": daemon.version})
    yield info
    states = {
        "open": daemon.groups_open, "ready": daemon.groups_ready, "leased": daemon.groups_leased
    }  # fmt: skip
    yield _gauge("shmbus_groups", "Groups in the collector, by state.", status, states, "state")
    yield _gauge("shmbus_clients", "Clients attached to the daemon.", status, len(daemon.leases))
    oldest = max((lease.oldest_lease_s for lease in daemon.leases if lease.groups), default=0.0)
    text = "Age of the oldest lease, in seconds."
    yield _gauge("shmbus_oldest_lease_seconds", text, status, oldest)
    waited: dict[tuple[str, str], float] = {}
    for lease in daemon.leases:
        at = lease.split, "none" if lease.rank < 0 else _label(lease.rank)
        waited[at] = waited.get(at, 0.0) + lease.waited_s
    text = "Seconds that attached trainers have waited with nothing in hand, by split and rank."
    yield _counter("shmbus_trainer_waited_seconds", text, status, waited, "split", "rank")
    text = "Age of the oldest incomplete group, in seconds."
    yield _gauge("shmbus_oldest_incomplete_group_seconds", text, status, daemon.oldest_s)


def _weights(status: BusStatus) -> Iterator[Metric]:
    pools = read_pools(status.name)
    if not pools:
        return
    readers: Counter[tuple[str, str]] = Counter()
    runs: dict[tuple[str, str], int] = {}
    for pool in pools:
        readers.update({(pool.kind, state): 0 for state in ("newest", "older", "refused")})
        for reader in pool.readers:
            if reader.state != "alive":
                continue
            is_newest = reader.applied_version == pool.version
            state = "newest" if is_newest else "older"
            readers[pool.kind, "refused" if reader.has_refused else state] += 1
            if reader.reader < MAX_SLOTS_LABELLED and reader.applied_version is not None:
                runs[pool.kind, str(reader.reader)] = reader.applied_version
    newest = {pool.kind: pool.version for pool in pools if pool.version is not None}
    text = "Newest published version of the weights."
    yield _gauge("shmbus_weights_version", text, status, newest, "kind")
    now = time.time()
    ages = {
        pool.kind: max(0.0, now - slot.published_unix_ns / 1e9)
        for pool in pools
        for slot in pool.slots
        if slot.newest and slot.published_unix_ns
    }
    text = "Seconds since that version was published."
    yield _gauge("shmbus_weights_age_seconds", text, status, ages, "kind")
    published = {pool.kind: pool.published for pool in pools}
    text = "Versions of the weights published."
    yield _counter("shmbus_weights_published", text, status, published, "kind")
    skipped = {pool.kind: pool.skipped for pool in pools}
    text = "Versions given up since all slots were held."
    yield _counter("shmbus_weights_skipped", text, status, skipped, "kind")
    text = (
        "Subscribers and servers, by whether they run the newest version, an older one, or have "
        "refused a newer one."
    )
    yield _gauge("shmbus_weights_readers", text, status, readers, "kind", "state")
    text = "Version that a subscriber or server runs, by its row."
    yield _gauge("shmbus_weights_reader_version", text, status, runs, "kind", "reader")


def _engines(status: BusStatus) -> Iterator[Metric]:
    """Yield state, version and calls of each inference server; no version if unknown."""
    engines = status.engines[:MAX_SLOTS_LABELLED]
    if not engines:
        return
    states = {
        (engine.address, name): float(engine.state == name)
        for engine in engines
        for name in get_args(EngineState)
    }
    text = "Inference servers by what is known of their weights: 1 for the state of now."
    yield _gauge("shmbus_engine_state", text, status, states, "engine", "state")
    runs = {each.address: each.version for each in engines if each.version is not None}
    text = "Version of the weights that an inference server runs, the oldest of its ranks."
    yield _gauge("shmbus_engine_version", text, status, runs, "engine")
    calls = {each.address: each.calls for each in engines if each.calls is not None}
    text = "Calls of recorders that an inference server has in flight."
    yield _gauge("shmbus_engine_calls", text, status, calls, "engine")


#: By metric, its help and the figures of a mismatch.
_MISMATCH = {
    "shmbus_logprob_difference": (
        "Trainer's logprobs against the engine's, in nats a token.",
        ("mean", "p99", "k3", "policy_change", "precision_gap"),
    ),
    "shmbus_logprob_share": (
        "Share of tokens without gradient by PPO's clip, and of rounding in the difference.",
        ("clipped", "gap_share"),
    ),
}


def _mismatch(status: BusStatus) -> Iterator[Metric]:
    if status.mismatch is None:
        return
    for name, (text, kinds) in _MISMATCH.items():
        found = {kind: getattr(status.mismatch, kind) for kind in kinds}
        values = {kind: value for kind, value in found.items() if value is not None}
        yield _gauge(name, text, status, values, "kind")


def _label(number: int) -> str:
    return str(number) if number < MAX_SLOTS_LABELLED else "other"


def health(name: str) -> tuple[bool, dict[str, Any]]:
    """Return the health: a readable bus, an answering daemon, a balanced ledger; with details."""
    try:
        status = read_status(name, walk=False)
    except (errors.ShmbusError, OSError) as error:
        return False, {"bus": printable(name), "healthy": False, "problem": str(error)}
    problem = ""
    if status.daemon is not None and not status.daemon.answers:
        problem = status.daemon.problem
    elif not status.ledger.balanced:
        problem = "the ledger does not balance"
    return not problem, {
        "bus": status.name,
        "healthy": not problem,
        "problem": problem,
        "collector": status.collector.alive,
        "fill": round(status.fill, 4),
        "version": VERSION,
    }


class MetricsServer(ClosedByWith):
    """Serves ``/metrics`` and ``/healthz`` of a bus, which need not exist yet, from a thread."""

    def __init__(self, name: str, port: int = limits.METRICS_PORT, host: str = "127.0.0.1") -> None:
        self._bus = name
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(BusCollector(name))
        self._loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(MAX_THREADS, "shmbus-metrics-answer")
        try:
            self._loop.run_until_complete(self._start(host, port))
        except AddressError:
            self._loop.close()
            raise
        self._thread = threading.Thread(target=self._loop.run_forever, name="shmbus-metrics")
        self._thread.daemon = True
        self._thread.start()

    async def _start(self, host: str, port: int) -> None:
        self._http = HttpServer(self._answer, max_connections=MAX_CONNECTIONS, idle_s=IDLE_S)
        _, self.port = await self._http.bind(host, port)
        self.host, self.url = host, url_of(host, self.port)
        await self._http.start()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        answer = self._refusal(request)
        if answer is None:
            accept = request.headers.get("Accept", "")
            answer = await self._loop.run_in_executor(self._pool, self._read, request.path, accept)
        answer.headers["Server"] = f"shmbus/{VERSION}"
        answer.force_close()
        return answer

    def _refusal(self, request: web.BaseRequest) -> web.Response | None:
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=HTTPStatus.NOT_IMPLEMENTED, text="expected GET or HEAD\n")
        hosts = request.headers.getall("Host", [])
        if (asked := urlsplit(request.raw_path).netloc) != "":
            hosts.append(asked)
        if is_loopback(self.host) and not all(map(is_loopback, hosts)):
            text = (
                f"bound to {self.host}, this server answers loopback names only; expected "
                f"Host: {self.host} or localhost; ask for that, or bind another address "
                "(--metrics-host)\n"
            )
            return web.Response(status=HTTPStatus.FORBIDDEN, text=text)
        return None

    def _read(self, path: str, accept: str) -> web.Response:
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            headers = {"Content-Type": content_type}
            return web.Response(body=encode(self._registry), headers=headers)
        if path == "/healthz":
            healthy, body = health(self._bus)
            status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
            return web.json_response(body, status=status)
        text = "not found; use /metrics or /healthz\n"
        return web.Response(status=HTTPStatus.NOT_FOUND, text=text)

    def close(self) -> None:
        """Stop listening, and end every connection."""
        asyncio.run_coroutine_threadsafe(self._http.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.shutdown(cancel_futures=True)
