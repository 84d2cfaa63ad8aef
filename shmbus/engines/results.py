"""Results of servers: errors with advice for the operator, and reports of updates."""

from __future__ import annotations

import msgspec

from shmbus import ShmbusError

#: Limit of an answer's characters in a message.
SHOWN_BODY = 500


class EngineError(ShmbusError):
    """A server failed a request.

    Attributes
    ----------
    server, step : str
        Its address, and the failed step: "pause", "update" ...
    status : int or None
        The HTTP status; None without an answer.
    body, advice : str
        The answer's text, or the cause without an answer; and the advised action.
    gone : bool
        True if no process listens at its address: the server ended.
    """

    def __init__(
        self,
        server: str,
        step: str,
        status: int | None,
        body: str,
        advice: str,
        *,
        gone: bool = False,
    ) -> None:
        said = body if len(body) <= SHOWN_BODY else f"{body[:SHOWN_BODY]}..."
        answer = said if status is None else f"status {status}: {said}"
        super().__init__(f"{server}: {step}: {answer}; {advice}")
        self.server = server
        self.step = step
        self.status = status
        self.body = body
        self.advice = advice
        self.gone = gone


class UpdateRolledBackError(ShmbusError):
    """An update failed, and every remaining server runs its previous version.

    Attributes
    ----------
    version : int
        The refused version.
    in_force : int or None
        The version on every remaining server.
    """

    def __init__(
        self, version: int, in_force: int | None, cause: str, *, left: int = 1, gone: int = 0
    ) -> None:
        ran = "what it was started with" if in_force is None else f"version {in_force}"
        runs = f"every server{' that is left' * bool(gone)} runs {ran} again"
        super().__init__(
            f"weights of version {version} were not taken, and "
            f"{runs if left else 'no server is left'}: {cause}"
        )
        self.version = version
        self.in_force = in_force


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
        Seconds from pause to resume, 0 without a resume, and of loading.
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
