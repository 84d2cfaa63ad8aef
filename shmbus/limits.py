"""Limits that several rooms share, and a producer's, each with its unit and its reason.

Any other limit of one room stands beside its use. Limits of the segment's layout are defined in C
(``shmbus_ext/ring/layout.h``), and only passed on here.
"""

from __future__ import annotations

from shmbus_ext import _core

#: Bytes for records of a bus by default: some 14,000 trajectories of 2,048 tokens. Where /dev/shm
#: has less than twice as much free, a bus takes half of that: containers get 64 MiB.
DEFAULT_CAPACITY = "256MiB"

#: Bytes below which no default makes sense: a record may then have 2 MiB.
SMALLEST_DEFAULT_CAPACITY = 8 << 20

#: Producers attached at once by default, in a bus that has an extent for each: 260 KiB.
DEFAULT_MAX_PRODUCERS = 64

#: Records that one poll reads: few enough that they are grouped while they are in the cache.
POLL_RECORDS = 128

#: Late groups that one take ends: some 5 ms of work.
EXPIRE_GROUPS = 2_048

#: Seconds between sweeps for dead producers; a sweep costs a system call for each attached
#: producer, of 256 at most.
SWEEP_INTERVAL_S = 1.0

#: Seconds that an asyncio producer waits for space before it checks its deadline.
SPACE_WAIT_S = 0.1

#: Seconds that a worker sleeps for a prompt before the worker looks again, and for dead workers if
#: no other process does. From slot 16 on a sleep grows with the slot, up to the second figure:
#: 1,000 waiting workers together wake up 210 times a second, instead of 2,000 times.
REQUEST_WAIT_S = 0.5
REQUEST_REST_S = 8.0
REQUEST_EAGER_SLOTS = 16

#: Times that a sample is given back with what there is of it, before it starts anew: one that no
#: worker ends would keep its room for ever.
PARTIAL_RELEASES = 16

#: Seconds that the thread sleeps which waits for the groups of an event loop: at the end of
#: `asyncio.run` the loop waits for it.
ASYNC_TAKE_S = 0.25

#: Fill of the bus below which `Producer.wait_ready` lets a worker start a rollout: the trajectories
#: of many workers that start together still fit.
READY_PRESSURE = 0.75

#: Seconds between two reports of a stall. With many workers something moves every second, and a job
#: can afford a minute of standstill better than an hour.
STALL_REPORT_S = 60.0

#: Seconds without movement after which a trainer's wait is an error: where no living worker is
#: attached, so that a cluster has time to start them again; and where one is that may be at work on
#: a sample, which takes agents twenty minutes.
STALL_DEAD_S = 600.0
STALL_SLOW_S = 1800.0

#: Default for `group_timeout`, in seconds: longer than the slowest sample of most runs.
GROUP_TIMEOUT_S = 1800.0

#: Seconds between two log lines for one cause: drops of one reason, or refused clients. Events
#: between them are summed up, since producers and clients decide how many there are.
LOG_INTERVAL_S = 60.0

#: Seconds that a retry request may stay unanswered, and that a group which lost a sample waits for
#: its others: longer than a long rollout.
RETRY_TIMEOUT_S = 600.0

#: Seconds before a failed sample is asked for again, and before a worker whose samples all fail is
#: given another: first, and at most. An engine starts in tens of seconds.
RETRY_BACKOFF_S = (0.5, 30.0)

#: Samples in a row that failed alike, and of how many prompts at least, before the request lane is
#: paused: more than one group of most runs has, and prompts that nobody can sample are rarer than
#: three one behind the other. A worker may fail as many in a row before it waits.
ALIKE_FAILURES = 16
ALIKE_PROMPTS = 3

#: Seconds between two probes of a paused lane, at least.
PROBE_S = 0.1

#: Bytes reserved for the meta of a reservation whose meta is set later.
META_ROOM_BYTES = 1024

#: Characters that `fail` keeps of a reason: an error message fits, a traceback does not.
FAIL_REASON_CHARS = 500

#: Bytes that are read of such a reason: the longest that `fail` writes.
STATUS_REASON_BYTES = 2048

#: Incomplete groups that a status names, the oldest first: enough for a pattern, less than a page.
STATUS_GROUPS = 5

#: Incomplete groups that one answer shows sample by sample: more than a screen has rows.
MAX_GROUPS_SHOWN = 1000

#: Samples of one group that an answer shows one by one: all of the largest.
MAX_CELLS_SHOWN: int = _core.MAX_GROUP_SIZE

#: Events that one answer has: with ids and reasons of full length still less than a message.
MAX_EVENTS_SHOWN = 500

#: Bytes of such an answer, about: half of a control message, some 15,000 samples.
GROUPS_REPLY_BYTES = 1 << 20

# --- the daemon and its clients

#: Clients of one daemon at a time; the layout has lock bytes for each of them.
MAX_CLIENTS: int = _core.MAX_CLIENTS

#: Bytes of one control message: room for 2.5 times the places that one answer may grant.
MAX_MESSAGE_BYTES = 2 << 20

#: Upper bound for counts in a request, so that count + 1 fits an int64.
MAX_REQUESTED = 2**62

#: Seconds that a connection may stay without a Hello, so that half-open ones do not pile up.
HELLO_WAIT_S = 5.0

#: Seconds that a new daemon waits for the clients of its predecessor before it reads the ring; a
#: client that runs reconnects within milliseconds.
RECLAIM_WAIT_S = 2.0

#: Seconds that a client waits for its daemon before it raises DaemonUnavailableError.
CLIENT_WAIT_S = 30.0

#: Seconds that a client which leaves waits for a daemon that has not been told of acknowledged
#: groups: a restart, and a process's end that is not held up for long where none comes.
LEAVE_WAIT_S = 5.0

#: Seconds that one request for groups lasts. A longer wait is several requests, so that a daemon
#: that stopped answering is noticed.
TAKE_SLICE_S = 10.0

#: Ended leases without a confirmation above which the client reads confirmations.
UNCONFIRMED = 256

#: Seconds between two attempts to reach a daemon.
REDIAL_INTERVAL_S = 0.02

#: Default port of the metrics: free in Prometheus' list of port allocations.
METRICS_PORT = 9464
