r"""Loader inside a rank of SGLang: weights from shared memory, as a custom loader.

    python -m sglang.launch_server ... \
        --custom-weight-loader shmbus.engines.sglang_loader.load

The module imports nothing of SGLang: SGLang calls `load` with its model, whose `load_weights`
slices and fuses as for a checkpoint.

Invariants:

- Nothing is raised: SGLang does not catch a custom loader's exceptions, and its scheduler would end
  with every request in flight. This rank's row reports the failure, and the fleet reads the row.
- The row reports no whole version from before the first tensor until after the last.

Source: sglang/srt/model_executor/model_runner_components/weight_updater.py of SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shmbus.engines.rank_loader import PlannedLoader
from shmbus.engines.sglang_order import Order, read_order
from shmbus.weights import Weights, WeightSubscriber

logger = logging.getLogger("sglang.shmbus")

#: Seconds to wait for weights announced by a trainer.
ATTACH_TIMEOUT_S = 30.0

#: An entry per rank in the process; SGLang runs a single rank.
_subscribers: dict[tuple[str, str, int], WeightSubscriber] = {}
_loaders: weakref.WeakKeyDictionary[torch.nn.Module, PlannedLoader] = weakref.WeakKeyDictionary()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Execute the order in the first tensor's name."""
    try:
        if len(named_tensors) != 1:
            raise ValueError(f"expected one tensor, whose name is an order, got {named_tensors!r}")
        name, marker = named_tensors[0]
        order = read_order(name)
        subscriber = _subscriber(order, marker.device)
        if order.verb == "attach" or order.version is None:
            # An unusable manifest is in the row by then, and the trainer reads the row.
            with subscriber.latest(timeout=ATTACH_TIMEOUT_S) as weights:
                _loader(model, marker.device).prepare(weights)
        else:
            with subscriber.at(order.version) as weights:
                _load(_loader(model, marker.device), weights)
    except Exception:
        # Raised here, the error would end SGLang's scheduler; the rows show this rank's version.
        logger.exception("shmbus: new weights were not loaded")


def _subscriber(order: Order, device: torch.device) -> WeightSubscriber:
    key = (order.bus, order.server, order.rank)
    known = _subscribers.get(key)
    if known is not None and not known.removed:
        return known
    if known is not None:  # a restarted trainer created new weights
        known.close()
    label = f"{order.server} rank {order.rank}"
    _subscribers[key] = WeightSubscriber(order.bus, device=device, label=label)
    return _subscribers[key]


def _loader(model: Any, device: torch.device) -> PlannedLoader:
    known = _loaders.get(model)
    if known is None:
        # SGLang processes quantised weights later, beyond the recorder's view.
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
    """Drop encoder outputs of old weights, which survive SGLang's flush."""
    schedule = sys.modules.get("sglang.srt.managers.mm_schedule")
    cache = getattr(schedule, "embedding_cache", None)
    if cache is not None:
        cache.clear()
