"""Base of a dialect: a client's call, turned into an engine's call and back."""

from __future__ import annotations

import secrets
from typing import Any, ClassVar

import msgspec

from shmbus.recorder.engine_api import CHAT, Endpoint
from shmbus.recorder.event_stream import event


class UnusableCall(Exception):
    """An invalid call, with the reason for the client."""

    @classmethod
    def of(cls, expected: str, error: Exception) -> UnusableCall:
        """Refuse a body that lacks a field, or has a field of another type."""
        got = f"one without {error}" if isinstance(error, KeyError) else f"another form: {error}"
        return cls(f"expected a request of {expected}, got {got}")


def new_id(prefix: str) -> str:
    """Return an id in the APIs' form."""
    return f"{prefix}_{secrets.token_hex(12)}"


def error_body(message: str, kind: str, code: str) -> dict[str, Any]:
    """Return an error in a form for clients of OpenAI and of Anthropic."""
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "code": code, "param": None},
    }


def object_of(text: Any) -> dict[str, Any]:
    """Return a tool's arguments as an object; non-objects under one name."""
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError, TypeError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


class Dialect:
    """A call in the endpoint's own form, passed on unchanged; `history` belongs to the session."""

    endpoint: ClassVar[Endpoint] = CHAT
    #: Key of the call's conversation in `history`, or "".
    response_id: str = ""

    def __init__(self, body: dict[str, Any], history: dict[str, list[Any]]) -> None:
        self.call = body

    @property
    def streams(self) -> bool:
        """True if the client requests events."""
        return bool(self.call.get("stream"))

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Turn a whole answer of the engine into the client's."""
        return answer

    def chunk(self, chunk: dict[str, Any], prompt_tokens: int) -> bytes:
        """Turn a chunk of the engine's stream into the client's events; b"" for none."""
        return event(chunk)

    def done(self) -> bytes:
        """Return the end of the client's stream."""
        return event(b"[DONE]")

    def failed(self, message: str, code: str) -> bytes:
        """Return the end of the client's stream after a failed answer."""
        return event(error_body(message, "server_error", code))
