"""Backend "shmbus" inside a vLLM worker: weights from shared memory.

Chosen by ``--weight-transfer-config '{"backend": "shmbus"}'``: the entry point
``vllm.general_plugins`` calls `register` in each process, which imports nothing else.

Invariants:

- Between start and finish nothing is raised: an exception in one worker leaves vLLM's answers out
  of step with its calls. This worker's row reports the failure, and the fleet reads the row.
- A failed load is never reported as applied, and the row reports it before vLLM gets an answer.
- The row reports a load from start to finish, and at no other time: an open update must be finished
  before the next start. vLLM's model owns memory throughout, except within `receive_weights`.

Source: vllm/distributed/weight_transfer/base.py and ipc_engine.py of vLLM 0.32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.worker.worker_base import WorkerBase

from shmbus.engines import rank_check
from shmbus.engines.rank_loader import PlannedLoader, shared_parameters, tail
from shmbus.engines.state_kinds import vllm_refusal
from shmbus.engines.vllm_plugin import LOAD_DRAFT, VERIFY
from shmbus.engines.vllm_share import share_engine
from shmbus.errors import ShmbusError
from shmbus.weights import ManifestError, Weights, WeightSubscriber
from shmbus.weights.errors import LOAD_CODE, MANIFEST_CODE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

logger = logging.getLogger("vllm.shmbus")

#: Seconds to wait for weights announced by a trainer.
ATTACH_TIMEOUT_S = 30.0


@dataclass
class ShmbusInitInfo(WeightTransferInitInfo):
    """First message of a trainer."""

    bus: str
    server: str = "vllm"
    carrier: str = "auto"
    directory: str | None = None
    #: Whether the weights are those of the draft model.
    draft: bool = False


@dataclass
class ShmbusUpdateInfo(WeightTransferUpdateInfo):
    """Version to load."""

    version: int


class _Target:
    """A model of this worker, and the update of its weights."""

    def __init__(self) -> None:
        self.subscriber: WeightSubscriber | None = None
        self.attached: ShmbusInitInfo | None = None
        self.loading: Weights | None = None
        self.updating = False
        self.problem = ""
        self.code = LOAD_CODE

    def let_go(self) -> None:
        """Return the lease of the version being loaded."""
        if self.loading is not None:
            self.loading.close()
            self.loading = None

    def close(self) -> None:
        """Leave the weights."""
        self.let_go()
        if self.subscriber is not None:
            self.subscriber.close()
            self.subscriber = None


class ShmbusWeightTransferEngine(WeightTransferEngine[ShmbusInitInfo, ShmbusUpdateInfo]):
    """Load versions of a bus's weights into one vLLM worker."""

    init_info_cls = ShmbusInitInfo
    update_info_cls = ShmbusUpdateInfo

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._shared = share_engine(vllm_config, model)
        self._of_engine, self._of_draft = _Target(), _Target()
        self._target = self._of_engine
        self._loaders: WeakKeyDictionary[torch.nn.Module, PlannedLoader] = WeakKeyDictionary()

    def init_transfer_engine(self, init_info: ShmbusInitInfo) -> None:
        """Attach to the weights, check the newest version's manifest, begin to look it up."""
        target = self._of_draft if init_info.draft else self._of_engine
        known = target.subscriber
        if known is None or target.attached != init_info or known.removed:
            known = self._attach(target, init_info)
        # By then the row names an unusable version, and the trainer reads the row.
        try:
            newest = known.latest(timeout=ATTACH_TIMEOUT_S)
            refusal = self._refusal
            if refusal:
                with newest:
                    newest.report_refused(refusal, code=MANIFEST_CODE)
            elif init_info.draft:
                newest.close()
            else:
                self._loader.prepare_aside(newest)
        except ShmbusError as error:
            logger.error("shmbus: %s", error)
        if target.updating:
            self._mark()  # a new row, for an update begun before

    def _attach(self, target: _Target, init_info: ShmbusInitInfo) -> WeightSubscriber:
        self._await_prepared()
        target.close()
        target.subscriber = WeightSubscriber(
            init_info.bus,
            device=self.device,
            carrier=init_info.carrier,
            directory=init_info.directory,
            label=f"{init_info.server} rank {self._rank}",
        )
        target.attached = init_info
        return target.subscriber

    @property
    def _rank(self) -> int:
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def verify(self, asked: object) -> dict[str, Any]:
        """Compare a slice of this rank's weights with the slot of the version in force."""
        target = self._of_engine
        return rank_check.answer(
            asked,
            self._rank,
            None if target.attached is None else target.attached.bus,
            target.subscriber,
            self._loader,
            updating=target.updating,
        )

    def load_draft(self, model: torch.nn.Module, model_config: Any, version: int) -> None:
        """Load a version into the draft model, between two steps of the engine."""
        shared = shared_parameters(model, self.model)
        self._target = self._of_draft
        self.set_weight_update_target(model, model_config)
        try:
            self.start_weight_update()
            self.receive_weights(ShmbusUpdateInfo(version), shared)
            self.finish_weight_update()
        finally:
            self._target = self._of_engine
            self.reset_weight_update_target()

    def start_weight_update(self) -> None:
        """Record an open update; vLLM's model stays untouched until the version is known."""
        self._target.problem = ""
        self._target.updating = True
        self._mark()

    def receive_weights(self, update_info: ShmbusUpdateInfo, shared: Collection[str] = ()) -> None:
        """Load a version; vLLM slices, fuses and quantises it as a checkpoint."""
        target = self._target
        target.let_go()
        if target.subscriber is None:
            self._fail("the trainer has not said which bus (init_weight_transfer_engine)")
            return
        if self._refusal:
            self._fail(self._refusal, MANIFEST_CODE)
            return
        try:
            target.loading = weights = target.subscriber.at(update_info.version)
        except Exception as error:  # also for an invalid version number: nothing may be raised here
            manifest = isinstance(error, ManifestError)
            self._fail(str(error), MANIFEST_CODE if manifest else LOAD_CODE)
            self._mark()  # the row may already report the refusal, and the update is still open
            return
        weights.report_loading()
        named = [each.name for each in weights.manifest.tensors if tail(each.name) in shared]
        if named:
            self._fail(f"shared with the target model: {', '.join(named)}; publish without them")
            return
        self._guard("load", lambda: self._loader.load(weights))

    @property
    def _refusal(self) -> str:
        if self._shared is not None:
            return (
                f"the server shares its parameters on bus {self._shared.bus!r}; change them there, "
                "by EngineFleet.step"
            )
        return vllm_refusal(self.vllm_config, on_cpu=self.device.type == "cpu")

    @property
    def _loader(self) -> PlannedLoader:
        """Return the loader of the current model: the engine's, or a draft's."""
        known = self._loaders.get(self.model)
        if known is None:
            known = PlannedLoader(
                self.model, self.device, self._load, may_plan=_is_plain, logger=logger
            )
            self._loaders[self.model] = known
        return known

    def _load(
        self, tensors: Iterator[tuple[str, torch.Tensor]], modules: Sequence[torch.nn.Module] | None
    ) -> None:
        """Make vLLM load tensors in checkpoint form, layer by layer, and process filled layers."""
        model = self.model
        # Attention comes last: its processing uses tensors of earlier modules.
        parts = [model] if modules is None else _with_attention(model, modules)
        for part in parts:
            initialize_layerwise_reload(part)
        try:
            model.load_weights(tensors)
        finally:  # also after an error: until then the parameters own no memory
            for part in parts:
                finalize_layerwise_reload(part, self.model_config)

    def finish_weight_update(self) -> None:
        """Report this worker's version in the row."""
        target = self._target
        if target.loading is None:
            self._fail("an update ended to which no version had come")
            self._say(lambda newest: newest.report_refused(target.problem, code=target.code))
        elif target.problem:
            target.loading.report_refused(target.problem, code=target.code)
        else:
            target.loading.report_applied()
        target.let_go()
        target.updating = False

    def _mark(self) -> None:
        """Report in the row: no whole version from here on; the new version follows later."""
        self._say(Weights.report_loading)

    def _say(self, what: Callable[[Weights], None]) -> None:
        """Report in the row through a lease of the newest version."""
        subscriber = self._target.subscriber
        if subscriber is None:
            return
        try:
            with subscriber.latest(timeout=0) as newest:
                what(newest)
        except ShmbusError as error:
            logger.warning("shmbus: %s", error)

    def _guard(self, step: str, action: Any) -> None:
        """Run a step of vLLM; keep its exception for the row."""
        try:
            action()
        except Exception as error:
            self._fail(f"{step}: {type(error).__name__}: {error}", cause=error)

    def _fail(
        self, problem: str, code: int = LOAD_CODE, cause: BaseException | None = None
    ) -> None:
        """Keep the first failure for the row: later failures are often its consequences."""
        logger.error("shmbus: new weights: %s", problem, exc_info=cause)
        if not self._target.problem:
            self._target.problem, self._target.code = problem, code

    def _await_prepared(self) -> None:
        for loader in self._loaders.values():
            loader.await_prepared()

    def shutdown(self) -> None:
        """Leave the weights."""
        self._await_prepared()
        self._of_engine.close()
        self._of_draft.close()
        if self._shared is not None:
            self._shared.close()


def _verify(worker: Any, asked: object) -> dict[str, Any]:
    engine: ShmbusWeightTransferEngine = worker.weight_transfer_engine
    return engine.verify(asked)


def _load_draft(worker: Any, version: int) -> bool:
    """Return False without a draft model."""
    model, config = worker.get_draft_model(), worker.speculative_config
    if model is None or config is None:
        return False
    engine: ShmbusWeightTransferEngine = worker.weight_transfer_engine
    with set_current_vllm_config(worker.vllm_config):
        engine.load_draft(model, config.draft_model_config, version)
    return True


# `/collective_rpc` of vLLM's server finds methods of the worker by name.
setattr(WorkerBase, VERIFY, _verify)
setattr(WorkerBase, LOAD_DRAFT, _load_draft)


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether vLLM uses a module's weights unchanged, without quantised computation."""
    method = getattr(module, "quant_method", None)
    return method is None or type(method).__name__.startswith("Unquantized")


def _with_attention(
    model: torch.nn.Module, modules: Sequence[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Return modules, followed by the attention layers processed last by vLLM."""
    last = [each for each in model.modules() if is_deferred_attention_layer(each)]
    return [each for each in modules if each not in last] + last
