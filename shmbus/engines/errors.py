"""What can go wrong with a server, in the words of the one who has to act on it."""

from __future__ import annotations

from shmbus import ShmbusError

#: Characters of an answer that a message shows.
SHOWN_BODY = 500


class EngineError(ShmbusError):
    """A server did not do what it was asked to.

    Attributes
    ----------
    server, step : str
        Its address, and what it was asked for: "pause", "update" ...
    status : int or None
        The HTTP status; None where no answer came.
    body, advice : str
        What it said, or the cause where no answer came; and what is to be done.
    gone : bool
        Whether nobody listens at its address: the process has ended.
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
    """An update failed, and every server that is left runs the version that it had before.

    Attributes
    ----------
    version : int
        The version that was not taken.
    in_force : int or None
        The version that all of these run.
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
