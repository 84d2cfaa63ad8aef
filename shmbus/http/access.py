"""A request that is refused: its status, and a sentence that says what to do."""

from __future__ import annotations

from http import HTTPStatus

__all__ = ["Refusal"]


class Refusal(Exception):
    """Ends a request with a status and a sentence.

    Parameters
    ----------
    status : HTTPStatus
        What the client is answered.
    message : str
        What failed, what was expected, what came, and what to do.
    close : bool
        Whether the connection ends: what is left of the request is not read.
    """

    def __init__(self, status: HTTPStatus, message: str, *, close: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.close = close
