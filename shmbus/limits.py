"""Limits that several rooms share, each with its unit and its reason.

A limit of one room stands beside its use. Limits of the segment's layout are defined in C
(``shmbus_ext/ring/layout.h``), and only passed on here.
"""

from __future__ import annotations

from shmbus_ext import _core

__all__ = [
    "AHEAD_GROUPS",
    "CLIENT_WAIT_S",
    "COALESCE_S",
    "DAEMON_WAIT_S",
    "DEFAULT_CAPACITY",
    "DEFAULT_MAX_PRODUCERS",
    "DRAIN_TIMEOUT_S",
    "FAIL_REASON_CHARS",
    "HELLO_WAIT_S",
    "LISTEN_REST_S",
    "MAX_CLIENTS",
    "MAX_GRANT_TRAJECTORIES",
    "MAX_MESSAGE_BYTES",
    "MAX_REQUESTED",
    "MAX_STEPS_AHEAD",
    "MAX_UNSENT_BYTES",
    "MAX_WAITING",
    "META_ROOM_BYTES",
    "METRICS_POLL_S",
    "METRICS_PORT",
    "METRICS_PRODUCERS",
    "METRICS_REQUEST_S",
    "METRICS_THREADS",
    "PLENTY_GROUPS",
    "POLL_RECORDS",
    "READY_PRESSURE",
    "REAP_INTERVAL_S",
    "RECLAIM_WAIT_S",
    "REDIAL_INTERVAL_S",
    "REST_S",
    "RETRY_TIMEOUT_S",
    "SPACE_WAIT_S",
    "STALL_TIMEOUT_S",
    "STATUS_GROUPS",
    "STATUS_REASON_BYTES",
    "SWEEP_INTERVAL_S",
    "TAKE_GRACE_S",
    "TAKE_SLICE_S",
    "UNCONFIRMED",
]

#: Bytes for records of a bus by default: some 14,000 trajectories of 2,048 tokens.
DEFAULT_CAPACITY = "256MiB"

#: Producers attached at once by default; each leases at least one extent.
DEFAULT_MAX_PRODUCERS = 64

#: Records that one poll reads: few enough that they are grouped while they are in the cache.
POLL_RECORDS = 128

#: Seconds between sweeps for dead producers; a sweep costs a system call for each attached one.
SWEEP_INTERVAL_S = 1.0

#: Seconds that an asyncio producer waits for space before it checks its deadline.
SPACE_WAIT_S = 0.1

#: Fill of the bus below which `Producer.wait_ready` lets a worker start a rollout: the trajectories
#: of many workers that start together still fit.
READY_PRESSURE = 0.75

#: Default for `stall_timeout`, in seconds. With many workers something moves every second, and a
#: job can afford a minute of standstill better than an hour.
STALL_TIMEOUT_S = 60.0

#: Seconds that a retry request may stay unanswered, and that a group which lost a sample waits for
#: its others: longer than a long rollout.
RETRY_TIMEOUT_S = 600.0

#: Bytes reserved for the meta of a reservation whose meta is set later.
META_ROOM_BYTES = 1024

#: Characters that `fail` keeps of a reason: an error message fits, a traceback does not.
FAIL_REASON_CHARS = 500

#: Bytes that are read of such a reason: the longest that `fail` writes.
STATUS_REASON_BYTES = 2048

#: Incomplete groups that a status names, the oldest first: enough for a pattern, less than a page.
STATUS_GROUPS = 5

# --- the daemon and its clients

#: Clients of one daemon at a time; the layout has lock bytes for each of them.
MAX_CLIENTS: int = _core.MAX_CLIENTS

#: Bytes of one control message: room for 2.5 times the places that one answer may grant.
MAX_MESSAGE_BYTES = 2 << 20

#: Upper bound for counts in a request, so that count + 1 fits an int64.
MAX_REQUESTED = 2**62

#: Trajectories leased in one answer, except for a single larger group; a place takes 24 bytes.
MAX_GRANT_TRAJECTORIES = 32_768

#: Takes of one client that may wait at once: the threads of one Consumer.
MAX_WAITING = 64

#: Bytes queued for a client that does not read; above this its connection is closed.
MAX_UNSENT_BYTES = 8 << 20

#: Seconds that a connection may stay without a Hello, so that half-open ones do not pile up.
HELLO_WAIT_S = 5.0

#: Seconds that a new daemon waits for the clients of its predecessor before it reads the ring; a
#: client that runs reconnects within milliseconds.
RECLAIM_WAIT_S = 2.0

#: Seconds between checks whether a disconnected client still holds the locks of its leases; a dying
#: process closes socket and segment within much less.
REAP_INTERVAL_S = 0.02

#: Seconds that a client waits for its daemon before it raises DaemonUnavailableError.
CLIENT_WAIT_S = 30.0

#: Seconds that a new Consumer waits for the daemon of a bus that has had one: a supervisor restarts
#: it in less.
DAEMON_WAIT_S = 5.0

#: Seconds that leases have to end after SIGTERM: an optimizer step, and less than systemd's 90.
DRAIN_TIMEOUT_S = 30.0

#: Groups of a take from which on the next portion is requested ahead: a smaller take wants few.
AHEAD_GROUPS = 16

#: Seconds that one request for groups lasts. A longer wait is several requests, so that a daemon
#: that stopped answering is noticed.
TAKE_SLICE_S = 10.0

#: Seconds that a reply may be late before the client gives up on it.
TAKE_GRACE_S = 1.0

#: Ended leases without a confirmation above which the client reads confirmations.
UNCONFIRMED = 256

#: Seconds between two attempts to reach a daemon.
REDIAL_INTERVAL_S = 0.02

#: Seconds that the daemon lets records accumulate after a poll that completed no group for a
#: waiting client: bounds its wake-ups, and delays a group by no more than this.
COALESCE_S = 0.0002

#: The same while no client waits: nothing is late then, and the ring keeps the records.
REST_S = 0.01

#: Seconds that the daemon does not read from a client that has just spoken and holds many groups:
#: its acknowledgements accumulate, and it does not need more groups sooner.
LISTEN_REST_S = 0.001

#: Groups that count as many in this sense.
PLENTY_GROUPS = 16

#: Steps that the fastest rank may be ahead of the slowest: steps formed for a slow rank hold space.
MAX_STEPS_AHEAD = 64

#: Default port of the metrics: free in Prometheus' list of port allocations.
METRICS_PORT = 9464

#: Producer slots with a label of their own; the others share one, so that thousands of producers do
#: not make thousands of time series.
METRICS_PRODUCERS = 64

#: Seconds that a client of the metrics server may be silent.
METRICS_REQUEST_S = 5.0

#: Metrics requests that are served at once; further ones are refused.
METRICS_THREADS = 8

#: Seconds within which the metrics server notices that it was told to stop.
METRICS_POLL_S = 0.5
