"""The trainer's side of vLLM's own interface for weights, by the name "shmbus".

For trainers that drive vLLM by its `TrainerWeightTransferEngine`::

    from shmbus.engines.vllm_trainer import ShmbusTrainerInitInfo
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    engine = WeightTransferTrainerFactory.trainer_init(
        ShmbusTrainerInitInfo("run1", rank=0), client=client, source=source
    )
    engine.send_weights()  # after each step, on every rank

Invariants: those of `shmbus.engines.client_updates`; as with vLLM's own engines, pausing
is the caller's.

Source: vllm/distributed/weight_transfer/base.py, factory.py and ipc_engine.py of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
)
from vllm.distributed.weight_transfer.base import WeightSource as VllmSource

from shmbus.engines.client_updates import ClientUpdates
from shmbus.engines.rows import RankRows
from shmbus.engines.vllm_plugin import BACKEND, register
from shmbus.weights import (
    LocalPiece,
    ParamMeta,
    WeightPublisher,
    WeightsError,
    WeightSource,
)
from shmbus.weights.publisher import PUBLISH_TIMEOUT_S
from shmbus.weights.sharded_source import ExportedSource
from shmbus.weights.weight_source import EvenShares, dtype_name

if TYPE_CHECKING:
    from typing_extensions import Self


register()


@dataclass
class ShmbusTrainerInitInfo(TrainerInitInfo):
    """Options of a trainer rank's `WeightPublisher`; `version` numbers the first publication."""

    backend: ClassVar[str] = BACKEND

    bus: str
    world_size: int = 1
    carrier: str = "auto"
    device: str = "cpu"
    version: int = 0
    timeout: float = PUBLISH_TIMEOUT_S


class GatheredSource(ExportedSource):
    """A vLLM source as a shmbus source: gathered on every rank, and written by one."""

    def __init__(self, source: VllmSource) -> None:
        if source.held_names() is not None:
            raise WeightsError(
                f"{type(source).__name__}: expected a source whose ranks hold the whole model "
                "(held_names() of None), got a split source; pass a WeightSource of "
                "shmbus.weights, whose ranks write their own pieces"
            )
        super().__init__(lambda: iter(source))
        self._source = source

    def params(self) -> list[ParamMeta]:
        """Return every tensor, by the source's metadata."""
        return [
            ParamMeta(each.name, dtype_name(each.dtype), tuple(each.shape))
            for each in self._source.metadata()
        ]

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        """Yield this rank's share of the tensors; every tensor is gathered."""
        shares = EvenShares(world_size)
        for name, tensor in self._source:
            if shares.next(tensor.nbytes) == rank:
                yield LocalPiece(name, (0,) * tensor.dim(), tensor.detach())


class ShmbusTrainerWeightTransferEngine(TrainerWeightTransferEngine[ShmbusTrainerInitInfo]):
    """Publishes a source's weights, and brings them to the servers behind a client of rank 0."""

    init_info_cls = ShmbusTrainerInitInfo

    def __init__(
        self,
        init_info: ShmbusTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: VllmSource | WeightSource | None,
    ) -> None:
        if source is None:
            raise ValueError(
                "source: expected a WeightSource, got None; pass shmbus.weights.ModuleSource(model)"
            )
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._timeout = init_info.timeout
        #: Last published version.
        self.version = init_info.version
        self._publisher = WeightPublisher(
            init_info.bus,
            source if isinstance(source, WeightSource) else GatheredSource(source),
            carrier=init_info.carrier,
            device=init_info.device,
            rank=init_info.rank,
            world_size=init_info.world_size,
            timeout=init_info.timeout,
        )
        self._updates: ClientUpdates | None = None
        try:
            # Ranks check a manifest against their model before any change.
            self._publisher.publish(version=init_info.version)
            if self.is_sender:
                self._updates = ClientUpdates(init_info.bus, client, timeout=init_info.timeout)
        except BaseException:
            self._publisher.close()
            raise

    @classmethod
    def trainer_init(
        cls,
        init_info: ShmbusTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: VllmSource | None = None,
    ) -> Self:
        """Publish the current weights, and attach the inference ranks; called on every rank."""
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Publish the next version and load it into every inference rank; called on every rank.

        In rank 0 UpdateRolledBackError means that every rank runs its previous weights, EngineError
        that a model is torn; WeightsError that the previous version stays in force.
        """
        version = self.version + 1
        if self._updates is None:
            self._publisher.publish(version=version)
            self.version = version
            return
        previous = RankRows(self._updates.bus).newest(self._timeout)
        try:
            self._publisher.publish(version=version)
            self.version = version
            self._updates.bring(version, None if previous is None else previous.version)
        finally:
            if previous is not None:
                previous.close()

    def shutdown(self) -> None:
        """Leave; the weights go with rank 0."""
        self._publisher.close()
