"""Limits shared by several rooms, and a producer's, with units and reasons.

A limit of a single room stands beside its use. Limits of the segment's layout are defined in C
(``shmbus_ext/ring/layout.h``), and only passed on here.
"""

from __future__ import annotations

from shmbus_ext import _core

#: Default bytes for records of a bus: some 14,000 trajectories of 2,048 tokens. If /dev/shm lacks
#: twice as much free space, a bus takes half of the free space: containers get 64 MiB.
DEFAULT_CAPACITY = "256MiB"

#: Bytes below which a default makes no sense: a record may then take 2 MiB.
SMALLEST_DEFAULT_CAPACITY = 8 << 20

#: Default number of producers attached at once, if the bus has an extent for each: 260 KiB.
DEFAULT_MAX_PRODUCERS = 64

#: Records read per poll: few enough to be grouped while still in the cache.
POLL_RECORDS = 128

#: Late groups ended per take: some 5 ms of work.
EXPIRE_GROUPS = 2_048

#: Seconds between sweeps for dead producers; a sweep costs a system call for each attached
#: producer, of 256 at most.
SWEEP_INTERVAL_S = 1.0

#: Seconds an asyncio producer waits for space between two checks of its deadline.
SPACE_WAIT_S = 0.1

#: Seconds that a worker sleeps for a prompt before the worker looks again, and for dead workers if
#: no other process does. From slot 16 on a sleep grows with the slot, up to the second figure:
#: 1,000 waiting workers together wake up 210 times a second, instead of 2,000 times.
REQUEST_WAIT_S = 0.5
REQUEST_REST_S = 8.0
REQUEST_EAGER_SLOTS = 16

#: Releases of a sample with a partial rollout until the sample starts anew: a never-ending sample
#: would keep its room for ever.
PARTIAL_RELEASES = 16

#: Seconds slept by the thread that waits for an event loop's groups: at the end of `asyncio.run`
#: the loop waits for the thread.
ASYNC_TAKE_S = 0.25

#: Fill of the bus below which `Producer.wait_ready` lets a worker start a rollout: the trajectories
#: of many workers that start together still fit.
READY_PRESSURE = 0.75

#: Seconds between two reports of a stall. With many workers something moves every second, and a job
#: can afford a minute of standstill better than an hour.
STALL_REPORT_S = 60.0

#: Seconds without movement after which a trainer's wait becomes an error. STALL_DEAD_S, without a
#: living worker, lets a cluster restart workers. STALL_SLOW_S, with a worker maybe at work, covers
#: an agent's sample of twenty minutes.
STALL_DEAD_S = 600.0
STALL_SLOW_S = 1800.0

#: Default for `group_timeout`, in seconds: longer than the slowest sample of most runs.
GROUP_TIMEOUT_S = 1800.0

#: Seconds between two log lines for the same cause: drops of a reason, or refused clients. Events
#: in between are summed up, because producers and clients control their number.
LOG_INTERVAL_S = 60.0

#: Seconds that a retry request may stay unanswered, and that a group with a lost sample waits for
#: its remaining samples: longer than a long rollout.
RETRY_TIMEOUT_S = 600.0

#: Seconds before a failed sample is requested again, and before a worker with only failures gets
#: another sample: first and maximum. An engine starts in tens of seconds.
RETRY_BACKOFF_S = (0.5, 30.0)

#: Consecutive like failures, and the minimum number of their prompts, before the request lane
#: pauses: most groups are smaller, and three unsampleable prompts in a row are rare. A worker may
#: fail as many times in a row before waiting.
ALIKE_FAILURES = 16
ALIKE_PROMPTS = 3

#: Seconds between two probes of a paused lane, at least.
PROBE_S = 0.1

#: Largest score of either sign: the difference of two stays finite in a batch's float32.
MAX_SCORE: float = _core.MAX_SCORE

#: Bytes reserved for the meta of a reservation whose meta is set later.
META_ROOM_BYTES = 1024

#: Characters of a reason kept by `fail`: an error message fits, a traceback does not.
FAIL_REASON_CHARS = 500

#: Bytes read of a reason: the longest written by `fail`.
STATUS_REASON_BYTES = 2048

#: Incomplete groups named by a status, the oldest first: enough for a pattern, less than a page.
STATUS_GROUPS = 5

#: Incomplete groups an answer shows sample by sample: more than a screen's rows.
MAX_GROUPS_SHOWN = 1000

#: Samples of a group that an answer shows singly: the largest group's size.
MAX_CELLS_SHOWN: int = _core.MAX_GROUP_SIZE

#: Events per answer: with ids and reasons of full length still less than a message.
MAX_EVENTS_SHOWN = 500

#: Approximate bytes of a groups answer: half of a control message, some 15,000 samples.
GROUPS_REPLY_BYTES = 1 << 20

# --- the daemon and its clients

#: Clients of a daemon at a time; the layout reserves a lock byte for every client.
MAX_CLIENTS: int = _core.MAX_CLIENTS

#: Bytes of a control message: room for 2.5 times the places an answer may grant.
MAX_MESSAGE_BYTES = 2 << 20

#: Upper bound for counts in a request: count + 1 fits an int64.
MAX_REQUESTED = 2**62

#: Seconds a connection may stay without a Hello: half-open connections must not pile up.
HELLO_WAIT_S = 5.0

#: Seconds a new daemon waits for its predecessor's clients before reading the ring; a running
#: client reconnects within milliseconds.
RECLAIM_WAIT_S = 2.0

#: Seconds a client waits for its daemon until DaemonUnavailableError.
CLIENT_WAIT_S = 30.0

#: Seconds a leaving client waits for a daemon unaware of acknowledged groups: time for a restart,
#: without a long delay of the process's end if no daemon comes.
LEAVE_WAIT_S = 5.0

#: Seconds of a single request for groups. A longer wait consists of several requests, to notice a
#: daemon that stopped answering.
TAKE_SLICE_S = 10.0

#: Ended leases without a confirmation above which the client reads confirmations.
UNCONFIRMED = 256

#: Seconds between two attempts to reach a daemon.
REDIAL_INTERVAL_S = 0.02

#: Default port of the metrics: free in Prometheus' list of port allocations.
METRICS_PORT = 9464
