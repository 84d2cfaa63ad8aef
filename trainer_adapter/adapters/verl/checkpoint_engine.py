"""verl's weights through the slot pool of a bus: a checkpoint engine by its configuration.

::

    actor_rollout_ref.rollout.checkpoint_engine:
        backend: shmbus
        custom_backend_module: trainer_adapter.adapters.verl.checkpoint_engine
        engine_kwargs: {shmbus: {bus: run1}}

Invariants:

- A receiver takes only the version published by its sender in the same call. The driver draws a
  name for each update to distinguish an earlier trainer's version with the same number.
- `get_weights` needs no sender: it gives the newest whole version of any publisher.

The interface is verl's `CheckpointEngineWithCache`, as of 0.9.1.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any, Final

import torch

from shmbus.weights import ExportedSource, WeightPublisher, Weights, WeightSubscriber
from shmbus.weights.weight_source import EvenShares
from trainer_adapter.adapters.optional_imports import Stack

_VERL: Final = Stack("verl", {"verl": "0.9.1"}, "verl[verl-core]==0.9.1")
CheckpointEngineRegistry, CheckpointEngineWithCache = _VERL.needed(
    "verl.checkpoint_engine.base", "CheckpointEngineRegistry", "CheckpointEngineWithCache"
)
(get_device_name,) = _VERL.needed("verl.utils.device", "get_device_name")

#: Seconds of mutual waiting between the ranks and receivers of one update.
TIMEOUT_S: Final = 600.0


@CheckpointEngineRegistry.register("shmbus")
class ShmbusCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc, valid-type]
    """verl's checkpoint engine over shared memory, for actors and rollouts of one machine.

    Each actor's rank writes its share of every version once; each rollout worker reads it in place.

    Parameters
    ----------
    bus : str
        The bus of the weights; it need not exist.
    bucket_size : int
        verl's, in bytes. Nothing is cut into buckets here; a receiver's larger tensors go to its
        device first, as verl passes them on by a handle.
    is_master : bool
        verl's; every rank of the actor writes.
    timeout : float
        Seconds of mutual waiting between the ranks and receivers of one update.
    **options
        Further options of `shmbus.weights.WeightPublisher`, for example ``slots=3`` or
        ``digests=True``.

    Raises
    ------
    ValueError, TypeError
        An option is unknown to the publisher; raised by the first send of weights.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        bus: str,
        timeout: float = TIMEOUT_S,
        **options: Any,
    ) -> None:
        self._bus = bus
        self._bucket_bytes = bucket_size
        self._timeout_s = timeout
        self._options = options
        self._rank, self._world_size = 0, 1
        self._update = ""
        self._weights: Iterable[tuple[str, torch.Tensor]] = ()
        self._publisher: WeightPublisher | None = None
        self._subscriber: WeightSubscriber | None = None

    def prepare(self) -> dict[str, Any]:
        """Return nothing: the bus's name suffices to find the weights."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return each worker's arguments of `init_process_group`: of senders, and of receivers."""
        update = secrets.token_hex(8)
        sends: dict[str, list[Any]] = {
            "rank": list(range(actor_wg_world_size)),
            "world_size": [actor_wg_world_size] * actor_wg_world_size,
            "update": [update] * actor_wg_world_size,
        }
        receives: dict[str, list[Any]] = {
            "rank": [-1] * rollout_world_size,
            "world_size": [actor_wg_world_size] * rollout_world_size,
            "update": [update] * rollout_world_size,
        }
        return sends, receives

    def init_process_group(self, rank: int, world_size: int, update: str) -> None:
        """Begin an update of a version with this name; a receiver passes rank -1."""
        if self._publisher is not None and (rank, world_size) != (self._rank, self._world_size):
            self._publisher.close()
            self._publisher = None
        self._rank, self._world_size, self._update = rank, world_size, update

    def finalize(self) -> None:
        """Keep everything for the next update and for `get_weights`."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Publish a version, `global_steps` or one more than the last; every rank calls this.

        Weights are whole tensors, gathered on request, the same on every rank. After a WeightsError
        the previous version stays in force.
        """
        if self._publisher is None:
            # The shapes must be known before the first byte is written, and verl gives its weights
            # once: of the first version, this rank keeps its share.
            self._weights = list(_own_share(weights, self._rank, self._world_size))
            self._publisher = WeightPublisher(
                self._bus,
                ExportedSource(lambda: self._weights),
                rank=self._rank,
                world_size=self._world_size,
                timeout=self._timeout_s,
                label="verl",
                **self._options,
            )
        else:
            self._weights = weights
        last = self._publisher.version
        version = global_steps
        if version is None:
            version = 0 if last is None else last + 1
        elif last is not None and version <= last:
            self._publisher.new_life()  # verl sends a step's weights again, or went back
        try:
            self._publisher.publish(version, text=self._update)
        finally:
            self._weights = ()

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the version sent in the same update; WaitTimeoutError without a version.

        The tensors are read-only views of shared memory; while alive, they hold back the version
        after the next. `global_steps` is not needed: the version's name is more specific.
        """
        async for named in self._given(await asyncio.to_thread(self._of_update)):
            yield named

    async def get_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the newest version, for example for a late rollout."""
        newest = await asyncio.to_thread(self._reader().latest, timeout=self._timeout_s)
        async for named in self._given(newest):
            yield named

    async def _given(self, weights: Weights) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        with weights:
            for name in weights:
                tensor = weights[name]
                large = 0 < self._bucket_bytes < tensor.nbytes
                yield name, tensor.to(get_device_name()) if large else tensor
            weights.report_applied()

    def _reader(self) -> WeightSubscriber:
        """Find the weights; a restarted trainer may have recreated them."""
        if self._subscriber is not None and self._subscriber.removed:
            self._subscriber.close()
            self._subscriber = None
        if self._subscriber is None:
            self._subscriber = WeightSubscriber(self._bus, label="verl")
        return self._subscriber

    def _of_update(self) -> Weights:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            reader = self._reader()
            found = reader.latest(timeout=max(0.0, deadline_s - time.monotonic()))
            if found.text == self._update:
                return found
            other = found.version
            found.close()
            reader.wait(newer_than=other, timeout=max(0.0, deadline_s - time.monotonic()))


def _own_share(
    weights: Iterable[tuple[str, torch.Tensor]], rank: int, world_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy a rank's share to the host; keep only shapes of the rest."""
    shares = EvenShares(world_size)
    for name, tensor in weights:
        if shares.next(tensor.nbytes) == rank:
            yield name, tensor.detach().to("cpu", copy=True)
        else:
            yield name, torch.empty_like(tensor, device="meta")
