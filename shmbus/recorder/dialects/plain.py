"""OpenAI's chat completions and completions: passed on untouched."""

from __future__ import annotations

from shmbus.recorder.dialects.base import Dialect


class ChatCompletions(Dialect):
    """Chat completions."""


class Completions(Dialect):
    """Completions of a text or of token ids."""

    endpoint = "/v1/completions"
