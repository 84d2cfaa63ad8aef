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

from collections.abc import Iterator, Mapping
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
    Slice,
    WeightPublisher,
    WeightsError,
    WeightSource,
)
from shmbus.weights.publisher import PUBLISH_TIMEOUT_S
from shmbus.weights.source import dtype_name

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["GatheredSource", "ShmbusTrainerInitInfo", "ShmbusTrainerWeightTransferEngine"]

register()


@dataclass
class ShmbusTrainerInitInfo(TrainerInitInfo):
    """How a trainer's rank publishes.

    Attributes
    ----------
    bus : str
        The bus that the weights belong to; that need not exist.
    rank : int
        This process's among those that publish together; by keyword, as vLLM has it.
    world_size : int
        How many publish together.
    carrier, device : str
        As for `WeightPublisher`; a directory of checkpoints has no place here.
    patches : bool or float
        As for `WeightPublisher`.
    version : int
        Of the weights as they are now; each `send_weights` sends the next.
    timeout : float
        Seconds to wait for ranks and readers.
    """

    backend: ClassVar[str] = BACKEND

    bus: str
    world_size: int = 1
    carrier: str = "auto"
    device: str = "cpu"
    patches: bool | float = False
    version: int = 0
    timeout: float = PUBLISH_TIMEOUT_S


class GatheredSource:
    """A source of vLLM's as one of ours: whole tensors, each written by one of the ranks.

    Iterating a sharded model gathers each tensor, on every rank. `ModuleSource` of
    `shmbus.weights` does not: each rank writes its own shard.

    Parameters
    ----------
    source : vllm WeightSource
        All ranks hold all of it.

    Raises
    ------
    WeightsError
        It is split over the ranks, so that this one cannot tell who has what.
    """

    def __init__(self, source: VllmSource) -> None:
        if source.held_names() is not None:
            raise WeightsError(
                f"{type(source).__name__}: expected a source whose ranks hold the whole model "
                "(held_names() of None), got one that is split; pass a WeightSource of "
                "shmbus.weights, whose ranks write what they have"
            )
        self._source = source

    def params(self) -> list[ParamMeta]:
        """Return all tensors, by the source's metadata."""
        return [
            ParamMeta(each.name, dtype_name(each.dtype), tuple(each.shape))
            for each in self._source.metadata()
        ]

    def aliases(self) -> Mapping[str, str]:
        """Return nothing: vLLM's sources name a tied tensor once."""
        return {}

    def slices(self) -> Mapping[str, Slice]:
        """Return nothing: vLLM's sources name whole tensors."""
        return {}

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        """Yield this rank's share of the tensors; every one is gathered.

        Parameters
        ----------
        rank, world_size : int
            Of the publisher.

        Yields
        ------
        LocalPiece
        """
        written = [0] * world_size
        for name, tensor in self._source:
            lightest = written.index(min(written))
            written[lightest] += tensor.numel() * tensor.element_size()
            if lightest == rank:
                yield LocalPiece(name, (0,) * tensor.dim(), tensor.detach())


class ShmbusTrainerWeightTransferEngine(TrainerWeightTransferEngine[ShmbusTrainerInitInfo]):
    """Publishes a source's weights, and brings them to the servers behind a client.

    Parameters
    ----------
    init_info : ShmbusTrainerInitInfo
        How.
    client : VLLMWeightSyncClient
        Used by rank 0 alone.
    source : WeightSource
        Of `shmbus.weights`, or one of vLLM's.

    Raises
    ------
    EngineError
        Rank 0: an inference rank cannot read these weights, or they do not fit its model. Nothing
        was touched.
    WeightsError
        They cannot be published; see `WeightPublisher`.
    ValueError
        There is no source.
    """

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
        #: What was published last.
        self.version = init_info.version
        self._publisher = WeightPublisher(
            init_info.bus,
            source if isinstance(source, WeightSource) else GatheredSource(source),
            carrier=init_info.carrier,
            device=init_info.device,
            rank=init_info.rank,
            world_size=init_info.world_size,
            patches=init_info.patches,
            timeout=init_info.timeout,
        )
        self._updates: ClientUpdates | None = None
        try:
            # Ranks check a manifest against their model before anything is touched.
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
        """Publish the weights as they are, and have each inference rank attach and check them.

        Parameters
        ----------
        init_info, client, source
            As for the class. Every trainer rank calls this.

        Returns
        -------
        ShmbusTrainerWeightTransferEngine
        """
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Publish the next version and load it into all inference ranks; every rank calls this.

        Raises
        ------
        UpdateRolledBackError
            Rank 0: an inference rank could not take it; all of them run what they ran before.
        EngineError
            Rank 0: nor could that be loaded again. That server's model is not whole: keep it
            paused.
        WeightsError
            It could not be published; the version before stays in force.
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
