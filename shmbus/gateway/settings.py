"""Settings and limits of the gateway, with units and reasons."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

#: Seconds that a POST may wait for room. A client of Atropos gives a group up after three quick
#: 5xx, and waits 300 s for an answer: the answer must come before 300 s, but late.
HOLD_S: Final = 240.0
#: Seconds that an answer may stay unread in our buffer before its connection ends.
ANSWER_S: Final = 60.0
#: Seconds for a connection without a request: many times a client's pause on a kept connection.
#: Clients of Atropos make a new connection for each request.
IDLE_S: Final = 75.0
#: Connections at a time, well below a process's limit of open files.
MAX_CONNECTIONS: Final = 8192
#: Bytes of a body of a few numbers and names. They take no part of the budget, so environments get
#: answers while bodies wait for room.
SMALL_BYTES: Final = 64 << 10
#: Bytes of the body of one group, inflated: 16 sequences of 64k tokens with three arrays.
BODY_LIMIT: Final = 64 << 20
#: Bytes of every body in this process together, read or waiting for room.
MEMORY: Final = 256 << 20
#: Bytes of free memory kept for the next body; and the least size of a body with its own, returned
#: memory. Without the first a body of a megabyte costs a thousand page faults, a quarter of its
#: processor time.
SPARE_BYTES: Final = 32 << 20
OWN_BYTES: Final = 8 << 20
#: Least bytes of a compressed answer, for clients that accept gzip; from Atropos.
COMPRESS_FROM: Final = 1000
#: Seconds between two reads of the bus without a request for a batch: the age of queue sizes.
DRAIN_S: Final = 0.1
#: Seconds without a read until a client's report triggers a read: requests have delayed the
#: maintenance. A put body always counts.
STALE_S: Final = 0.3
#: Groups taken by a read of the bus.
TAKE_GROUPS: Final = 256
#: Seconds to remember a body with a lost answer: longer than a client of Atropos tries.
RETRY_S: Final = 900.0
#: Bodies in the journal for a successor: answers under way or lost.
JOURNAL_ENTRIES: Final = 4096
#: Groups of a body: the journal counts them in two bytes.
MAX_GROUPS: Final = 0xFFFF
#: Environments of a trainer. Each is kept for a successor, and polls ten times a second.
MAX_ENVS: Final = 4096
#: Sequences of a group: the bus takes no more.
MAX_GROUP_SIZE: Final = 16_384
#: Characters of a name or path in a registration.
NAME_CHARS: Final = 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a gateway for a bus."""

    bus: str
    #: The listening address; port 0 for any free port.
    host: str = "127.0.0.1"
    port: int = 8000
    #: The clients' token in ``Authorization: Bearer TOKEN``; None without authorization.
    token: str | None = None
    #: Bytes of a body, inflated, and of every body together.
    body_limit: int = BODY_LIMIT
    memory: int = MEMORY
    #: Seconds that a POST waits for room.
    hold_s: float = HOLD_S
    #: Given batches that stay leased, to come again after a trainer's death: 1 acknowledges a batch
    #: at the request for the next.
    keep_batches: int = 1
    #: Take groups from the bus's daemon, with the values of `shmbus.Consumer`.
    daemon: bool | None = None
    log_format: Literal["json", "text"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
