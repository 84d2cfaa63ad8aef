r"""What runs inside a rank of SGLang: weights from shared memory, as a custom loader.

    python -m sglang.launch_server ... \
        --custom-weight-loader shmbus.engines.sglang_loader.load

Nothing of SGLang is imported: it calls `load` with its model, whose `load_weights` slices and fuses
as it does with a checkpoint.

Invariants:

- Nothing is raised: SGLang does not catch what a custom loader raises, and its scheduler would end
  with every request in flight. What went wrong is in this rank's row, which the fleet believes.
- The row says that no whole version runs from before the first tensor until after the last.

Source: sglang/srt/model_executor/model_runner_components/weight_updater.py of SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shmbus.engines.planned import PlannedLoader
from shmbus.engines.sglang_order import Order, read_order
from shmbus.weights import Weights, WeightSubscriber

logger = logging.getLogger("sglang.shmbus")

#: Seconds to wait for the weights when a trainer says that they are there.
ATTACH_TIMEOUT_S = 30.0

#: One for each rank of this process; SGLang has one.
_subscribers: dict[tuple[str, str, int], WeightSubscriber] = {}
_loaders: weakref.WeakKeyDictionary[torch.nn.Module, PlannedLoader] = weakref.WeakKeyDictionary()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Do what the trainer says in the name of the first tensor."""
    try:
        if len(named_tensors) != 1:
            raise ValueError(f"expected one tensor, whose name is an order, got {named_tensors!r}")
        name, marker = named_tensors[0]
        order = read_order(name)
        subscriber = _subscriber(order, marker.device)
        if order.verb == "attach" or order.version is None:
            # A manifest that cannot be used is in the row by then, where the trainer reads it.
            with subscriber.latest(timeout=ATTACH_TIMEOUT_S) as weights:
                _loader(model, marker.device).prepare(weights)
        else:
            with subscriber.at(order.version) as weights:
                _load(_loader(model, marker.device), weights)
    except Exception:
        # Raised here, it would end SGLang's scheduler; the rows say what this rank runs.
        logger.exception("shmbus: new weights were not loaded")


def _subscriber(order: Order, device: torch.device) -> WeightSubscriber:
    key = (order.bus, order.server, order.rank)
    known = _subscribers.get(key)
    if known is not None and not known.removed:
        return known
    if known is not None:  # a trainer that was started again has made new weights
        known.close()
    label = f"{order.server} rank {order.rank}"
    _subscribers[key] = WeightSubscriber(order.bus, device=device, label=label)
    return _subscribers[key]


def _loader(model: Any, device: torch.device) -> PlannedLoader:
    known = _loaders.get(model)
    if known is None:
        # What SGLang does to quantised weights it does after this, where it is not seen.
        plain = getattr(model, "quant_config", None) is None
        known = _loaders[model] = PlannedLoader(
            model,
            device,
            lambda tensors, modules: model.load_weights(tensors),
            may_plan=lambda module: plain,
            logger=logger,
        )
    return known


def _load(loader: PlannedLoader, weights: Weights) -> None:
    weights.report_loading()
    try:
        loader.load(weights)
    except Exception as error:
        weights.report_refused(f"load: {type(error).__name__}: {error}")
        raise
    _forget_encoded()
    weights.report_applied()


def _forget_encoded() -> None:
    """Drop encoder outputs of old weights, which SGLang's flush keeps."""
    schedule = sys.modules.get("sglang.srt.managers.mm_schedule")
    cache = getattr(schedule, "embedding_cache", None)
    if cache is not None:
        cache.clear()
