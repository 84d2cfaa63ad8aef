"""What tells an engine's prefix cache of one version of the weights from that of another.

An engine that goes on with the requests in flight keeps the keys and values that older weights
made, and would serve them to new requests with the same prefix. vLLM takes a ``cache_salt`` with a
request, SGLang an ``extra_key``: only requests with the same one share a prefix.

Invariants: two requests share a salt only if no update of the weights began or ended between them;
a version's salt is not used before every server runs that version, or has been left out.
"""

from __future__ import annotations

import os
import secrets
from typing import Final

import msgspec

from shmbus.segment.names import SHM_DIRECTORY, companion_name
from shmbus.segment.own_file import open_own

#: The companion in which a fleet notes that it is updating servers (`shmbus.engines.pause_note`).
NOTE_KIND: Final = "fleet"
_MAX_NOTE_BYTES: Final = 1 << 20
#: Bytes of a salt that no other request has.
_OWN_BYTES: Final = 8


class _Note(msgspec.Struct):
    """What counts here of a note; one that says nothing of it is of a fleet that is busy."""

    updating: bool = True


def cache_salt(bus: str, policy_version: int) -> str:
    """Return the salt for a request that is sent now.

    Parameters
    ----------
    bus : str
        The bus.
    policy_version : int
        What the bus says that engines run.

    Returns
    -------
    str
        The version's; while servers are being updated, one that no other request has.
    """
    if _is_updating(bus):
        return f"{policy_version}+{secrets.token_hex(_OWN_BYTES)}"
    return str(policy_version)


def _is_updating(bus: str) -> bool:
    try:
        path = SHM_DIRECTORY + companion_name(NOTE_KIND, bus)
        file = open_own(path, os.O_RDONLY, f"the note of bus {bus!r} about its inference servers")
    except FileNotFoundError:
        return False
    try:
        raw = os.pread(file, _MAX_NOTE_BYTES, 0)
    finally:
        os.close(file)
    if not raw:
        return False
    try:
        return msgspec.msgpack.decode(raw, type=_Note).updating
    except msgspec.DecodeError:
        return True  # it is being written
