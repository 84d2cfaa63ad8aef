"""Part of a stack's data set sent along with a request: the values supported by MessagePack.

Invariant: an unsupported value is named in the log, once per column.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

_LOG: Final = logging.getLogger("shmbus.adapters")
#: Already reported pairs of stack and column.
_named: Final[set[tuple[str, str]]] = set()


def columns_for(
    stack: str, values: Mapping[str, Any], taken: Collection[str] = ()
) -> dict[str, Any]:
    """Return the part of a data set's row fit for a request's meta."""
    found = {}
    for name, value in values.items():
        if name in taken:
            _name(stack, name, "the meta has something else by that name; rename the column")
            continue
        try:
            found[name] = msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=_plain))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            _name(stack, name, f"{error}; make it numbers, text or bytes, such as a path")
    return found


def _name(stack: str, column: str, why: str) -> None:
    if (stack, column) not in _named:
        _named.add((stack, column))
        _LOG.warning("%s: the column %r does not go to workers: %s", stack, column, why)


def _plain(value: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach()  # a tensor, maybe with a graph
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"MessagePack has no {type(value).__name__}")
