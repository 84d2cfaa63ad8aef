"""Updates through the four calls of vLLM's trainer-side client, each checked by the rows.

For trainers that drive vLLM by a `VLLMWeightSyncClient`, over HTTP or Ray. `EngineFleet` adds
pauses, several servers and recovery after a death.

Invariants:

- A returned call proves nothing: a version is in force when the row of each rank names it.
- The previous version stays leased until then; after a failure it is loaded into every rank again.

Source: `VLLMWeightSyncClient` in vllm/distributed/weight_transfer/base.py of vLLM 0.32.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Any, Final, Protocol

from shmbus.base.arguments import check_int64, check_seconds
from shmbus.engines.errors import EngineError, UpdateRolledBackError
from shmbus.engines.rows import POLL_S, Missing, RankRows, is_whole, say_version
from shmbus.pool.server_rows import CLIENT_NAMES, drop_dead_rows

#: Random bytes of a name, to keep the rows of two trainers apart.
_NAME_BYTES: Final = 4


class WeightSyncClient(Protocol):
    """Required methods of a client: the four of vLLM's `VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make each rank attach."""

    def start_weight_update(self) -> None:
        """Make each rank free memory for a whole model."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Make each rank load."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make each rank switch to the loaded version."""


class ClientUpdates:
    """Bring published versions to the inference ranks behind a client.

    Parameters
    ----------
    bus : str
        Bus of the weights; a version must be published.
    client : WeightSyncClient
        Its calls return after every rank answered.
    timeout : float
        Seconds to wait for the rows of ranks after the calls.

    Raises
    ------
    EngineError
        No rank reads these weights, or a rank can never load them; nothing was touched.
    TypeError, ValueError
        The timeout is no number of seconds.
    """

    def __init__(self, bus: str, client: WeightSyncClient, *, timeout: float) -> None:
        check_seconds("timeout", timeout)
        self.bus: Final = bus
        self.address: Final = f"{CLIENT_NAMES}{secrets.token_hex(_NAME_BYTES)}"
        self._client = client
        self._timeout = timeout
        self._rows = RankRows(bus)
        newest = self._rows.newest(timeout)
        if newest is None:
            raise EngineError(
                self.address,
                "prepare",
                None,
                f"bus {bus!r} has no weights",
                "publish a version first; nothing was touched",
            )
        with newest:
            self._attach()
            # Ranks of an earlier trainer's client belong to this client now.
            drop_dead_rows(bus, lambda name: name.startswith(CLIENT_NAMES) and name != self.address)
            self.ranks: Final = len(self._rows.of(self))
            # Zero ranks count as one missing rank.
            self._rows.require_attached(self, max(1, self.ranks), newest.version)

    def _attach(self) -> None:
        self._client.init_weight_transfer_engine({"bus": self.bus, "server": self.address})

    def bring(self, version: int, previous: int | None) -> None:
        """Load a published version into every rank.

        Parameters
        ----------
        version : int
            The new version.
        previous : int or None
            A whole version leased by the caller; None without one.

        Raises
        ------
        UpdateRolledBackError
            A rank refused the version, and every rank runs the previous one again.
        EngineError
            The previous version failed too: a rank's model is not whole.
        TypeError, ValueError
            A version is no int64; nothing was touched.
        """
        version = check_int64("version", version)
        previous = None if previous is None else check_int64("previous", previous)
        failed = self._load(version)
        if failed is None:
            say_version(self.bus, version)
            return
        if self._is_whole():
            in_force = self._rows.whole_version(self, self.ranks)
            raise UpdateRolledBackError(version, in_force, failed)
        again = "there is none before it" if previous is None else self._load(previous)
        if again is not None:
            raise EngineError(
                self.address,
                "load",
                None,
                f"{failed}; version {previous} again: {again}",
                "its model is not whole: keep it paused, or restart it",
            )
        raise UpdateRolledBackError(version, previous, failed)

    def _load(self, version: int) -> str | None:
        """Start, update and finish; return the obstacle, None once every rank runs the version."""
        problem = ""
        timeout = self._timeout
        try:
            if self._rows.are_loading(self):  # left open by a dead trainer, or by a lost answer
                self._client.finish_weight_update()
            self._client.start_weight_update()
            self._client.update_weights({"version": version})
            self._client.finish_weight_update(str(version))
        except Exception as error:
            # A client raises transport errors; the ranks may have loaded all the same.
            problem = f" ({type(error).__name__}: {error})"
            # Ranks work in order: after this answer their rows describe the finished work.
            with contextlib.suppress(Exception):
                self._attach()
            timeout = 0.0 if self._is_whole() else timeout
        missing = self._await_rows(version, timeout)
        return None if missing is None else missing.said + problem

    def _is_whole(self) -> bool:
        """Return whether every rank runs the same whole version, or only initial weights."""
        rows = self._rows.of(self)
        return (
            len(rows) >= self.ranks
            and all(map(is_whole, rows))
            and len({row.applied_version for row in rows}) == 1
        )

    def _await_rows(self, version: int, timeout: float) -> Missing | None:
        deadline = time.monotonic() + timeout
        while True:
            missing = self._rows.missing(self, self.ranks, version)
            if missing is None or missing.final or time.monotonic() >= deadline:
                return missing
            time.sleep(POLL_S)
