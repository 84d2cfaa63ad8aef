"""Atropos without HTTP: environments put their groups into the bus, trainers take batches from it.

Everything that an environment sends goes through one method of BaseEnv; `ShmbusEnv` has it. The
groups and batches are those of the HTTP gateway, so environments and trainers of both kinds share
one bus.

Invariants:

- Importing this needs no atroposlib: the mix-in knows one name of BaseEnv, and no other.
- What `_send_scored_data_to_api` was given is put whole, also where its task is cancelled.
- A batch is leased until the next one is asked for, or `ack`.
- A group that Atropos cannot have is dropped, and named in the log; those around it go on.
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
from shmbus._arguments import check_int, check_text, check_timeout
from shmbus.peers.atropos import env_id_of, group_of, is_atropos, samples_of
from shmbus.peers.atropos_queue import GroupQueue, Waiting
from trainer_adapter.adapters.ended_groups import still_leased
from trainer_adapter.adapters.optional_imports import BUS_VARIABLE

__all__ = ["AtroposTrainer", "ShmbusEnv"]

logger = logging.getLogger(__name__)
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
        # All in one call, which checks all before it puts the first.
        putting = asyncio.ensure_future(producer.aput_many(put))
        _putting.add(putting)
        putting.add_done_callback(_putting.discard)
        # An environment cancels its workers; half a group would wait in the bus for ever.
        await asyncio.shield(putting)


#: Groups that one take leases.
_TAKE_GROUPS: Final = 256


def _waiting(group: shmbus.Group) -> Waiting:
    return Waiting(len(group), env_id_of(group) if is_atropos(group) else None, group)


def _plain(value: Any) -> Any:
    """Return what JSON has: numbers of NumPy, and a path as its text."""
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


class AtroposTrainer:
    """Takes the batches that `GET /batch` of the gateway would answer, without HTTP.

    Parameters
    ----------
    name : str
        The bus.
    batch_size : int
        Sequences of a batch.
    minimums : mapping of int to float, optional
        The least share of each batch, by the number of an environment.
    url : str, optional
        The gateway of the bus: `register` tells it that a trainer is here, so that environments
        may begin. If the gateway reads the bus, for a trainer that took its batches over HTTP, it
        leaves that to this one.
    keep_batches : int
        Batches that stay leased, and are delivered again to the next trainer if this process
        dies: 1 acknowledges a batch when the next one is asked for.
    **options : object
        Of `shmbus.Consumer`.

    Raises
    ------
    BusNotFoundError, BusBusyError, LayoutMismatchError, DaemonUnavailableError
        As for `shmbus.Consumer`.
    TypeError, ValueError
        An argument is of another kind; the batch size is less than 1, keep_batches less than 0, a
        share not within 0 and 1, or the url none.

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
            # Maybe the gateway reads it, for a trainer that asked it for batches before.
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
        """Tell the gateway of this bus that a trainer reads it, so that environments may begin.

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
            There is no url.
        OSError
            The gateway does not answer, or refuses.
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
        """Return the next batch, as `GET /batch` answers it; acknowledges the one before.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for one: None waits for ever, 0 does not wait.

        Returns
        -------
        dict
            ``{"batch": [ScoredDataGroup, ...]}`` with lists of int and float, exactly `batch_size`
            sequences; ``{"batch": None}`` where there is none in time.

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
        """Return the groups of a batch; None where one had to be dropped, and the others wait."""
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
        """Acknowledge what a request for another batch ends."""
        self._end(self._keep - 1 if self._keep else 0)

    def _take(self, deadline: float | None) -> list[shmbus.Group] | None:
        while True:
            self._collect(self._consumer.take(_TAKE_GROUPS, timeout=0))
            chosen = self._queue.take(self.batch_size, self._minimums)
            if chosen is not None:
                groups = [each.group for each in chosen]
                self._given.append(groups)
                return groups
            # Groups that make no batch do not put the end off.
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            found = self._consumer.take(_TAKE_GROUPS, timeout=left)
            if not found:
                return None
            self._collect(found)

    def _collect(self, groups: list[shmbus.Group]) -> None:
        for group in groups:
            self._queue.add(_waiting(group), None)

    def ack(self) -> None:
        """Acknowledge all batches that were given: the trainer is done with them."""
        with self._lock:
            self._end(0)

    def _end(self, keep: int) -> None:
        while len(self._given) > keep:
            # A call that Ctrl-C has interrupted may have acknowledged it.
            self._consumer.ack(still_leased(self._given[0]))
            del self._given[0]

    def close(self) -> None:
        """Leave the bus; what was not acknowledged is delivered to the next trainer."""
        self._consumer.close()

    def __enter__(self) -> AtroposTrainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()
