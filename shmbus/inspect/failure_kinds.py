"""Reasons of failures as a few countable kinds: the texts are arbitrary.

Invariant: `KINDS` is complete, regardless of the reasons.
"""

from __future__ import annotations

from typing import Final

#: Words that reveal a reason's kind; the first kind with a match wins.
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "died": ("died while it had it",),
    "rate_limit": ("rate limit", "too many requests", "429"),
    "timeout": ("timed out", "timeout", "deadline"),
    "connection": (
        "connect", "refused", "unreachable", "reset by peer", "broken pipe", "unavailable",
        "bad gateway", "502", "503",
    ),
    "memory": ("memory", "oom"),
    "length": ("too long", "context length", "max_tokens"),
}  # fmt: skip
#: "none" stands for a missing reason.
KINDS: Final = (*_WORDS, "none", "other")


def kind_of(reason: str) -> str:
    """Return the kind of a reason, from `KINDS`."""
    said = reason.lower()
    if not said:
        return "none"
    return next((kind for kind, words in _WORDS.items() if any(w in said for w in words)), "other")
