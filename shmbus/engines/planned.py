"""How an engine's rank loads a version: by the engine's own loader once, then by what that did.

Invariants: the memory of a version is registered before its first byte is copied; whatever happens,
a model that is not whole is never taken for one; a plan is used only after it gave what the loader
gave, bit for bit.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from shmbus.tensors.copy_plan import CopyPlan
from shmbus.weights import Weights
from shmbus.weights.load_plan import LoadPlan, LoadRecorder
from shmbus.weights.loading import LoadCache

__all__ = ["EngineLoad", "PlannedLoader"]

logger = logging.getLogger("shmbus.engines")

#: An engine's loader: tensors by name, and the modules that they go into; None for all.
EngineLoad = Callable[
    [Iterator[tuple[str, torch.Tensor]], Sequence[torch.nn.Module] | None], object
]

#: Tensors that a message names.
SHOWN = 8


class PlannedLoader:
    """Brings versions into one model of an engine."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        load: EngineLoad,
        *,
        may_plan: Callable[[torch.nn.Module], bool] = lambda module: True,
    ) -> None:
        self._model, self._device, self._load = model, device, load
        self._may_plan = may_plan
        self._plan: LoadPlan | None = None
        self._ready: weakref.WeakKeyDictionary[LoadCache, tuple[LoadPlan, CopyPlan]] = (
            weakref.WeakKeyDictionary()
        )

    def prepare(self, weights: Weights) -> None:
        """Do all that can be done before the engine pauses."""
        weights.prepare(self._device)
        plan = self._usable(weights)
        if plan is not None:
            self._copies(weights, plan)
        else:
            with LoadRecorder(self._model, weights.manifest):
                torch.empty(0)  # whatever torch imports for it, which takes seconds, it does now

    def load(self, weights: Weights) -> Literal["loader", "plan"]:
        """Bring the model to a version; every byte is there when this returns how it came."""
        weights.prepare(self._device)
        plan = self._usable(weights)
        if plan is None:
            self._record(weights)
        else:
            self._copies(weights, plan).copy()
            if plan.refused:
                self._load(_tensors(weights, self._device, plan.refused), plan.modules)
        if self._device.type != "cpu":
            # The copies are done before the slot may be written again.
            torch.get_device_module(self._device).synchronize(self._device)
        return "loader" if plan is None else "plan"

    @property
    def nbytes(self) -> int:
        """Bytes that a version's copies move, as far as a plan stands for the loader."""
        return 0 if self._plan is None else self._plan.nbytes

    def _usable(self, weights: Weights) -> LoadPlan | None:
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
        again = ", ".join(plan.refused[:SHOWN]) + (", ..." if len(plan.refused) > SHOWN else "")
        logger.info(
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
    """Yield tensors as a checkpoint has them, on the device."""
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
