"""What came of an update: at one server, and at all of them."""

from __future__ import annotations

import msgspec


class ServerReport(msgspec.Struct, kw_only=True):
    """How an update went at one server.

    Attributes
    ----------
    address : str
        Which one.
    ranks : int
        Processes that load weights.
    version : int or None
        What all of its ranks run by their rows; None where they do not agree, or never said.
    state : "serving" | "paused" | "unknown" | "gone"
        Unknown: it gives no answer. Gone: nobody listens at its address any more.
    paused_s, load_s : float
        Seconds from pause to resume, and of loading.
    error : str
        Why it did not take the version; empty where it did.
    warning : str
        What the server complained of although its ranks have the version, such as a cache that it
        could not clear: it may serve keys and values of the old weights.
    """

    address: str
    ranks: int = 0
    version: int | None = None
    state: str = "serving"
    paused_s: float = 0.0
    load_s: float = 0.0
    error: str = ""
    warning: str = ""


class UpdateReport(msgspec.Struct, kw_only=True):
    """How an update went.

    Attributes
    ----------
    version, previous : int, int or None
        The new one, and what ran before; None before the first.
    servers : list[ServerReport]
        In the order that they were given.
    total_s : float
        Seconds, publication included.
    life : str
        Name of the publication, unique among all runs, as in `Request.cache_salt`; for adapters
        the adapter's name; empty for reloads.
    """

    version: int
    previous: int | None
    servers: list[ServerReport]
    total_s: float = 0.0
    life: str = ""

    @property
    def torn(self) -> list[str]:
        """Addresses of servers that stay paused, since their model is not whole."""
        return [each.address for each in self.servers if each.state == "paused"]
