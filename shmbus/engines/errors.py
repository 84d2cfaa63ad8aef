"""Errors of servers, with advice for the operator."""

from __future__ import annotations

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
