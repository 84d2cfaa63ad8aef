"""Rows of a pool's readers that are the ranks of an inference server: what they are called."""

from __future__ import annotations

import hashlib
from typing import Final

from shmbus.errors import BusNotFoundError, LayoutMismatchError
from shmbus.pool.status import LOADING_CODE as LOADING_CODE
from shmbus.pool.status import ReaderStatus, read_pool

#: The pool that has weights.
WEIGHTS: Final = "weights"
#: Bytes of a row's label, 48, less those of " rank 99999".
MOST_NAME_BYTES: Final = 37
#: Hexadecimal digits that tell addresses apart which begin alike.
DIGITS: Final = 8


def row_name(address: str) -> str:
    """Return how rows name a server: its address, cut where a row has no room for it."""
    encoded = address.encode()
    if len(encoded) <= MOST_NAME_BYTES:
        return address
    digest = hashlib.sha256(encoded).hexdigest()[:DIGITS]
    return f"{encoded[: MOST_NAME_BYTES - DIGITS - 1].decode(errors='ignore')}~{digest}"


def rows_of_server(bus: str, address: str) -> list[ReaderStatus]:
    """Return the rows of a server's living ranks; none where no weights are published yet."""
    try:
        readers = read_pool(bus, WEIGHTS).readers
    except (BusNotFoundError, LayoutMismatchError):  # the pool is being made, too
        return []
    begins = f"{row_name(address)} "
    return [row for row in readers if row.state == "alive" and row.label.startswith(begins)]
