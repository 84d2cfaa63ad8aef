"""Every operational limit of the Python side, with its unit and its reason.

Limits of the byte layout are C's (``shmbus_ext/ring/layout.h``) and only passed on here.
"""

from __future__ import annotations

from shmbus_ext import _core

__all__ = [
    "AHEAD_GROUPS",
    "ATTACH_WAIT_S",
    "CAPTURE_POLL_S",
    "CLIENT_WAIT_S",
    "COALESCE_S",
    "DAEMON_WAIT_S",
    "DEFAULT_CAPACITY",
    "DEFAULT_MAX_PRODUCERS",
    "DOCTOR_FILES",
    "DOCTOR_SHM_FAIL_BYTES",
    "DOCTOR_SHM_WARN_BYTES",
    "DOCTOR_TORCH_S",
    "DRAIN_TIMEOUT_S",
    "EVACUATE_FREE_FRACTION",
    "EVACUATE_INTERVAL_S",
    "FAIL_REASON_CHARS",
    "HELLO_WAIT_S",
    "LISTEN_REST_S",
    "MAX_REQUESTED",
    "MAX_CLIENTS",
    "MAX_GRANT_TRAJECTORIES",
    "MAX_GROUP_SIZE",
    "MAX_ID_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_NAME_BYTES",
    "MAX_STEPS_AHEAD",
    "MAX_UNSENT_BYTES",
    "MAX_WAITING",
    "META_ROOM_BYTES",
    "METRICS_POLL_S",
    "METRICS_PORT",
    "METRICS_PRODUCERS",
    "METRICS_REQUEST_S",
    "METRICS_THREADS",
    "OBSERVE_WAIT_S",
    "PARTS_WAITING",
    "PART_BYTES",
    "PLENTY_GROUPS",
    "POLL_RECORDS",
    "READY_PRESSURE",
    "REAP_INTERVAL_S",
    "RECENT_KEYS",
    "RECLAIM_WAIT_S",
    "REDIAL_INTERVAL_S",
    "REST_S",
    "RETRY_TIMEOUT_S",
    "SPACE_WAIT_S",
    "STALL_LOOKS",
    "STALL_TIMEOUT_MAX_S",
    "STALL_TIMEOUT_S",
    "STATUS_ATTEMPTS",
    "STATUS_GROUPS",
    "STATUS_MISSING",
    "STATUS_REASON_BYTES",
    "STATUS_RECORDS",
    "SUCCESSOR_POLL_S",
    "SWEEP_INTERVAL_S",
    "TAKE_GRACE_S",
    "TAKE_POLLS",
    "TAKE_SLICE_S",
    "TOP_HISTORY",
    "TOP_SAMPLE_RECORDS",
    "TOP_SAMPLE_RUNS",
    "TOP_WALK_RECORDS",
    "UNCONFIRMED",
    "UNFINISHED_WAIT_S",
]

#: Bytes for records of a bus that says nothing else: some 14,000 trajectories of 2,048 tokens.
DEFAULT_CAPACITY = "256MiB"

#: Producers attached at once unless asked for more; each holds at least one extent.
DEFAULT_MAX_PRODUCERS = 64

#: Bytes of an instance id in UTF-8: it has a byte's worth of length in every record.
MAX_ID_BYTES: int = _core.MAX_ID_BYTES

#: Samples in a group: one acknowledgement is atomic, and its log has room for this many.
MAX_GROUP_SIZE: int = _core.MAX_GROUP_SIZE

#: Bytes of a bus name: it becomes a file name, with a prefix, and those end at 255.
MAX_NAME_BYTES = 200

#: Seconds that attaching waits for a segment whose creator is still allocating it.
ATTACH_WAIT_S = 10.0

#: Seconds between two looks at a segment without magic and lock: its creator, if it lives, locks it
#: within microseconds.
UNFINISHED_WAIT_S = 0.2

#: Records taken from the ring at a time: what describes them is grouped before it leaves the cache.
POLL_RECORDS = 128

#: How often one take() does so at the most, so that a flood cannot keep it from returning.
TAKE_POLLS = 16

#: Seconds between looks for dead producers; each look is a system call for each attached one.
SWEEP_INTERVAL_S = 1.0

#: Stragglers are moved out of the way when less than this fraction of the extents is free ...
EVACUATE_FREE_FRACTION = 0.125

#: ... and at most this often, since each attempt looks at every stashed trajectory.
EVACUATE_INTERVAL_S = 0.05

#: Keys of completed groups that are remembered to tell a surplus sample, where epochs are given.
RECENT_KEYS = 65_536

#: Seconds that one wait for space lasts before an asyncio producer looks at its deadline again.
SPACE_WAIT_S = 0.1

#: Seconds between two looks of an asyncio producer for the successor of a removed bus.
SUCCESSOR_POLL_S = 0.02

#: Fill of the bus below which `Producer.wait_ready` lets a worker begin another rollout: what many
#: workers begin at once still fits.
READY_PRESSURE = 0.75

#: Seconds in which nothing moved while somebody waits, after which it is reported: with many
#: workers something moves every second, and a minute of nothing costs a job less than an hour.
STALL_TIMEOUT_S = 60.0

#: The longest that may be asked for: a day without a word is what the watchdog is against.
STALL_TIMEOUT_MAX_S = 86_400.0

#: Looks at the bus in each such period, each some microseconds: a stall is told a fourth late at
#: the most.
STALL_LOOKS = 4

#: Seconds that a sample may be asked for without an answer, and that a group with one that failed
#: for good waits for its others: longer than a long rollout, shorter than anybody's patience.
RETRY_TIMEOUT_S = 600.0

#: Bytes kept for the meta of a reservation whose meta is set later.
META_ROOM_BYTES = 1024

# --- the daemon

#: Clients of one daemon at a time; each has a range of lock bytes of its own in the layout.
MAX_CLIENTS: int = _core.MAX_CLIENTS

#: Bytes of one control message: room for the places of 2.5 times the most that is granted at once.
MAX_MESSAGE_BYTES = 2 << 20

#: Groups or tokens that are asked for at once, and steps: what a machine word holds, and the next.
MAX_REQUESTED = 2**62

#: Trajectories granted in one answer, a single larger group apart; 24 bytes of places for each.
MAX_GRANT_TRAJECTORIES = 32_768

#: Requests of one client that may wait for groups at once: threads of one Consumer.
MAX_WAITING = 64

#: Bytes that wait for a client that does not read; above this it is closed as too slow.
MAX_UNSENT_BYTES = 8 << 20

#: Seconds that a connection may stay without a Hello, so that half-open ones take no place.
HELLO_WAIT_S = 5.0

#: Seconds that a new daemon waits for the clients of the one before it, before it reads the ring;
#: they come within milliseconds unless they are stopped.
RECLAIM_WAIT_S = 2.0

#: Seconds between looks whether a client that went away with leases still holds their locks; a
#: dying process closes its socket and its segment within much less.
REAP_INTERVAL_S = 0.02

#: Seconds that a client goes on without its daemon before it raises DaemonUnavailableError.
CLIENT_WAIT_S = 30.0

#: Seconds that a new Consumer waits for the daemon of a bus that one has served: a supervisor
#: starts it again within that.
DAEMON_WAIT_S = 5.0

#: Seconds that leases have to end after SIGTERM: an optimizer step, and less than systemd's 90.
DRAIN_TIMEOUT_S = 30.0

#: Groups of a take from which on the next portion is asked for ahead: below, the caller wants few.
AHEAD_GROUPS = 16

#: Seconds that one request for groups lasts; a longer wait is several, so that a daemon which does
#: not answer is noticed.
TAKE_SLICE_S = 10.0

#: Seconds that a reply may be late before the client stops waiting for it.
TAKE_GRACE_S = 1.0

#: Ended leases whose confirmation nobody has read yet, above which the client looks for it.
UNCONFIRMED = 256

#: Seconds between two attempts to reach a daemon that is away.
REDIAL_INTERVAL_S = 0.02

#: Seconds that the daemon lets records gather after a look at the ring that completed no group for
#: a client that waits: bounds its wake-ups, and adds at most this to a group's way.
COALESCE_S = 0.0002

#: The same while nobody waits: nothing is late then, and the ring keeps what comes.
REST_S = 0.01

#: Seconds that the daemon does not listen to a client which has just spoken and holds plenty: its
#: acknowledgements gather meanwhile, and it is done with what it holds no sooner.
LISTEN_REST_S = 0.001

#: Groups in a client's hands that are plenty: below, it may ask for more sooner than that.
PLENTY_GROUPS = 16

#: Steps that the fastest rank may be ahead of the slowest: what is formed for one that does not
#: come holds space.
MAX_STEPS_AHEAD = 64

#: Walks that a status makes for a count at one instant, before it says that the bus was too busy.
STATUS_ATTEMPTS = 3

#: Incomplete groups that a status names, the oldest first: who waits, without a page of them.
STATUS_GROUPS = 5

#: Missing indices of a group that a status names; their number is always exact.
STATUS_MISSING = 16

#: Characters that are kept of why a sample failed: what went wrong, not a traceback.
FAIL_REASON_CHARS = 500

#: Bytes of such a reason that are read for a status: the longest that `fail` writes.
STATUS_REASON_BYTES = 2048

#: Records that a status sorts into groups: about two seconds of work; beyond, groups stay unnamed.
STATUS_RECORDS = 200_000

#: Free bytes of /dev/shm below which no useful bus fits: its tables and a few records.
DOCTOR_SHM_FAIL_BYTES = 8 << 20

#: Free bytes below which a bus of the default size does not fit twice: Docker's 64 MiB, for one.
DOCTOR_SHM_WARN_BYTES = 512 << 20

#: Open files a process below which a daemon with a few hundred clients runs out of them.
DOCTOR_FILES = 1024

#: Seconds that importing torch may take: a cold disk needs tens, a hanging driver for ever.
DOCTOR_TORCH_S = 120.0

#: Looks that a live view remembers for its chart: wider than any terminal.
TOP_HISTORY = 512

#: Undelivered trajectories up to which each look also walks and groups them: some 0.2 s of work.
TOP_WALK_RECORDS = 20_000

#: Records and runs that a look takes for the mean size of a trajectory.
TOP_SAMPLE_RECORDS = 8
TOP_SAMPLE_RUNS = 8

#: Seconds that a daemon has to say how it is: it answers in milliseconds, or something is wrong.
OBSERVE_WAIT_S = 1.0

#: Where metrics are served unless told otherwise: free in Prometheus' list of port allocations.
METRICS_PORT = 9464

#: Producer slots that are labels of their own; those beyond are one together, so that a bus with
#: thousands of producers does not make thousands of time series.
METRICS_PRODUCERS = 64

#: Seconds that a client of the metrics server may be silent.
METRICS_REQUEST_S = 5.0

#: Requests for metrics that are answered at once; more are turned away.
METRICS_THREADS = 8

#: Seconds within which the metrics server notices that it shall stop.
METRICS_POLL_S = 0.5

#: Bytes of records above which a part of a snapshot is written: little enough to hold in memory a
#: few times, enough that a file is one long write.
PART_BYTES = 64 << 20

#: Parts' worth of records that wait in memory, where there are many schemas.
PARTS_WAITING = 4

#: Seconds between two looks of a recording that finds nothing new: short, since what a consumer
#: acknowledges meanwhile is missed, and since a look costs microseconds.
CAPTURE_POLL_S = 0.001
