"""Load of a version into an engine's rank: by the engine's own loader once, then by a plan.

Invariants: a version's memory is registered before its first byte is copied; in any failure a torn
model never counts as whole; a plan is used only after its result equalled the loader's, bit for
bit.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from shmbus.tensors.copy_plan import CopyPlan
from shmbus.tensors.views import count_writes
from shmbus.weights import Weights
from shmbus.weights.load_plan import LoadPlan, LoadRecorder, Recorded
from shmbus.weights.loading import LoadCache
from shmbus.weights.plan_check import comparable
from shmbus.weights.subscriber import Place

#: An engine's loader: tensors by name, and their target modules; None for every module.
EngineLoad = Callable[
    [Iterator[tuple[str, torch.Tensor]], Sequence[torch.nn.Module] | None], object
]

#: Method of a load: the engine's loader, or its recorded plan.
How = Literal["loader", "plan"]

#: Limit of tensors named in a message.
SHOWN = 8


class PlannedLoader:
    """Bring versions into one model of an engine."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        load: EngineLoad,
        *,
        may_plan: Callable[[torch.nn.Module], bool] = lambda module: True,
        logger: logging.Logger | None = None,
    ) -> None:
        self._model, self._device, self._load = model, device, load
        self._may_plan = may_plan
        self._logger = logger or logging.getLogger("shmbus.engines")
        self._plan: LoadPlan | None = None
        #: Copies that compare with the slot while the engine serves.
        self.comparable: list[Recorded] = []
        #: The model's whole version.
        self.has: Place | None = None
        self._preparing: threading.Thread | None = None
        #: Sorted copies of a plan, by slot.
        self._ready: weakref.WeakKeyDictionary[LoadCache, tuple[LoadPlan, CopyPlan]] = (
            weakref.WeakKeyDictionary()
        )

    def prepare_aside(self, weights: Weights) -> None:
        """Prepare in a thread, while the engine generates; the lease lasts for as long."""
        if self._preparing is not None and self._preparing.is_alive():
            weights.close()
            return
        self._preparing = threading.Thread(
            target=self._prepare_aside, args=(weights,), name="shmbus-prepare", daemon=True
        )
        self._preparing.start()

    def await_prepared(self) -> None:
        """Wait for the preparing thread."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _prepare_aside(self, weights: Weights) -> None:
        try:
            with weights:
                if self._device.type != "cpu":
                    torch.get_device_module(self._device).set_device(self._device)
                self.prepare(weights)
        except Exception as error:
            # `load` meets the error again and reports it.
            self._logger.error("shmbus: version %d: %s", weights.version, error)

    def prepare(self, weights: Weights) -> None:
        """Do everything possible before the engine pauses."""
        weights.prepare(self._device)
        plan = self.usable(weights)
        if plan is not None:
            self._copies(weights, plan)
        if self._device.type != "cpu":
            # A second stream may use the results.
            torch.get_device_module(self._device).current_stream(self._device).synchronize()

    def load(self, weights: Weights) -> How:
        """Bring the model to a version; return the method after every byte arrived."""
        self.await_prepared()
        weights.prepare(self._device)
        plan = self.usable(weights)
        self.has = None  # until the model is whole again
        if plan is None:
            self._record(weights)
        else:
            self._copies(weights, plan).copy()
            if plan.refused:
                self._load(_tensors(weights, self._device, plan.refused), plan.modules)
        if self._device.type != "cpu":
            # Finish the copies before the slot may be rewritten.
            torch.get_device_module(self._device).synchronize(self._device)
        # Torch counts no write through `.data` or by address.
        count_writes([*self._model.parameters(), *self._model.buffers()])
        self.has = weights.place
        return "loader" if plan is None else "plan"

    @property
    def nbytes(self) -> int:
        """Bytes that a version's copies move, as far as a plan stands for the loader."""
        return 0 if self._plan is None else self._plan.nbytes

    def usable(self, weights: Weights) -> LoadPlan | None:
        """Return the plan where the model and a version still fit."""
        plan = self._plan
        if plan is None or weights.lasting() is None:
            return None
        return plan if plan.still(self._model, weights.manifest) else None

    def _copies(self, weights: Weights, plan: LoadPlan) -> CopyPlan:
        """Return the plan's copies out of a version's slot, sorted once for each slot."""
        lasting = weights.lasting()
        assert lasting is not None
        cache, tensors = lasting
        known = self._ready.get(cache)
        if known is None or known[0] is not plan:
            known = self._ready[cache] = plan, CopyPlan(plan.pairs(tensors))
        return known[1]

    def _record(self, weights: Weights) -> None:
        lasting = weights.lasting()
        if lasting is None:
            self._load(_tensors(weights, self._device), None)
            return
        recorder = LoadRecorder(self._model, weights.manifest)
        with recorder:
            self._load(_tensors(weights, self._device, recorder=recorder), None)
        self._plan = plan = recorder.plan(lasting[1], self._may_plan)
        self.comparable = comparable(plan, lasting[1])
        if rounded := plan.rounded():
            first = next(iter(rounded))
            self._logger.warning(
                "shmbus: %d tensors are published in another dtype than the engine's, and each "
                "load rounds them to nearest; the first, %r, from %s to %s: publish in the "
                "engine's dtype, which rounding='stochastic' needs too",
                len(rounded),
                first,
                *rounded[first],
            )
        again = ", ".join(plan.refused[:SHOWN]) + (", ..." if len(plan.refused) > SHOWN else "")
        self._logger.info(
            "shmbus: %d copies of %d bytes stand for the engine's loader from now on%s",
            len(plan.copies),
            plan.nbytes,
            f"; it still loads {len(plan.refused)} tensors, with which it computes: {again}"
            if again
            else "",
        )


def _tensors(
    weights: Weights,
    device: torch.device,
    only: Sequence[str] | None = None,
    recorder: LoadRecorder | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in checkpoint form, on the device."""
    wanted = None if only is None else set(only)
    for name in weights:
        if wanted is not None and weights.manifest.root(name) not in wanted:
            continue
        view = weights[name]
        if recorder is None:
            yield name, view.to(device)
            continue
        offset = int(view.storage_offset()) * view.element_size()
        recorder.add_source(view, offset)
        moved = view.to(device)
        if moved is not view and view.is_contiguous():
            recorder.add_source(moved, offset)
        yield name, moved


def tail(name: str) -> str:
    """Return the last module and the parameter of a tensor's name: ``embed_tokens.weight``."""
    return ".".join(name.split(".")[-2:])


def shared_parameters(model: torch.nn.Module, other: torch.nn.Module) -> set[str]:
    """Return the tails of the names of parameters in the memory of another model's parameters."""
    elsewhere = {each.data_ptr() for each in other.parameters() if each.numel()}
    return {tail(name) for name, each in model.named_parameters() if each.data_ptr() in elsewhere}
