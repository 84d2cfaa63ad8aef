"""Every operational limit of the Python side, with its unit and its reason.

Limits of the byte layout are C's (``shmbus_ext/layout.h``) and only passed on here.
"""

from __future__ import annotations

from shmbus_ext import _core

__all__ = [
    "ATTACH_WAIT_S",
    "DEFAULT_CAPACITY",
    "DEFAULT_MAX_PRODUCERS",
    "EVACUATE_FREE_FRACTION",
    "EVACUATE_INTERVAL_S",
    "MAX_GROUP_SIZE",
    "MAX_ID_BYTES",
    "MAX_NAME_BYTES",
    "META_ROOM_BYTES",
    "POLL_RECORDS",
    "RECENT_KEYS",
    "SPACE_WAIT_S",
    "SWEEP_INTERVAL_S",
    "TAKE_POLLS",
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

#: Bytes kept for the meta of a reservation whose meta is set later.
META_ROOM_BYTES = 1024
