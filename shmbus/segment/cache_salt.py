"""The salt of a request: an engine's prefix cache serves entries of one salt to no other salt.

Keys and values that older weights made stay in an engine's cache. vLLM takes a ``cache_salt`` with
a request, SGLang an ``extra_key``: only requests with equal salts share a prefix.

Invariants: a salt names one publication, never a number alone: numbers repeat in the next run,
after a return to a checkpoint, after a restart. Two requests share a salt only if no update of the
weights began or ended between them.
"""

from __future__ import annotations

import os
import secrets
from typing import Final

from shmbus.segment.names import SHM_DIRECTORY, companion_name, shm_path
from shmbus.segment.own_file import open_own
from shmbus_ext import _core

#: The companion whose reader rows name each engine's publication.
WEIGHTS_KIND: Final = "weights"
#: Random bytes of a single request's salt.
_OWN_BYTES: Final = 8
_BUS_HEADER: Final = _core.layout()["bus_header"]
_IDENTITY_AT: Final = _BUS_HEADER["offsets"][_BUS_HEADER["names"].index("identity")]
_IDENTITY_BYTES: Final = 16


def life_name(life: int, *sequences: int) -> str:
    """Name publications of a pool: the pool's life, then the sequence of each publication."""
    return ".".join([f"{life:016x}", *map(str, sequences)])


def cache_salt(bus: str, policy_version: int) -> str:
    """Return the salt for a request that a worker sends now.

    Parameters
    ----------
    bus : str
        The bus.
    policy_version : int
        The version that the request's engine runs.

    Returns
    -------
    str
        The version, a dot, and the publications that engines run under the number; if no engine
        reads weights of the bus, the bus's identity. During an update, and if engines run other
        versions only, random bits: a salt for one request alone.
    """
    # Rows first: an update writes the note before rows change, so a row in mid-update is never
    # missed.
    life = _life_in_force(bus, policy_version)
    # A producer loads few modules; the note comes with the first salt.
    from shmbus.segment.fleet_note import read_fleet_note

    note = read_fleet_note(bus)
    if life is None or (note is not None and note.updating):
        life = f"+{secrets.token_hex(_OWN_BYTES)}"
    return f"{policy_version}.{life}"


def _life_in_force(bus: str, version: int) -> str | None:
    """Name the publications engines run under a number; None if engines run other numbers."""
    pool = _open(SHM_DIRECTORY + companion_name(WEIGHTS_KIND, bus), f"the weights of bus {bus!r}")
    if pool is not None:
        try:
            found = _core.pool_runs(pool, version)
        finally:
            os.close(pool)
        if found is not None and found[2]:
            life, sequences, _ = found
            return life_name(life, *sorted(set(sequences))) if sequences else None
    segment = _open(shm_path(bus), f"bus {bus!r}")
    if segment is None:
        return ""
    try:
        return os.pread(segment, _IDENTITY_BYTES, _IDENTITY_AT).hex()
    finally:
        os.close(segment)


def _open(path: str, what: str) -> int | None:
    try:
        return open_own(path, os.O_RDONLY, what)
    except FileNotFoundError:
        return None
