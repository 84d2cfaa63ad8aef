"""The difference between two pictures, as small as it needs to be: RFC 7386, a JSON merge patch.

Invariants: pure; a picture has no None, so null says that a key has gone; lists are replaced whole.
"""

from __future__ import annotations

from typing import Any

__all__ = ["apply", "difference"]


def difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Tell what turns one picture into another."""
    changes: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = difference(before, value)
            if inner:
                changes[key] = inner
        elif value != before:
            changes[key] = value
    return changes


def apply(old: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Apply a difference; the page does the same."""
    new = dict(old)
    for key, value in changes.items():
        before = new.get(key)
        if value is None:
            new.pop(key, None)
        elif isinstance(value, dict) and isinstance(before, dict):
            new[key] = apply(before, value)
        else:
            new[key] = value
    return new
