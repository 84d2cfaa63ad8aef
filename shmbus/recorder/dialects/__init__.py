"""Clients' dialects, by path, and their translation to an endpoint with token ids."""

from __future__ import annotations

from typing import Final

from shmbus.recorder.dialects.base import Dialect
from shmbus.recorder.dialects.messages import Messages
from shmbus.recorder.dialects.responses import Responses


class Completions(Dialect):
    """OpenAI's completions of a text or of token ids: passed on untouched, as chat is."""

    endpoint = "/v1/completions"


DIALECTS: Final[dict[str, type[Dialect]]] = {
    "/v1/chat/completions": Dialect,
    "/v1/completions": Completions,
    "/v1/messages": Messages,
    "/v1/responses": Responses,
}
