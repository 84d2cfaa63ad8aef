"""Reasons of failures as a few kinds, so that they can be counted: the texts are anybody's.

Invariant: `KINDS` are all that there are, whatever a reason says.
"""

from __future__ import annotations

from typing import Final

#: Words of a reason that tell its kind; the first kind with one of them is it.
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
#: "none" is where no reason was given.
KINDS: Final = (*_WORDS, "none", "other")


def kind_of(reason: str) -> str:
    """Return the kind of a reason, one of `KINDS`."""
    said = reason.lower()
    if not said:
        return "none"
    return next((kind for kind, words in _WORDS.items() if any(w in said for w in words)), "other")
