"""An environment of Atropos that puts its groups into a bus in place of a POST.

Invariant: what `_send_scored_data_to_api` was given is put whole, also where its task is cancelled.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

import shmbus
from shmbus.peers.atropos import samples_of
from trainer_adapter.adapters.stack import BUS_VARIABLE

__all__ = ["ShmbusEnv"]

#: What is under way; a loop keeps no reference of its own.
_putting: set[asyncio.Future[int]] = set()


class ShmbusEnv:
    """Sends the groups of an Atropos environment through a bus of this machine.

    Name it before BaseEnv in the class statement. The bus is the class's `shmbus_bus`, or that of
    the variable SHMBUS_BUS. Registration and throttling go on over HTTP: they ask the gateway of
    the same bus.

    Attributes
    ----------
    shmbus_bus : str or None
        The bus.

    Examples
    --------
    An environment that sends through the ring::

        class MyEnv(ShmbusEnv, BaseEnv):
            shmbus_bus = "run1"
    """

    shmbus_bus: ClassVar[str | None] = None
    _shmbus_producer: shmbus.Producer | None = None
    _shmbus_groups: int = 0

    def _shmbus(self) -> shmbus.Producer:
        if self._shmbus_producer is None:
            name = self.shmbus_bus or os.environ.get(BUS_VARIABLE)
            if not name:
                raise ValueError(
                    f"shmbus_bus: expected the name of a bus, got none; set it in "
                    f"{type(self).__name__}, or the variable {BUS_VARIABLE}"
                )
            label = str(getattr(self, "name", None) or type(self).__name__)
            self._shmbus_producer = shmbus.Producer(name, label=label)
        return self._shmbus_producer

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """Put one group or several; waits while the bus is full.

        Parameters
        ----------
        scored_data : dict or list of dict
            ScoredDataGroups. Each is given this environment's ``env_id``, as BaseEnv does.

        Raises
        ------
        TypeError, ValueError, RecordTooLargeError
            A group is none, or has something that no batch or record can have; the message names
            it, and nothing of this call was put.
        BusRemovedError, BusClosedError
            As for `shmbus.Producer.put`.
        """
        producer = self._shmbus()
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        put: list[dict[str, Any]] = []
        for group in groups:
            if not isinstance(group, dict):
                raise TypeError(
                    f"scored_data: expected a ScoredDataGroup, a dict, got {type(group).__name__}"
                )
            group["env_id"] = getattr(self, "env_id", None)
            key = f"atropos-{producer.producer_id}-{self._shmbus_groups}"
            self._shmbus_groups += 1
            samples = samples_of(group, policy_version=producer.policy_version)
            put += [
                {**sample, "instance_id": key, "group_size": len(samples), "index": index}
                for index, sample in enumerate(samples)
            ]
        # All in one call, which checks all before it puts the first.
        putting = asyncio.ensure_future(producer.aput_many(put))
        _putting.add(putting)
        putting.add_done_callback(_putting.discard)
        # An environment cancels its workers; half a group would wait in the bus for ever.
        await asyncio.shield(putting)
