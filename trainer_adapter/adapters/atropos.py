"""Atropos without HTTP: environments put their groups into the bus, trainers take batches from it.

An environment sends everything through one method of BaseEnv; `ShmbusEnv` overrides this method.
Groups and batches equal the HTTP gateway's, so environments and trainers of both kinds share one
bus.

Invariants:

- Importing this module needs no atroposlib: the mix-in knows a single name of BaseEnv.
- The argument of `_send_scored_data_to_api` is put whole, even if its task is cancelled.
- A batch is leased until the next request for a batch, or `ack`.
- A group unfit for Atropos is dropped, and named in the log; its neighbours continue.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import shmbus
from shmbus.base.arguments import check_int, check_text, check_timeout
from shmbus.base.closing import ClosedByWith
from shmbus.peers.atropos import env_id_of, group_of, is_atropos, samples_of
from shmbus.peers.atropos_queue import GroupQueue, Waiting
from trainer_adapter.adapters.optional_imports import BUS_VARIABLE
from trainer_adapter.adapters.requested_groups import still_leased

__all__ = ["AtroposTrainer", "ShmbusEnv"]

logger = logging.getLogger(__name__)
#: Running puts; a loop keeps no reference of its own.
_putting: set[asyncio.Future[int]] = set()


class ShmbusEnv:
    """Sends the groups of an Atropos environment through a bus of this machine.

    Name it before BaseEnv in the class statement. The bus is the class's `shmbus_bus`, or the
    variable SHMBUS_BUS. Registration and throttling still use HTTP, with the gateway of the same
    bus.

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
        """Put one group or several, all checked before the first; waits while the bus is full."""
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
        # In a single call, which checks every sample before the first put.
        putting = asyncio.ensure_future(producer.aput_many(put))
        _putting.add(putting)
        putting.add_done_callback(_putting.discard)
        # An environment cancels its workers; half a group would wait in the bus for ever.
        await asyncio.shield(putting)


#: Groups leased by one take.
_TAKE_GROUPS: Final = 256


def _waiting(group: shmbus.Group) -> Waiting:
    return Waiting(len(group), env_id_of(group) if is_atropos(group) else None, group)


def _plain(value: Any) -> Any:
    """Return a JSON value: NumPy numbers as plain numbers, and a path as its text."""
    return value.item() if hasattr(value, "item") else os.fspath(value)


def _checked_minimums(minimums: object) -> dict[int, float]:
    if minimums is None:
        return {}
    if not isinstance(minimums, Mapping):
        raise TypeError(
            "minimums: expected the shares by the numbers of environments, got "
            f"{type(minimums).__name__}"
        )
    found = {}
    for env, share in minimums.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ValueError(
                f"minimums: expected a share of 0 to 1 for environment {env!r}, got {share!r}"
            )
        found[check_int("minimums", env)] = float(share)
    return found


class AtroposTrainer(ClosedByWith):
    """Takes the batches of the gateway's `GET /batch`, without HTTP.

    Parameters
    ----------
    name : str
        The bus.
    batch_size : int
        Sequences of a batch.
    minimums : mapping of int to float, optional
        The least share of each batch, by the number of an environment.
    url : str, optional
        The gateway of the bus: `register` announces the trainer to it, and environments may begin.
        A gateway already reading the bus for an HTTP trainer hands the reading over to this
        trainer.
    keep_batches : int
        Leased batches, delivered again to the next trainer if this process dies: 1 acknowledges a
        batch on the request for the next.
    **options : object
        Of `shmbus.Consumer`.

    Raises
    ------
    BusNotFoundError, BusBusyError, LayoutMismatchError, DaemonUnavailableError
        As for `shmbus.Consumer`.
    TypeError, ValueError
        An argument of the wrong type; a batch size below 1, keep_batches below 0, a share outside 0
        to 1, or an invalid url.

    Examples
    --------
    A loop of a trainer, its own batches acknowledged after the optimizer step::

        with AtroposTrainer("run1", batch_size=64, url="http://127.0.0.1:8000") as trainer:
            trainer.register(wandb_group="g", wandb_project="p", max_token_len=2048, num_steps=500)
            while True:
                data = trainer.get_batch(timeout=60.0)
                if data["batch"] is not None:
                    step(data["batch"])
                    trainer.ack()
    """

    def __init__(
        self,
        name: str,
        batch_size: int,
        *,
        minimums: Mapping[int, float] | None = None,
        url: str | None = None,
        keep_batches: int = 1,
        **options: Any,
    ) -> None:
        self.batch_size = check_int("batch_size", batch_size, 1)
        self._keep = check_int("keep_batches", keep_batches, 0)
        self._minimums = _checked_minimums(minimums)
        if url is not None:
            check_text("url", url)
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url: expected http://HOST:PORT of the gateway, got {url!r}")
        self._url = url
        self._queue = GroupQueue()
        self._given: list[list[shmbus.Group]] = []
        self._lock = threading.Lock()
        try:
            self._consumer = shmbus.Consumer(name, **options)
        except shmbus.BusBusyError:
            if url is None:
                raise
            # The gateway may read the bus, for an earlier trainer over HTTP.
            self.register()
            self._consumer = shmbus.Consumer(name, **options)

    def register(
        self,
        *,
        wandb_group: str = "",
        wandb_project: str = "",
        max_token_len: int = 2048,
        checkpoint_dir: str = "",
        save_checkpoint_interval: int = 0,
        starting_step: int = 0,
        num_steps: int = 1 << 30,
        token: str | None = None,
    ) -> None:
        """Tell the gateway of this bus about its new trainer; environments may then begin.

        Parameters
        ----------
        wandb_group, wandb_project, max_token_len, checkpoint_dir, save_checkpoint_interval
            As in a registration of Atropos.
        starting_step, num_steps : int
            The same.
        token : str, optional
            The gateway's.

        Raises
        ------
        ValueError
            The url is missing.
        OSError
            The gateway is unreachable, or refuses.
        """
        if self._url is None:
            raise ValueError("url: expected that of the gateway, got none; give it to the trainer")
        content = {
            "wandb_group": wandb_group, "wandb_project": wandb_project,
            "batch_size": self.batch_size, "max_token_len": max_token_len,
            "checkpoint_dir": checkpoint_dir, "starting_step": starting_step,
            "save_checkpoint_interval": save_checkpoint_interval, "num_steps": num_steps,
            "reads_bus": True,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        body = json.dumps(content, default=_plain).encode()
        request = urllib.request.Request(f"{self._url.rstrip('/')}/register", body, headers)
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            answer.read()

    def get_batch(self, timeout: float | None = 0.0) -> dict[str, Any]:
        """Return the next batch in the form of `GET /batch`; acknowledge the previous batch.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait: None waits for ever, 0 does not wait.

        Returns
        -------
        dict
            ``{"batch": [ScoredDataGroup, ...]}`` with lists of int and float, exactly `batch_size`
            sequences; ``{"batch": None}`` after the timeout.

        Raises
        ------
        BusClosedError, DaemonUnavailableError
            As for `shmbus.Consumer.take`.
        """
        check_timeout(timeout, "timeout")
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._end_before_next()
            while (groups := self._take(deadline)) is not None:
                batch = self._read(groups)
                if batch is not None:
                    return {"batch": batch}
        return {"batch": None}

    def _read(self, groups: list[shmbus.Group]) -> list[dict[str, Any]] | None:
        """Return the groups of a batch; None after a drop, while the remaining groups wait."""
        batch: list[dict[str, Any]] = []
        unusable: list[shmbus.Group] = []
        for group in groups:
            try:
                batch.append(group_of(group))
            except (ValueError, shmbus.UnscoredError) as error:
                logger.warning("group %r cannot be given: dropped: %s", group.instance_id, error)
                unusable.append(group)
        if not unusable:
            return batch
        self._given.remove(groups)
        self._queue.put_back([_waiting(group) for group in groups if group not in unusable])
        self._consumer.drop(unusable)
        return None

    def take(self, timeout: float | None = 0.0) -> list[shmbus.Group] | None:
        """Return the groups of the next batch under lease: their arrays are views of the ring.

        Parameters
        ----------
        timeout : float, optional
            As for `get_batch`.

        Returns
        -------
        list of Group, or None
            With the arrays tokens, masks, loss_mask, and what else the environments sent.
        """
        check_timeout(timeout, "timeout")
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._end_before_next()
            return self._take(deadline)

    def _end_before_next(self) -> None:
        """Acknowledge the batches ended by a request for another batch."""
        self._end(self._keep - 1 if self._keep else 0)

    def _take(self, deadline: float | None) -> list[shmbus.Group] | None:
        while True:
            self._collect(self._consumer.take(_TAKE_GROUPS, timeout=0))
            chosen = self._queue.take(self.batch_size, self._minimums)
            if chosen is not None:
                groups = [each.group for each in chosen]
                self._given.append(groups)
                return groups
            # Groups without a batch do not postpone the deadline.
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            found = self._consumer.take(_TAKE_GROUPS, timeout=left)
            if not found:
                return None
            self._collect(found)

    def _collect(self, groups: list[shmbus.Group]) -> None:
        for group in groups:
            self._queue.add(_waiting(group), None)

    def ack(self) -> None:
        """Acknowledge every batch returned: the trainer is done."""
        with self._lock:
            self._end(0)

    def _end(self, keep: int) -> None:
        while len(self._given) > keep:
            # A call interrupted by Ctrl-C may have acknowledged the batch.
            self._consumer.ack(still_leased(self._given[0]))
            del self._given[0]

    def close(self) -> None:
        """Leave the bus; unacknowledged groups are delivered to the next trainer."""
        self._consumer.close()
