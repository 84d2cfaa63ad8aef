"""Reports of an update: per server, and for the fleet."""

from __future__ import annotations

import msgspec


class ServerReport(msgspec.Struct, kw_only=True):
    """Result of an update at one server.

    Attributes
    ----------
    address : str
        The server's address.
    ranks : int
        Processes that load weights.
    version : int or None
        The version in every rank's row; None if they differ or are missing.
    state : "serving" | "asleep" | "paused" | "unknown" | "gone"
        Unknown: the server does not answer. Gone: no process listens at its address any more.
    paused_s, load_s : float
        Seconds from pause to resume, and of loading.
    error : str
        Reason for not taking the version; empty after success.
    warning : str
        The server's complaint although its ranks run the version, for example a cache not
        cleared: it may serve keys and values of the old weights.
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
    """Result of an update.

    Attributes
    ----------
    version, previous : int, int or None
        The new version and the old one; None before the first.
    servers : list[ServerReport]
        In the given order.
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
        """Addresses of servers that stay paused with a torn model."""
        return [each.address for each in self.servers if each.state == "paused"]
