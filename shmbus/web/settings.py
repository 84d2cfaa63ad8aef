"""Settings of the page's server, and its limits, with units and reasons.

Invariant: the limits bound a client's memory in the server.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: Seconds between two polls of a bus, regardless of the number of pages.
POLL_S: Final = 1.0
#: Seconds after which a picture grows too old for a new page.
OLD_S: Final = 2.0
#: Polls kept by the curves: five minutes.
HISTORY: Final = 300
#: Incomplete groups shown by a page: more than a screen's rows, little to send.
GROUPS: Final = 48
#: Samples of a group a page shows singly; a number counts the rest.
CELLS: Final = 128
#: Samples a page shows singly over its groups; larger groups show fewer.
WALL_CELLS: Final = 2048
#: Events listed by a page.
EVENTS: Final = 20
#: Questions about a group answered at once; a page keeps a single question under way.
QUESTIONS: Final = 16
#: Producers, and buses of the overview, that a page lists; a number counts the rest.
PRODUCERS: Final = 256
#: Sessions of agents listed by a page: as many as a recorder reports.
SESSIONS: Final = 48
BUSES: Final = 64
#: The part of a processor that walks over the records of a bus without a daemon may cost.
WALK_SHARE: Final = 0.02
#: Connections at once: ten colleagues with some tabs each. Further connections are closed on
#: arrival.
MAX_CONNECTIONS: Final = 128
#: Pages that watch at once; further pages are told to come back.
MAX_WATCHING: Final = 64
#: Buses polled at once.
MAX_BUSES: Final = 64
#: Bytes that wait for a slow page; a page that leaves more is closed, and comes again.
MAX_BEHIND_BYTES: Final = 1 << 20
#: Seconds for a page to read them.
SEND_S: Final = 10.0
#: Bytes of a request's line, and of every header.
HEADER_BYTES: Final = 8 << 10
#: Seconds that a connection may stay without a whole request.
IDLE_S: Final = 15.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the page's server."""

    #: The buses; empty for all of this user.
    buses: tuple[str, ...]
    #: Listening address; port 0 takes a free port.
    host: str
    port: int
    #: Token a page shows once, for its cookie.
    token: str
