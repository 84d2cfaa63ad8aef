"""Refusals of calls: a status understood by clients, and the next step.

Clients of OpenAI and Anthropic retry after 408, 409, 429 and 5xx, and raise at once otherwise;
higher layers, like LiteLLM and its harnesses, retry almost every status. So an ended session is
404, the end for every client, and missing engines are 503.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from shmbus.http.access import Refusal

_KINDS: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 409: "conflict_error",
    413: "request_too_large", 422: "invalid_request_error",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def kind_of(status: int) -> str:
    """Return the APIs' name of an error."""
    return _KINDS.get(status, "api_error")


class CallRefusal(Refusal):
    """Ends a call with a status, a sentence, a word for programs, and a session's own reason."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        message: str,
        *,
        reason: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        super().__init__(status, message, code=code, headers=headers)
        self.reason = reason


def bad_request(code: str, message: str) -> CallRefusal:
    """Refuse a malformed call."""
    return CallRefusal(HTTPStatus.BAD_REQUEST, code, message)
