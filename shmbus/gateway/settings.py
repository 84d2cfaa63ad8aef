"""Settings of the gateway, and its limits, each with its unit and its reason."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

#: Seconds that a POST may wait for room. A client of Atropos gives a group up after three quick
#: 5xx, and waits 300 s for an answer: the answer has to come before that, and late.
HOLD_S: Final = 240.0
#: Seconds that a client has for its body, and as long again for each SLOW_BYTES of it.
BODY_S: Final = 60.0
SLOW_BYTES: Final = 8 << 20
#: What has to come of a body that has room while others wait for it, in each window of so many
#: seconds: far less than any network carries, and more than a client sends that has stopped.
SLOWEST_BYTES_PER_S: Final = 16 << 10
STALL_S: Final = 5.0
#: Seconds between two looks at that.
STALL_CHECK_S: Final = 1.0
#: Seconds that an answer may stay unread in our buffer before its connection ends.
ANSWER_S: Final = 60.0
#: Seconds that a connection may stay without a request: many times as
#: long as a client that keeps it pauses; those of Atropos make a new connection for each request.
IDLE_S: Final = 75.0
#: Connections at a time, well below the open files that a process may have.
MAX_CONNECTIONS: Final = 8192
#: Bytes of a body that says no more than a few numbers and names. They take no part of the budget,
#: so that environments are answered while bodies wait for room.
SMALL_BYTES: Final = 64 << 10
#: Bytes of the body of one group, inflated: 16 sequences of 64k tokens with three arrays.
BODY_LIMIT: Final = 64 << 20
#: Bytes of all bodies in this process together, read or waiting for room.
MEMORY: Final = 256 << 20
#: Bytes of free memory that this process keeps for the next body instead of giving them back, and
#: bytes from which a body has memory of its own, which it does give back. Without the first a body
#: of a megabyte costs a thousand page faults, a quarter of its processor time.
SPARE_BYTES: Final = 32 << 20
OWN_BYTES: Final = 8 << 20
#: Bytes above which an answer is compressed in a thread, so that others are answered meanwhile.
LARGE_BYTES: Final = 4 << 20
#: Bytes from which an answer is compressed, where the client takes that; as in Atropos.
COMPRESS_FROM: Final = 1000
#: Seconds between two reads of the bus while nobody asks for a batch; queue sizes are as old.
DRAIN_S: Final = 0.1
#: Seconds without a read after which a client has one made: others have kept the maintenance from
#: it. A body that was put is always counted.
STALE_S: Final = 0.3
#: Groups that one read of the bus takes.
TAKE_GROUPS: Final = 256
#: Seconds that a body whose answer was lost is known for: longer than a client of Atropos tries.
RETRY_S: Final = 900.0
#: Bodies whose answers are on their way or were lost, that a successor of this process is told of.
JOURNAL_ENTRIES: Final = 4096
#: Groups of one body: the journal counts them in two bytes.
MAX_GROUPS: Final = 0xFFFF
#: Environments that may register with one trainer. Each is kept for a successor, and asked of ten
#: times a second.
MAX_ENVS: Final = 4096
#: Sequences of a group: the bus takes no more.
MAX_GROUP_SIZE: Final = 16_384
#: Characters of a name or path in a registration.
NAME_CHARS: Final = 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway serves one bus."""

    bus: str
    #: Where it listens; port 0 for any free one.
    host: str = "127.0.0.1"
    port: int = 8000
    #: What clients send as ``Authorization: Bearer TOKEN``; None where nothing is asked for.
    token: str | None = None
    #: Bytes of one body, inflated, and of all bodies together.
    body_limit: int = BODY_LIMIT
    memory: int = MEMORY
    #: Seconds that a POST waits for room.
    hold_s: float = HOLD_S
    #: Batches that a trainer has been given and that stay leased, so that they come again if it
    #: dies: 1 acknowledges a batch when the next one is asked for.
    keep_batches: int = 1
    #: Whether groups come from the daemon of the bus, as for `shmbus.Consumer`.
    daemon: bool | None = None
    log_format: Literal["json", "text"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
