"""What the page's server is told, and its limits, each with its unit and its reason.

Invariant: what one client can make the server keep is bounded by what is here.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: Seconds between two polls of a bus, however many pages watch it.
POLL_S: Final = 1.0
#: Seconds after which a picture is too old for a page that begins to watch.
OLD_S: Final = 2.0
#: Polls that the curves keep: five minutes.
HISTORY: Final = 300
#: Incomplete groups that a page shows: more than a screen has rows, little to send.
GROUPS: Final = 48
#: Samples of a group that a page shows one by one; the rest is a number.
CELLS: Final = 128
#: Samples that a page shows one by one in all groups together; of larger groups it shows fewer.
WALL_CELLS: Final = 2048
#: Events that a page lists.
EVENTS: Final = 20
#: Questions about one group that are answered at once; a page has one under way.
QUESTIONS: Final = 16
#: Producers, and buses of the overview, that a page lists; the rest is a number.
PRODUCERS: Final = 256
#: Sessions of agents that a page lists: as many as one recorder says.
SESSIONS: Final = 48
BUSES: Final = 64
#: The part of a processor that walks over the records of a bus without a daemon may cost.
WALK_SHARE: Final = 0.02
#: Connections at once: ten colleagues with some tabs each. Others are closed as they come.
MAX_CONNECTIONS: Final = 128
#: Pages that watch at once; further ones are told to come back.
MAX_WATCHING: Final = 64
#: Buses that are polled at once.
MAX_BUSES: Final = 64
#: Bytes that wait for a page that reads slowly; one that leaves more is closed, and comes again.
MAX_BEHIND_BYTES: Final = 1 << 20
#: Seconds that it has to read them.
SEND_S: Final = 10.0
#: Bytes of a request's line, and of each header.
HEADER_BYTES: Final = 8 << 10
#: Seconds that a connection may stay without a whole request.
IDLE_S: Final = 15.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the server is told."""

    #: The buses; empty for all of this user.
    buses: tuple[str, ...]
    #: Where it listens; port 0 takes any free one.
    host: str
    port: int
    #: What a page shows once, for its cookie.
    token: str
